# SPDX-License-Identifier: Apache-2.0
"""Checks of what a collective is given, the same in every backend."""

from __future__ import annotations

from typing import NoReturn

import torch

_REDUCIBLE = frozenset(
    {
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.int8,
    }
)


def check_shards(full: torch.Tensor, shard: torch.Tensor, world: int, label: str) -> None:
    """Check the pair of tensors of a gather or a reduction.

    Raises:
        ValueError: They do not fit together; the message says how.
    """
    # One expression, since this runs for every bucket of every step.
    if (
        full.numel() != world * shard.numel()
        or full.dtype is not shard.dtype
        or full.dim() != 1
        or shard.dim() != 1
        or not full.is_contiguous()
        or not shard.is_contiguous()
        or full.device != shard.device
    ):
        _refuse_shards(full, shard, world, label)


def _refuse_shards(full: torch.Tensor, shard: torch.Tensor, world: int, label: str) -> NoReturn:
    if full.dtype is not shard.dtype:
        wrong = f"one dtype, got {full.dtype} (full) and {shard.dtype} (shard)"
    elif full.device != shard.device:
        wrong = f"one device, got {full.device} (full) and {shard.device} (shard)"
    elif full.dim() != 1 or shard.dim() != 1:
        wrong = f"1-D tensors, got shapes {tuple(full.shape)} (full) and {tuple(shard.shape)}"
    elif full.numel() != world * shard.numel():
        wrong = (
            f"a full buffer of {world} x {shard.numel()} elements (world x shard), "
            f"got {full.numel()}"
        )
    else:
        wrong = f"contiguous tensors, got strides {full.stride()} (full) and {shard.stride()}"
    raise ValueError(f"{label}: expected {wrong}. Pass buffers of one BucketLayout.")


def check_contiguous(tensor: torch.Tensor, label: str) -> None:
    """Check the tensor of a broadcast or an all-reduce.

    Raises:
        ValueError: Its elements do not lie one after the other.
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"{label}: expected a contiguous tensor, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}. Send a contiguous copy and copy it back."
        )


def check_reducible(tensor: torch.Tensor, op: str, label: str) -> None:
    """Check that a tensor's dtype has sums (or, for integers and reals, maxima) on every backend.

    Raises:
        ValueError: It has none.
    """
    if tensor.dtype not in _REDUCIBLE or (op != "sum" and tensor.is_complex()):
        raise ValueError(
            f"{label}: expected a dtype that has a {op}, got {tensor.dtype}. "
            "Reduce in float32 (MixedPrecisionPolicy(reduce_dtype=torch.float32))."
        )


def check_op(op: str, label: str) -> None:
    """Check the name of a reduction.

    Raises:
        ValueError: It is not sum, max or min.
    """
    if op not in ("sum", "max", "min"):
        raise ValueError(f"{label}: expected op 'sum', 'max' or 'min', got {op!r}.")


def check_src(src: int, world: int, label: str) -> None:
    """Check the source rank of a broadcast.

    Raises:
        ValueError: The group has no such rank.
    """
    if not 0 <= src < world:
        raise ValueError(
            f"{label}: expected a source rank in [0, {world}), got {src}. "
            "Pass a rank of the group, not of the job."
        )

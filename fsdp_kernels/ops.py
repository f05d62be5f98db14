# SPDX-License-Identifier: Apache-2.0
"""Pick the implementation of each kernel: Triton for CUDA tensors, C++ for CPU tensors.

Where the C++ module was not built, CPU tensors take `triton_ops.reference`: same results, more
passes over memory. What each kernel computes is spelled in that module's docstrings.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp_kernels import _ext
from triton_ops import _common, reference
from triton_ops._common import AdamShard, FragmentTable

_CPP = _ext.cpu()
_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}


def pack(
    grads: Sequence[Tensor | None], starts: Sequence[int], out: Tensor, *, accumulate: bool = False
) -> None:
    """Cast gradients into their segments of a flat bucket; see `triton_ops.reference.pack`."""
    if out.is_cuda:
        from triton_ops.pack import pack as on_device

        return on_device(grads, starts, out, accumulate=accumulate)
    if _CPP is None:
        return reference.pack(grads, starts, out, accumulate=accumulate)
    _common.check_pack("pack", grads, starts, out)
    # The list keeps copies of gradients with gaps alive until the kernel has read them.
    dense = [None if grad is None else grad.contiguous() for grad in grads]
    sources = [
        (grad.data_ptr(), _CODES[grad.dtype], start, grad.numel())
        for grad, start in zip(dense, starts, strict=True)
        if grad is not None
    ]
    to = (out.data_ptr(), _CODES[out.dtype])
    _CPP.pack(sources, to, out.numel(), accumulate, torch.get_num_threads())


def norm(grads: Tensor, table: FragmentTable) -> Tensor:
    """Sum squares and count non-finite elements; see `triton_ops.reference.norm`."""
    if grads.is_cuda:
        from triton_ops.norm import norm as on_device

        return on_device(grads, table)
    if _CPP is None:
        return reference.norm(grads, table)
    _common.check_flat("norm grads", grads, grads.numel(), grads.device)
    where = (grads.data_ptr(), _CODES[grads.dtype])
    sums = _CPP.norm(where, grads.numel(), _rows(table.host()), torch.get_num_threads())
    return torch.tensor(sums, dtype=torch.float64)


def adam_coefs(
    hyper: Tensor, step: Tensor, used: Tensor, skip: Tensor | None, out: Tensor, *, decoupled: bool
) -> None:
    """Advance step counts, fill coefficients; see `triton_ops.reference.adam_coefs`."""
    if out.is_cuda:
        from triton_ops.adam import adam_coefs as on_device

        return on_device(hyper, step, used, skip, out, decoupled=decoupled)
    if _CPP is None:
        return reference.adam_coefs(hyper, step, used, skip, out, decoupled=decoupled)
    _common.check_coefs("adam_coefs", hyper, step, used, skip, out)
    skipped = skip is not None and bool(skip)
    pointers = step.data_ptr(), used.data_ptr(), skipped, out.data_ptr()
    _CPP.adam_coefs(_rows(hyper), *pointers, decoupled)


def adam(
    shard: AdamShard,
    table: FragmentTable,
    coefs: Tensor,
    factor: Tensor,
    *,
    scale: float = 1.0,
    decoupled: bool = True,
    maximize: bool = False,
) -> None:
    """Update a shard in one pass; see `triton_ops.reference.adam`."""
    if shard.master.is_cuda:
        from triton_ops.adam import adam as on_device

        return on_device(
            shard, table, coefs, factor, scale=scale, decoupled=decoupled, maximize=maximize
        )
    if _CPP is None:
        return reference.adam(
            shard, table, coefs, factor, scale=scale, decoupled=decoupled, maximize=maximize
        )
    _common.check_adam("adam", shard, table, coefs, factor)
    grad_scale = factor.item() * (-scale if maximize else scale)
    tables = _rows(table.host()), _rows(coefs)
    _CPP.adam(_buffers(shard), *tables, grad_scale, decoupled, torch.get_num_threads())


def _rows(table: Tensor) -> tuple[int, int]:
    return table.data_ptr(), table.shape[0]


def _buffers(shard: AdamShard) -> tuple[int, ...]:
    """Spell a shard as the numbers that the C++ `adam` takes."""
    master, largest, params = shard.master, shard.max_exp_avg_sq, shard.params
    return (
        shard.grads.data_ptr(),
        _CODES[shard.grads.dtype],
        master.data_ptr(),
        _CODES[master.dtype],
        shard.exp_avg.data_ptr(),
        shard.exp_avg_sq.data_ptr(),
        0 if largest is None else largest.data_ptr(),
        0 if params is None else params.data_ptr(),
        0 if params is None else _CODES[params.dtype],
        master.numel(),
    )

# SPDX-License-Identifier: Apache-2.0
"""Squared norm and non-finite count of a flat shard's fragments, in Triton."""
# mypy: allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_ops import _common as common
from triton_ops._cast import widen
from triton_ops._fragments import FragmentTable

# Outside this range a float32 sum of squares has overflowed, or may have lost squares to underflow.
_TRUSTED_MIN = tl.constexpr(1e-30)
_TRUSTED_MAX = tl.constexpr(3.4e38)
_BLOCKS = 2  # device blocks per program: each thread then sums 16 elements


@triton.jit
def _partial(
    grads: tl.tensor, offsets: tl.tensor, mask: tl.tensor, WIDE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Sum the squares in WIDE, and count what is not finite."""
    g = widen(tl.load(grads + offsets, mask=mask, other=0.0), WIDE)
    bad = tl.where(tl.abs(g) < float("inf"), 0, 1)  # false for a NaN too
    return tl.sum(g * g, axis=0).to(tl.float64), tl.sum(bad, axis=0).to(tl.float64)


@triton.jit
def chunk_norm(
    grads: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the (sum of squares, non-finite count) of one chunk, both float64."""
    # As in adam: the mask of the block stops at a multiple of ALIGN, or its loads turn scalar.
    even = tl.multiple_of(start + (stop - start) // ALIGN * ALIGN, ALIGN)
    offsets = start + tl.arange(0, BLOCK)
    total, bad = _partial(grads, offsets, offsets < even, WIDE)
    if even < stop:
        rest = even + tl.arange(0, ALIGN)
        rest_total, rest_bad = _partial(grads, rest, rest < stop, WIDE)
        total += rest_total
        bad += rest_bad
    if (total < _TRUSTED_MIN) | (total > _TRUSTED_MAX):
        # Rare, and the same for the whole program: 1e20 squared is finite in float64 only. The
        # gradients are in cache.
        all_offsets = start + tl.arange(0, BLOCK)
        total, _ = _partial(grads, all_offsets, all_offsets < stop, tl.float64)
    return total, bad


@triton.jit
def norm_kernel(
    grads: tl.tensor,  # [shard_numel]
    chunks: tl.tensor,  # int64 [n_chunks, 3]: start, stop, row
    partials: tl.tensor,  # float64 [n_chunks, 2]
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,  # float32, or float64 for float64 gradients
) -> None:
    """Write one chunk's (sum of squares, non-finite count); no atomics, so any run is the same."""
    pid = tl.program_id(0).to(tl.int64)
    start = tl.multiple_of(tl.load(chunks + pid * 3), ALIGN)
    stop = tl.load(chunks + pid * 3 + 1)
    total, bad = chunk_norm(grads, start, stop, ALIGN, BLOCK, WIDE)
    tl.store(partials + pid * 2, total)
    tl.store(partials + pid * 2 + 1, bad)


def norm_block(longest: int) -> int:
    """Return the elements of one program, and so of one partial sum."""
    return common.block_numel(longest, blocks=_BLOCKS)


def norm(grads: Tensor, table: FragmentTable) -> Tensor:
    """Sum the squares of the fragments' elements and count those that are not finite.

    ``(sum_j g_j**2, #{j: g_j is inf or nan})``: float32 within a chunk (float64 where that would
    overflow or underflow), float64 across chunks, always in the same order.

    Args:
        grads: Flat gradients [shard_numel], any float dtype.
        table: The fragments to look at; what lies between them never enters.

    Returns:
        float64 [2] on the gradients' device. No value is read on the host.
    """
    common.check_flat("triton norm grads", grads, grads.numel(), grads.device)
    common.check_table("triton norm", table, grads.numel())
    common.check_device("triton norm", grads)
    block = norm_block(table.max_numel)
    chunks = table.chunks(block, grads.device)
    if len(chunks) == 0:
        return torch.zeros(2, dtype=torch.float64, device=grads.device)
    partials = torch.empty(len(chunks), 2, dtype=torch.float64, device=grads.device)
    with common.on_device(grads):
        norm_kernel[(len(chunks),)](
            grads,
            chunks,
            partials,
            ALIGN=min(table.align_numel, common.VECTOR_BYTES // grads.element_size()),
            BLOCK=block,
            WIDE=tl.float64 if grads.dtype == torch.float64 else tl.float32,
            **common.LAUNCH_OPTIONS,
        )
    return partials.sum(dim=0)

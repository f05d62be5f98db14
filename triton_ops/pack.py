# SPDX-License-Identifier: Apache-2.0
"""Gradients into a flat bucket, in one launch per gradient dtype, in Triton.

The kernel reads a table of gradient pointers and a table of chunks. Both are cached on the device:
the caching allocator gives the same addresses step after step, so that a steady step uploads
nothing.
"""
# mypy: allow-untyped-decorators

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_ops import _common as common
from triton_ops import _peers
from triton_ops._cast import TL_DTYPES, narrow, widen
from triton_ops._fragments import MAX_ALIGN_NUMEL

_VECTOR_BYTES = tl.constexpr(common.VECTOR_BYTES)
_BLOCKS = 2  # device blocks per program


@triton.jit
def _move(
    source: tl.tensor,
    out: tl.tensor,
    index: tl.tensor,
    count: tl.tensor,
    readable: tl.tensor,
    ACCUMULATE: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Write ``out[index]`` for ``index < count``: the cast source, 0 from ``readable`` on."""
    mask = index < count
    value = widen(tl.load(source + index, mask=index < readable, other=0.0), WIDE)
    if ACCUMULATE:
        value = widen(tl.load(out + index, mask=mask, other=0.0), WIDE) + value
    tl.store(out + index, narrow(value, out.dtype.element_ty), mask=mask)


@triton.jit
def pack_kernel(
    out: tl.tensor,  # [full_numel]
    addresses: tl.tensor,  # int64 [n]: where each gradient lies; 0 means zeros
    chunks: tl.tensor,  # int64 [n_chunks, 4]: address row, gradient's element, start, stop
    DTYPE: tl.constexpr,  # of the gradients
    WIDE: tl.constexpr,  # float32, or float64 where a side is float64
    ACCUMULATE: tl.constexpr,
    ALIGN: tl.constexpr,  # elements of the narrower dtype in 16 bytes
    BLOCK: tl.constexpr,
) -> None:
    """Fill one chunk of the bucket from one gradient, or with zeros."""
    chunk = chunks + tl.program_id(0).to(tl.int64) * 4
    address = tl.load(addresses + tl.load(chunk))
    first = tl.load(chunk + 1)
    start = tl.load(chunk + 2)
    count = (tl.load(chunk + 3) - start).to(tl.int32)  # at most BLOCK
    readable = tl.where(address != 0, count, 0)
    source_type: tl.constexpr = tl.pointer_type(DTYPE)
    index = tl.arange(0, BLOCK)
    if (address % _VECTOR_BYTES == 0) & (first % ALIGN == 0) & (start % ALIGN == 0):
        source = tl.multiple_of(address.to(source_type), _VECTOR_BYTES)
        source += tl.multiple_of(first, ALIGN)
        target = out + tl.multiple_of(start, ALIGN)
        # As in adam: the mask of the block stops at a multiple of ALIGN.
        even = tl.multiple_of(count // ALIGN * ALIGN, ALIGN)
        even_readable = tl.multiple_of(readable // ALIGN * ALIGN, ALIGN)
        _move(source, target, index, even, even_readable, ACCUMULATE, WIDE)
        if even < count:
            rest = even + tl.arange(0, ALIGN)
            _move(source, target, rest, count, readable, ACCUMULATE, WIDE)
    else:
        plain = address.to(source_type) + first
        _move(plain, out + start, index, count, readable, ACCUMULATE, WIDE)


@lru_cache(maxsize=4096)
def _chunk_table(
    segments: tuple[tuple[int, int, int], ...], block: int, device: torch.device
) -> Tensor:
    """Split (row, start, stop) ranges of the bucket into chunks: int64 [n_chunks, 4]."""
    parts = []
    for row, start, stop in segments:
        starts = torch.arange(start, stop, block)
        stops = torch.clamp(starts + block, max=stop)
        parts.append(torch.stack((torch.full_like(starts, row), starts - start, starts, stops), 1))
    return torch.cat(parts).contiguous().to(device)


def _zero_segments(
    ranges: Sequence[tuple[int, int]], full_numel: int, row: int
) -> list[tuple[int, int, int]]:
    """List what the sorted ``ranges`` leave of the bucket; ragged heads apart, the rest aligned."""
    zeros, last = [], 0
    for start, stop in [*ranges, (full_numel, full_numel)]:
        if last < start:
            aligned = min(-(-last // MAX_ALIGN_NUMEL) * MAX_ALIGN_NUMEL, start)
            zeros += [(row, last, aligned), (row, aligned, start)]
        last = max(last, stop)
    return [segment for segment in zeros if segment[1] < segment[2]]


def pack(
    grads: Sequence[Tensor | None],
    starts: Sequence[int],
    out: Tensor,
    *,
    accumulate: bool = False,
) -> None:
    """Cast gradients into their segments of a flat bucket; zero the rest unless accumulating.

    ``out[start_i + j] = round(grad_i[j])``, or with ``accumulate``
    ``round(fp32(out[start_i + j]) + fp32(grad_i[j]))``; see `reference.pack`.

    Args:
        grads: Gradients in segment order, any shape, strides and float dtype; None for a missing
            one. A non-contiguous one is copied first. One that does not start at a multiple of 16
            bytes is read element by element.
        starts: First element of each segment in ``out``; multiples of 16 bytes keep stores wide.
        out: Flat bucket [full_numel] in the reduce dtype.
        accumulate: Add to what ``out`` holds.
    """
    common.check_pack("triton pack", grads, starts, out)
    common.check_device("triton pack", out)
    # Holds the contiguous copies until the launches are queued.
    present = [
        (grad.resolve_neg().contiguous(), start, start + grad.numel())
        for grad, start in zip(grads, starts, strict=True)
        if grad is not None and grad.numel()
    ]
    addresses = tuple(grad.data_ptr() for grad, _, _ in present)
    zeros = []
    if not accumulate:
        ranges = [(start, stop) for _, start, stop in present]
        zeros = _zero_segments(ranges, out.numel(), row=len(present))
    dtypes = {grad.dtype for grad, _, _ in present} or {out.dtype}
    for number, dtype in enumerate(sorted(dtypes, key=str)):
        segments = [
            (row, start, stop)
            for row, (grad, start, stop) in enumerate(present)
            if grad.dtype == dtype
        ]
        if number == 0:
            segments += zeros
        if segments:
            _launch(out, (*addresses, 0), tuple(segments), dtype, accumulate)


def _launch(
    out: Tensor,
    addresses: tuple[int, ...],
    segments: tuple[tuple[int, int, int], ...],
    dtype: torch.dtype,
    accumulate: bool,
) -> None:
    """Move the segments whose gradients have ``dtype``."""
    longest = max(stop - start for _, start, stop in segments)
    block = common.block_numel(longest, blocks=_BLOCKS)
    chunks = _chunk_table(segments, block, out.device)
    table = _peers.address_table(addresses, out.device, _peers.current_stream(out.device))
    narrowest = min(dtype.itemsize, out.element_size())
    with common.on_device(out):
        pack_kernel[(len(chunks),)](
            out,
            table,
            chunks,
            DTYPE=TL_DTYPES[dtype],
            WIDE=tl.float64 if torch.float64 in (dtype, out.dtype) else tl.float32,
            ACCUMULATE=accumulate,
            ALIGN=common.VECTOR_BYTES // narrowest,
            BLOCK=block,
            **common.LAUNCH_OPTIONS,
        )

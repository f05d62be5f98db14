# SPDX-License-Identifier: Apache-2.0
"""The sum over ranks of one rank's shard, over memory that ranks can address, in Triton.

A program takes one chunk of the shard and reads it in every rank's gradient bucket, through a
table of addresses. The sum is taken in registers and in rank order, so that it is the same bits on
every run. The kernel neither waits nor signals: the caller knows that the ranks' gradients are
complete.

Where the ranks' memory also has a multicast address, the NVLink switches can do the sum (sm_90 and
later): see `_multicast`. A choice at compile time.
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
from triton_ops._fragments import MAX_ALIGN_NUMEL, FragmentTable
from triton_ops._multicast import sum_in_switches
from triton_ops.norm import chunk_norm, norm, norm_block

_VECTOR_BYTES = tl.constexpr(common.VECTOR_BYTES)
# Up to this many ranks every load of a chunk is in flight at once; beyond, a loop keeps the
# registers of a thread bounded.
_MAX_UNROLLED = tl.constexpr(8)


@triton.jit
def pointer_at(
    addresses: tl.tensor, index: tl.tensor, DTYPE: tl.constexpr, ALIGNED: tl.constexpr
) -> tl.tensor:
    """Return the pointer at ``index`` of a table of addresses."""
    pointer = tl.load(addresses + index).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, _VECTOR_BYTES)
    return pointer


@triton.jit
def sum_ranks(
    peers: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    DTYPE: tl.constexpr,
    WORLD: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> tl.tensor:
    """Sum the elements ``offsets`` over the ranks, in rank order, rounding after each."""
    total = widen(
        tl.load(pointer_at(peers, 0, DTYPE, ALIGNED) + offsets, mask=mask, other=0.0), WIDE
    )
    if WORLD <= _MAX_UNROLLED:
        for rank in tl.static_range(1, WORLD):
            peer = pointer_at(peers, rank, DTYPE, ALIGNED)
            total += widen(tl.load(peer + offsets, mask=mask, other=0.0), WIDE)
    else:
        for rank in tl.range(1, WORLD, loop_unroll_factor=_MAX_UNROLLED):
            peer = pointer_at(peers, rank, DTYPE, ALIGNED)
            total += widen(tl.load(peer + offsets, mask=mask, other=0.0), WIDE)
    return total


@triton.jit
def _reduce(
    peers: tl.tensor,
    out: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    DTYPE: tl.constexpr,
    WORLD: tl.constexpr,
    WIDE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Write the sum of the elements ``offsets``."""
    total = sum_ranks(peers, offsets, mask, DTYPE, WORLD, WIDE, ALIGNED)
    _write(out, total, offsets, mask, WIDE, ACCUMULATE)


@triton.jit
def _write(
    out: tl.tensor,
    total: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    WIDE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
) -> None:
    """Write a sum, or add it to what is there."""
    if ACCUMULATE:
        total = widen(tl.load(out + offsets, mask=mask, other=0.0), WIDE) + total
    tl.store(out + offsets, narrow(total, out.dtype.element_ty), mask=mask)


@triton.jit
def reduce_kernel(
    peers: tl.tensor,  # int64 [WORLD]: where each rank's part of this shard lies
    out: tl.tensor,  # [shard_numel]
    chunks: tl.tensor,  # int64 [n_chunks, 3]: start, end of the norm's elements, end of the sum's
    partials: tl.tensor | None,  # float64 [n_partials, 2]
    n_partials: tl.int32,
    DTYPE: tl.constexpr,  # of the gradients
    WORLD: tl.constexpr,
    WIDE: tl.constexpr,  # float32, or float64 where a side is float64
    ACCUMULATE: tl.constexpr,
    ALIGNED: tl.constexpr,  # every address is a multiple of 16 bytes
    ALIGN: tl.constexpr,  # divides every start
    BLOCK: tl.constexpr,
    MULTICAST: tl.constexpr = False,  # peers holds one address, at which switches sum; whole words
) -> None:
    """Sum one chunk over the ranks; leave its norm's partial sums where one is wanted."""
    pid = tl.program_id(0).to(tl.int64)
    chunk = chunks + pid * 3
    start = tl.multiple_of(tl.load(chunk), ALIGN)
    end = tl.load(chunk + 2)
    # As in adam: the mask of the block stops at a multiple of ALIGN, or its accesses turn scalar.
    even = tl.multiple_of(start + (end - start) // ALIGN * ALIGN, ALIGN)
    offsets = start + tl.arange(0, BLOCK)
    if MULTICAST:
        total = sum_in_switches(tl.load(peers), start, even, DTYPE, BLOCK)
        _write(out, total, offsets, offsets < even, WIDE, ACCUMULATE)
    else:
        _reduce(peers, out, offsets, offsets < even, DTYPE, WORLD, WIDE, ACCUMULATE, ALIGNED)
    if not MULTICAST and even < end:
        rest = even + tl.arange(0, ALIGN)
        _reduce(peers, out, rest, rest < end, DTYPE, WORLD, WIDE, ACCUMULATE, ALIGNED)
    if partials is not None:  # noqa: SIM102 - the outer one is decided at compile time
        if pid < n_partials:
            # The sum is read back, from cache, by the code of `norm`, for its order of addition and
            # so its bits. NOTE: other threads of the program stored some of what a thread reads.
            tl.debug_barrier()
            stop = tl.load(chunk + 1)
            total, bad = chunk_norm(out, start, stop, ALIGN, BLOCK, WIDE)
            tl.store(partials + pid * 2, total)
            tl.store(partials + pid * 2 + 1, bad)


@lru_cache(maxsize=4096)
def _sum_chunks(
    table: FragmentTable | None, numel: int, block: int, device: torch.device
) -> tuple[Tensor, int]:
    """Split a whole shard into chunks: those of the table as `norm` has them, then the rest.

    A fragment's last chunk is summed up to the next aligned element, so that every chunk starts at
    one.

    Returns:
        int64 [n_chunks, 3] of (start, end of the norm's elements, end of the sum's), and how many
        of them have elements of the norm.
    """
    if table is None:
        table = FragmentTable.build(())
    align = table.align_numel
    chunks = table.chunks(block, "cpu")
    ends = torch.clamp((chunks[:, 1] + align - 1) // align * align, max=numel)
    parts = [torch.stack((chunks[:, 0], chunks[:, 1], ends), dim=1)]
    last = 0
    for start, stop in [*sorted(zip(table.starts, table.stops, strict=True)), (numel, numel)]:
        starts = torch.arange(last, start, block)  # empty where no gap is left
        parts.append(torch.stack((starts, starts, torch.clamp(starts + block, max=start)), dim=1))
        last = min(-(-stop // align) * align, numel)
    return torch.cat(parts).contiguous().to(device), len(chunks)


def addresses_of(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, bool]:
    """Return the table of the tensors' addresses, and whether 16 bytes divide all of them."""
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    table = _peers.address_table(addresses, device, _peers.current_stream(device))
    return table, all(address % common.VECTOR_BYTES == 0 for address in addresses)


def reduce(
    peers: Sequence[Tensor],
    out: Tensor,
    *,
    table: FragmentTable | None = None,
    accumulate: bool = False,
) -> Tensor | None:
    """Sum every rank's gradients of one shard, in one launch; see `reference.reduce`.

    The norm is part of it where the gradients have the dtype of ``out``; it is a second launch
    elsewhere.

    Args:
        peers: For each rank, the part [shard_numel] of its gradient bucket that is this rank's
            shard; one float dtype. Where all start at a multiple of 16 bytes, as a layout gives
            them, every access is 16 bytes wide.
        out: Where the sum goes [shard_numel], any float dtype; may be one of the peers itself.
        table: The fragments whose norm is wanted; the sum covers what lies between them too.
        accumulate: Add to what ``out`` holds.

    Returns:
        With a table, the bits that `norm` gives for ``out``. No value is read on the host.
    """
    where, dtype = "triton reduce", peers[0].dtype if peers else out.dtype
    _peers.check_reduce(where, peers, out, table)
    common.check_device(where, out)
    # In one launch only where both sides have one dtype: elsewhere a thread holds other elements
    # than it does in `norm`, and the order of addition, so the bits, would be another.
    fused = table if dtype == out.dtype else None
    block = norm_block(fused.max_numel if fused else out.numel())
    chunks, n_partials = _sum_chunks(fused, out.numel(), block, out.device)
    partials = torch.empty(n_partials, 2, dtype=torch.float64, device=out.device)
    if len(chunks):
        addresses, aligned = addresses_of(peers, out.device)
        align = fused.align_numel if fused else MAX_ALIGN_NUMEL
        with common.on_device(out):
            reduce_kernel[(len(chunks),)](
                addresses,
                out,
                chunks,
                partials if n_partials else None,
                n_partials,
                DTYPE=TL_DTYPES[dtype],
                WORLD=len(peers),
                WIDE=tl.float64 if torch.float64 in (dtype, out.dtype) else tl.float32,
                ACCUMULATE=accumulate,
                ALIGNED=aligned,
                ALIGN=min(align, common.VECTOR_BYTES // min(dtype.itemsize, out.element_size())),
                BLOCK=block,
                **common.LAUNCH_OPTIONS,
            )
    if table is None:
        return None
    return norm(out, table) if fused is None else partials.sum(dim=0)


def reduce_multicast(address: int, out: Tensor, *, accumulate: bool = False) -> None:
    """Let switches sum every rank's gradients of one shard, in one launch.

    The order of addition is the switches' own; each sum is rounded once to the dtype of ``out``.

    Args:
        address: The multicast address of this rank's part of the gradients, in the dtype of
            ``out``; a multiple of 16.
        out: Where the sum goes [shard_numel]: fp32, bf16 or fp16, a multiple of 16 bytes.
        accumulate: Add to what ``out`` holds.
    """
    where, dtype = "triton reduce_multicast", out.dtype
    common.check_flat(f"{where} out", out, out.numel(), out.device)
    common.check_device(where, out)
    _peers.check_multicast(where, address, out)
    block = common.BLOCK_NUMEL
    chunks, _ = _sum_chunks(None, out.numel(), block, out.device)
    if len(chunks) == 0:
        return
    stream = _peers.current_stream(out.device)
    with common.on_device(out):
        reduce_kernel[(len(chunks),)](
            _peers.address_table((address,), out.device, stream),
            out,
            chunks,
            None,
            0,
            DTYPE=TL_DTYPES[dtype],
            WORLD=1,
            WIDE=tl.float32,
            ACCUMULATE=accumulate,
            ALIGNED=True,
            ALIGN=common.VECTOR_BYTES // dtype.itemsize,
            BLOCK=block,
            MULTICAST=True,
            **common.LAUNCH_OPTIONS,
        )

# SPDX-License-Identifier: Apache-2.0
"""The collective-fused step: the sum over ranks, Adam and the new parameters, in one Triton launch.

A program takes one chunk of one fragment of this rank's shard. It sums that chunk over every
rank's gradient bucket in registers (see `reduce`), updates master and moments with it, and writes
the new low-precision parameters to every copy in a second table of addresses: this rank's shard,
or each rank's full parameters. The kernel neither waits nor signals: the caller knows that the
ranks' gradients are complete and that nobody reads the copies any more.
"""
# mypy: allow-untyped-decorators

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from triton_ops import _common as common
from triton_ops import _peers
from triton_ops._cast import TL_DTYPES, narrow
from triton_ops._common import AdamShard
from triton_ops._fragments import FragmentTable
from triton_ops.adam import check_master, update
from triton_ops.reduce import addresses_of, pointer_at, sum_ranks

_ACTIVE = tl.constexpr(common.ACTIVE)
_COEF_COLUMNS = tl.constexpr(common.COEF_COLUMNS)


@triton.jit
def _reduce_step(
    peers: tl.tensor,
    copies: tl.tensor,
    n_copies: tl.tensor,
    master: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    max_exp_avg_sq: tl.tensor | None,
    offsets: tl.tensor,
    mask: tl.tensor,
    coef: tl.tensor,
    grad_scale: tl.tensor,
    DTYPE: tl.constexpr,
    WORLD: tl.constexpr,
    COPY_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
) -> None:
    """Sum the elements ``offsets``, update them, write the new parameters to every copy."""
    g = sum_ranks(peers, offsets, mask, DTYPE, WORLD, tl.float32, ALIGNED) * grad_scale
    p = update(
        g, master, exp_avg, exp_avg_sq, max_exp_avg_sq,
        offsets, mask, coef, DECOUPLED, MAXIMIZE,
    )  # fmt: skip
    low = narrow(p, COPY_DTYPE)
    for index in tl.range(0, n_copies):
        tl.store(pointer_at(copies, index, COPY_DTYPE, ALIGNED) + offsets, low, mask=mask)


@triton.jit
def reduce_adam_kernel(
    peers: tl.tensor,  # int64 [WORLD]: where each rank's part of this shard lies
    copies: tl.tensor,  # int64 [n_copies]: where the new parameters go
    n_copies: tl.int32,
    master: tl.tensor,  # [shard_numel] fp32, as the moments
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    max_exp_avg_sq: tl.tensor | None,
    chunks: tl.tensor,  # int64 [n_chunks, 3]: start, stop, row
    coefs: tl.tensor,  # float64 [n_params, 9]
    factor: tl.tensor,  # float64 [1]
    scale: tl.float64,  # annotated: an unannotated Python float arrives as float32
    DTYPE: tl.constexpr,  # of the gradients
    WORLD: tl.constexpr,
    COPY_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,  # every address is a multiple of 16 bytes
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGN: tl.constexpr,  # divides every start
    BLOCK: tl.constexpr,  # the chunk table's block
) -> None:
    """Reduce and update one chunk, in the rounding order that `reference` spells."""
    chunk = chunks + tl.program_id(0).to(tl.int64) * 3
    start = tl.multiple_of(tl.load(chunk), ALIGN)  # int64: a shard may exceed 2**31 elements
    stop = tl.load(chunk + 1)
    coef = coefs + tl.load(chunk + 2) * _COEF_COLUMNS
    if tl.load(coef + _ACTIVE) != 0.0:
        grad_scale = (tl.load(factor) * scale).to(tl.float32)
        # As in adam: the mask of the block stops at a multiple of ALIGN.
        even = tl.multiple_of(start + (stop - start) // ALIGN * ALIGN, ALIGN)
        offsets = start + tl.arange(0, BLOCK)
        _reduce_step(
            peers, copies, n_copies, master, exp_avg, exp_avg_sq, max_exp_avg_sq,
            offsets, offsets < even, coef, grad_scale,
            DTYPE, WORLD, COPY_DTYPE, ALIGNED, DECOUPLED, MAXIMIZE,
        )  # fmt: skip
        if even < stop:
            rest = even + tl.arange(0, ALIGN)
            _reduce_step(
                peers, copies, n_copies, master, exp_avg, exp_avg_sq, max_exp_avg_sq,
                rest, rest < stop, coef, grad_scale,
                DTYPE, WORLD, COPY_DTYPE, ALIGNED, DECOUPLED, MAXIMIZE,
            )  # fmt: skip


def reduce_adam(
    peers: Sequence[Tensor],
    shard: AdamShard,
    table: FragmentTable,
    coefs: Tensor,
    factor: Tensor,
    *,
    scale: float = 1.0,
    decoupled: bool = True,
    maximize: bool = False,
    publish: Sequence[Tensor] = (),
) -> None:
    """Sum every rank's gradients of one shard, and update it, in one launch and one pass.

    Args:
        peers: For each rank, the part [shard_numel] of its gradient bucket that is this rank's
            shard; fp32, bf16 or fp16.
        shard: The flat buffers, master in float32; its ``grads`` are not looked at.
        table: The fragments and their rows in ``coefs``.
        coefs: float64 [n_params, 9] from `adam_coefs`.
        factor: float64 [1], the device scalar: 1 / (ranks x loss scale) x clip.
        scale: A further factor known on the host.
        decoupled: AdamW's weight decay; must be what `adam_coefs` was given.
        maximize: Ascend.
        publish: Further copies of the parameters [shard_numel], of one float dtype (that of
            ``shard.params`` if it is there), written as ``shard.params`` is.
    """
    where, master = "triton reduce_adam", shard.master
    _peers.check_reduce_adam(where, peers, shard, publish)
    common.check_adam(where, shard, table, coefs, factor)
    common.check_device(where, master)
    check_master(where, master)
    block = common.block_numel(table.max_numel)
    chunks = table.chunks(block, master.device)
    if len(chunks) == 0:
        return
    copies = _peers.copies(shard, publish)
    sources, sources_aligned = addresses_of(peers, master.device)
    targets, targets_aligned = addresses_of(copies, master.device)
    narrowest = min(tensor.element_size() for tensor in (peers[0], master, *copies))
    with common.on_device(master):
        reduce_adam_kernel[(len(chunks),)](
            sources,
            targets,
            len(copies),
            master,
            shard.exp_avg,
            shard.exp_avg_sq,
            shard.max_exp_avg_sq,
            chunks,
            coefs,
            factor,
            float(scale),
            DTYPE=TL_DTYPES[peers[0].dtype],
            WORLD=len(peers),
            COPY_DTYPE=TL_DTYPES[copies[0].dtype] if copies else tl.float32,
            ALIGNED=sources_aligned and targets_aligned,
            DECOUPLED=decoupled,
            MAXIMIZE=maximize,
            ALIGN=min(table.align_numel, common.VECTOR_BYTES // narrowest),
            BLOCK=block,
            **common.LAUNCH_OPTIONS,
        )

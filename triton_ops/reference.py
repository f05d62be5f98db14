# SPDX-License-Identifier: Apache-2.0
"""The kernels' maths in plain PyTorch: the tests' oracle, the benches' baseline, the CPU fallback.

Every operation rounds once, in the order that each docstring spells. The Triton and C++ kernels
follow the same order without contraction, so that in float32 all of them agree bit for bit on one
host. Runs in float64 too. Walks slices that stay in cache. Reads coefficients on the host: on a
CUDA device it synchronises, which the kernels never do.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from triton_ops import _common as common
from triton_ops import _peers
from triton_ops._common import AdamShard
from triton_ops._fragments import FragmentTable

_SLICE_NUMEL = 1 << 16


def pack(
    grads: Sequence[Tensor | None], starts: Sequence[int], out: Tensor, *, accumulate: bool = False
) -> None:
    """Cast gradients into their segments of a flat bucket.

    ``out[start_i + j] = round(grad_i[j])``, and 0 wherever no gradient lies. With ``accumulate``:
    ``out[start_i + j] = round(fp32(out[start_i + j]) + fp32(grad_i[j]))`` (in float64 if either
    is), and the rest is kept.

    Args:
        grads: Gradients in segment order, any shape, strides and float dtype; None for a missing
            one.
        starts: First element of each segment in ``out``.
        out: Flat bucket [full_numel] in the reduce dtype.
        accumulate: Add to what ``out`` holds.
    """
    common.check_pack("pack", grads, starts, out)
    last = 0
    for grad, start in zip(grads, starts, strict=True):
        if grad is None:
            continue
        stop = start + grad.numel()
        segment = out[start:stop].view(grad.shape)
        if accumulate:
            wide = torch.float64 if torch.float64 in (out.dtype, grad.dtype) else torch.float32
            segment.copy_(segment.to(wide) + grad.to(wide))
        else:
            if start > last:
                out[last:start].zero_()
            segment.copy_(grad)
            last = stop
    if not accumulate and last < out.numel():
        out[last:].zero_()


def norm(grads: Tensor, table: FragmentTable) -> Tensor:
    """Sum the squares of the fragments' elements and count those that are not finite.

    ``(sum_j fp64(g_j)**2, #{j: g_j is inf or nan})`` over the table's fragments; what lies between
    them never enters.

    Args:
        grads: Flat gradients [shard_numel], any float dtype.
        table: The fragments to look at.

    Returns:
        float64 [2] on the gradients' device.
    """
    common.check_flat("norm grads", grads, grads.numel(), grads.device)
    common.check_table("norm", table, grads.numel())
    total = torch.zeros(2, dtype=torch.float64, device=grads.device)
    for start, stop in zip(table.starts, table.stops, strict=True):
        for begin in range(start, stop, _SLICE_NUMEL):
            wide = grads[begin : min(begin + _SLICE_NUMEL, stop)].double()
            total[0] += torch.dot(wide, wide)
            total[1] += wide.numel() - torch.isfinite(wide).sum()
    return total


def adam_coefs(
    hyper: Tensor, step: Tensor, used: Tensor, skip: Tensor | None, out: Tensor, *, decoupled: bool
) -> None:
    """Advance the step counts and fill the coefficient table, without reading a value on the host.

    ``active = used and not skip``; ``step += active``; with the new step, in float64:
    ``bias_correction = 1 - beta**step = -expm1(step * log(beta))``,
    ``STEP_SIZE = lr / bias_correction1``, ``DECAY = 1 - lr * weight_decay`` (decoupled) or
    ``weight_decay``. A row that never stepped is filled as for step 1, so that the table is finite.

    Args:
        hyper: float64 [n_params, 5]: lr, beta1, beta2, eps, weight_decay.
        step: float32 [n_params], updated in place.
        used: bool [n_params]: the parameter has a gradient.
        skip: Float [1], non-zero when this step is to be skipped; or None.
        out: float64 [n_params, 9], overwritten.
        decoupled: AdamW's weight decay.
    """
    common.check_coefs("adam_coefs", hyper, step, used, skip, out)
    active = used if skip is None else used & (skip.reshape(()) == 0)
    step += active.to(step.dtype)
    count = step.double().clamp_min(1.0)
    lr, beta1, beta2, eps, weight_decay = hyper.unbind(1)
    out[:, common.ACTIVE] = active.double()
    out[:, common.BETA1] = beta1
    out[:, common.ONE_MINUS_BETA1] = 1.0 - beta1
    out[:, common.BETA2] = beta2
    out[:, common.ONE_MINUS_BETA2] = 1.0 - beta2
    out[:, common.STEP_SIZE] = lr / -torch.expm1(count * torch.log(beta1))
    out[:, common.BIAS_CORRECTION2_SQRT] = torch.sqrt(-torch.expm1(count * torch.log(beta2)))
    out[:, common.EPS] = eps
    out[:, common.DECAY] = 1.0 - lr * weight_decay if decoupled else weight_decay


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
    """Update one rank's shard in place, fragment by fragment.

    With T = master's dtype, ``s = T(factor * scale)`` (the product in float64) and every
    coefficient rounded to T, each line below rounding after every operation::

        g = T(grad) * s                 # negated if maximize
        g = g + DECAY * p               # Adam
        p = p * DECAY                   # AdamW
        m = m + (g - m) * ONE_MINUS_BETA1
        v = v * BETA2 + (ONE_MINUS_BETA2 * g) * g
        w = vmax = maximum(vmax, v)     # amsgrad (a NaN stays NaN); otherwise w = v
        p = p - (STEP_SIZE * m) / (sqrt(w) / BIAS_CORRECTION2_SQRT + EPS)
        params = cast(p)

    Rows that are not ACTIVE and elements outside the fragments keep every byte.

    Args:
        shard: The flat buffers.
        table: The fragments and their rows in ``coefs``.
        coefs: float64 [n_params, 9] from `adam_coefs`.
        factor: float64 [1], the device scalar: 1 / (ranks x loss scale) x clip.
        scale: A further factor known on the host.
        decoupled: AdamW's weight decay; must be what `adam_coefs` was given.
        maximize: Ascend.
    """
    common.check_adam("adam", shard, table, coefs, factor)
    grads = common.adam_grads("adam", shard)
    grad_scale = float(factor.item()) * (-scale if maximize else scale)
    for part, coef in _active_slices(table, coefs):
        g = grads[part].to(shard.master.dtype).mul(grad_scale)
        _adam_slice(shard, part, g, coef, decoupled)


def _active_slices(table: FragmentTable, coefs: Tensor) -> Iterator[tuple[slice, list[float]]]:
    """Yield the slices of the fragments that take a step, each with its row of coefficients."""
    rows: list[list[float]] = coefs.tolist()
    for start, stop, row in zip(table.starts, table.stops, table.rows, strict=True):
        if rows[row][common.ACTIVE]:
            for begin in range(start, stop, _SLICE_NUMEL):
                yield slice(begin, min(begin + _SLICE_NUMEL, stop)), rows[row]


def _adam_slice(
    shard: AdamShard, part: slice, g: Tensor, coef: list[float], decoupled: bool
) -> None:
    """Update a slice with its scaled gradients ``g``, which this overwrites.

    Torch rounds Python scalars to the tensors' dtype.
    """
    # NOTE: no `alpha=`, `addcmul` or `lerp` here: torch contracts those into fused multiply-adds.
    p, m, v = shard.master[part], shard.exp_avg[part], shard.exp_avg_sq[part]
    if decoupled:
        p.mul_(coef[common.DECAY])
    else:
        g.add_(p.mul(coef[common.DECAY]))
    m.add_(g.sub(m).mul_(coef[common.ONE_MINUS_BETA1]))
    v.mul_(coef[common.BETA2]).add_(g.mul(coef[common.ONE_MINUS_BETA2]).mul_(g))
    if shard.max_exp_avg_sq is not None:
        v = torch.maximum(shard.max_exp_avg_sq[part], v, out=shard.max_exp_avg_sq[part])
    denom = _sqrt(v, out=g).div_(coef[common.BIAS_CORRECTION2_SQRT]).add_(coef[common.EPS])
    p.sub_(m.mul(coef[common.STEP_SIZE]).div_(denom))
    if shard.params is not None:
        shard.params[part].copy_(p)


def reduce(
    peers: Sequence[Tensor],
    out: Tensor,
    *,
    table: FragmentTable | None = None,
    accumulate: bool = False,
) -> Tensor | None:
    """Sum every rank's gradients of one shard, always in rank order.

    ``out[j] = round(((fp32(p_0[j]) + fp32(p_1[j])) + fp32(p_2[j])) + ...)``, rounding after every
    addition; in float64 if a side is. With ``accumulate``:
    ``out[j] = round(fp32(out[j]) + sum)``, the sum of the ranks taken first.

    Args:
        peers: For each rank, the part [shard_numel] of its gradient bucket that is this rank's
            shard; one float dtype.
        out: Where the sum goes [shard_numel], any float dtype; may be one of the peers itself.
        table: The fragments whose norm is wanted; the sum covers what lies between them too.
        accumulate: Add to what ``out`` holds.

    Returns:
        With a table, what `norm` gives for ``out``: the first phase of a clipped step.
    """
    _peers.check_reduce("reduce", peers, out, table)
    wide = _peers.sum_dtype(peers[0].dtype, out.dtype)
    for begin in range(0, out.numel(), _SLICE_NUMEL):
        part = slice(begin, begin + _SLICE_NUMEL)
        total = _sum(peers, part, wide)
        out[part].copy_(out[part].to(wide) + total if accumulate else total)
    return None if table is None else norm(out, table)


def _sum(peers: Sequence[Tensor], part: slice, wide: torch.dtype) -> Tensor:
    """Return the sum of one slice over the ranks, in memory of its own."""
    total = peers[0][part].to(wide, copy=True)
    for peer in peers[1:]:
        total.add_(peer[part])
    return total


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
    """Sum every rank's gradients of one shard and update the shard with them, in place.

    The bits of `reduce` into a float32 buffer (float64 for float64 gradients) and `adam` on it.
    No sum is stored.

    Args:
        peers: For each rank, the part [shard_numel] of its gradient bucket that is this rank's
            shard; fp32, bf16 or fp16 (fp64 with an fp64 master).
        shard: The flat buffers; its ``grads`` are not looked at, and may be None.
        table: The fragments and their rows in ``coefs``.
        coefs: float64 [n_params, 9] from `adam_coefs`.
        factor: float64 [1], the device scalar: 1 / (ranks x loss scale) x clip.
        scale: A further factor known on the host.
        decoupled: AdamW's weight decay; must be what `adam_coefs` was given.
        maximize: Ascend.
        publish: Further copies of the parameters [shard_numel], one float dtype (that of
            ``shard.params`` if it is there), written as ``shard.params`` is.
    """
    _peers.check_reduce_adam("reduce_adam", peers, shard, publish)
    common.check_adam("reduce_adam", shard, table, coefs, factor)
    wide = _peers.sum_dtype(peers[0].dtype, torch.float32)
    grad_scale = float(factor.item()) * (-scale if maximize else scale)
    for part, coef in _active_slices(table, coefs):
        g = _sum(peers, part, wide).to(shard.master.dtype).mul_(grad_scale)
        _adam_slice(shard, part, g, coef, decoupled)
        for copy in publish:
            copy[part].copy_(shard.master[part])


def _sqrt(x: Tensor, out: Tensor) -> Tensor:
    """Take the correctly rounded square root."""
    if x.is_cuda:
        return torch.sqrt(x, out=out)
    # NOTE: on CPU torch.sqrt goes through MKL where built with it, and is off by one unit at times.
    np.sqrt(x.numpy(), out=out.numpy())
    return out

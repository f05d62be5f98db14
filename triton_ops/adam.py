# SPDX-License-Identifier: Apache-2.0
"""Adam over one rank's flat shard, in one launch and one pass over memory, in Triton.

A program takes one chunk of one fragment: it reads the fragment's row of coefficients, the device
scalar and each stream once, and writes the state and the low-precision shard that the next gather
sends. Nothing here reads a value on the host.
"""
# mypy: allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_ops import _common as common
from triton_ops._cast import narrow, widen
from triton_ops._common import AdamShard
from triton_ops._fragments import FragmentTable

_ACTIVE = tl.constexpr(common.ACTIVE)
_BETA1 = tl.constexpr(common.BETA1)
_ONE_MINUS_BETA1 = tl.constexpr(common.ONE_MINUS_BETA1)
_BETA2 = tl.constexpr(common.BETA2)
_ONE_MINUS_BETA2 = tl.constexpr(common.ONE_MINUS_BETA2)
_STEP_SIZE = tl.constexpr(common.STEP_SIZE)
_BIAS_CORRECTION2_SQRT = tl.constexpr(common.BIAS_CORRECTION2_SQRT)
_EPS = tl.constexpr(common.EPS)
_DECAY = tl.constexpr(common.DECAY)
_COEF_COLUMNS = tl.constexpr(common.COEF_COLUMNS)
_HYPER_COLUMNS = tl.constexpr(common.HYPER_COLUMNS)
_COEF_BLOCK = 128


@triton.jit
def update(
    g: tl.tensor,
    master: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    max_exp_avg_sq: tl.tensor | None,
    offsets: tl.tensor,
    mask: tl.tensor,
    coef: tl.tensor,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
) -> tl.tensor:
    """Update the elements ``offsets`` under ``mask`` with their scaled gradients ``g``.

    Returns the new parameters in float32.
    """
    p = tl.load(master + offsets, mask=mask, other=0.0)
    m = tl.load(exp_avg + offsets, mask=mask, other=0.0)
    v = tl.load(exp_avg_sq + offsets, mask=mask, other=0.0)
    decay = tl.load(coef + _DECAY).to(tl.float32)
    if MAXIMIZE:
        g = -g
    if DECOUPLED:
        p = p * decay
    else:
        g = g + decay * p
    m = m + (g - m) * tl.load(coef + _ONE_MINUS_BETA1).to(tl.float32)
    v = v * tl.load(coef + _BETA2).to(tl.float32) + (
        (tl.load(coef + _ONE_MINUS_BETA2).to(tl.float32) * g) * g
    )
    tl.store(exp_avg + offsets, m, mask=mask)
    tl.store(exp_avg_sq + offsets, v, mask=mask)
    if max_exp_avg_sq is not None:
        v_max = tl.load(max_exp_avg_sq + offsets, mask=mask, other=0.0)
        v = tl.maximum(v_max, v, propagate_nan=tl.PropagateNan.ALL)
        tl.store(max_exp_avg_sq + offsets, v, mask=mask)
    # Correctly rounded square root and division: the default ones are approximations.
    root = tl.div_rn(tl.sqrt_rn(v), tl.load(coef + _BIAS_CORRECTION2_SQRT).to(tl.float32))
    denom = root + tl.load(coef + _EPS).to(tl.float32)
    p = p - tl.div_rn(tl.load(coef + _STEP_SIZE).to(tl.float32) * m, denom)
    tl.store(master + offsets, p, mask=mask)
    return p


@triton.jit
def _step(
    grads: tl.tensor,
    master: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    max_exp_avg_sq: tl.tensor | None,
    shard_params: tl.tensor | None,
    offsets: tl.tensor,
    mask: tl.tensor,
    coef: tl.tensor,
    grad_scale: tl.tensor,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
) -> None:
    """Read the gradients of the elements ``offsets``, update them, write their low precision."""
    g = widen(tl.load(grads + offsets, mask=mask, other=0.0), tl.float32) * grad_scale
    p = update(
        g, master, exp_avg, exp_avg_sq, max_exp_avg_sq,
        offsets, mask, coef, DECOUPLED, MAXIMIZE,
    )  # fmt: skip
    if shard_params is not None:
        tl.store(shard_params + offsets, narrow(p, shard_params.dtype.element_ty), mask=mask)


@triton.jit
def adam_kernel(
    grads: tl.tensor,  # [shard_numel] fp32, bf16 or fp16
    master: tl.tensor,  # [shard_numel] fp32, as the moments
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    max_exp_avg_sq: tl.tensor | None,
    shard_params: tl.tensor | None,  # written only; NOTE: triton's launcher breaks on "params"
    chunks: tl.tensor,  # int64 [n_chunks, 3]: start, stop, row
    coefs: tl.tensor,  # float64 [n_params, 9]
    factor: tl.tensor,  # float64 [1]
    scale: tl.float64,  # annotated: an unannotated Python float arrives as float32
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGN: tl.constexpr,  # divides every start: what lets accesses be 16 bytes wide
    BLOCK: tl.constexpr,  # the chunk table's block
) -> None:
    """Update one chunk, in the rounding order that `reference.adam` spells."""
    chunk = chunks + tl.program_id(0).to(tl.int64) * 3
    start = tl.multiple_of(tl.load(chunk), ALIGN)  # int64: a shard may exceed 2**31 elements
    stop = tl.load(chunk + 1)
    coef = coefs + tl.load(chunk + 2) * _COEF_COLUMNS
    if tl.load(coef + _ACTIVE) != 0.0:
        grad_scale = (tl.load(factor) * scale).to(tl.float32)
        # A mask whose bound is not a multiple of ALIGN would make every access of the block
        # scalar. So the block stops at the last multiple, and the ragged rest goes by itself.
        even = tl.multiple_of(start + (stop - start) // ALIGN * ALIGN, ALIGN)
        offsets = start + tl.arange(0, BLOCK)
        _step(
            grads, master, exp_avg, exp_avg_sq, max_exp_avg_sq, shard_params,
            offsets, offsets < even, coef, grad_scale, DECOUPLED, MAXIMIZE,
        )  # fmt: skip
        if even < stop:
            rest = even + tl.arange(0, ALIGN)
            _step(
                grads, master, exp_avg, exp_avg_sq, max_exp_avg_sq, shard_params,
                rest, rest < stop, coef, grad_scale, DECOUPLED, MAXIMIZE,
            )  # fmt: skip


@triton.jit
def adam_coefs_kernel(
    hyper: tl.tensor,  # float64 [n_params, 5]
    step: tl.tensor,  # float32 [n_params], in place
    used: tl.tensor,  # bool [n_params]
    skip: tl.tensor | None,  # float [1]
    out: tl.tensor,  # float64 [n_params, 9]
    n_params: tl.tensor,
    DECOUPLED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Advance the steps and fill the coefficients of BLOCK parameters, in float64."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < n_params
    active = tl.where(tl.load(used + rows, mask=mask, other=0) != 0, 1.0, 0.0)
    if skip is not None:
        active *= tl.where(tl.load(skip) == 0.0, 1.0, 0.0)
    count = tl.load(step + rows, mask=mask, other=0.0) + active
    tl.store(step + rows, count, mask=mask)
    count = tl.maximum(count, 1.0).to(tl.float64)

    columns = hyper + rows * _HYPER_COLUMNS
    lr = tl.load(columns, mask=mask, other=0.0)
    beta1 = tl.load(columns + 1, mask=mask, other=0.5)
    beta2 = tl.load(columns + 2, mask=mask, other=0.5)
    eps = tl.load(columns + 3, mask=mask, other=0.0)
    weight_decay = tl.load(columns + 4, mask=mask, other=0.0)
    # float64 throughout: in float32, 1 - beta2 ** step keeps four digits of its first values.
    bias_correction1 = 1.0 - tl.exp(count * tl.log(beta1))
    bias_correction2 = 1.0 - tl.exp(count * tl.log(beta2))

    coef = out + rows * _COEF_COLUMNS
    tl.store(coef + _ACTIVE, active.to(tl.float64), mask=mask)
    tl.store(coef + _BETA1, beta1, mask=mask)
    tl.store(coef + _ONE_MINUS_BETA1, 1.0 - beta1, mask=mask)
    tl.store(coef + _BETA2, beta2, mask=mask)
    tl.store(coef + _ONE_MINUS_BETA2, 1.0 - beta2, mask=mask)
    tl.store(coef + _STEP_SIZE, lr / bias_correction1, mask=mask)
    tl.store(coef + _BIAS_CORRECTION2_SQRT, tl.sqrt(bias_correction2), mask=mask)
    tl.store(coef + _EPS, eps, mask=mask)
    tl.store(coef + _DECAY, 1.0 - lr * weight_decay if DECOUPLED else weight_decay, mask=mask)


def adam_coefs(
    hyper: Tensor,
    step: Tensor,
    used: Tensor,
    skip: Tensor | None,
    out: Tensor,
    *,
    decoupled: bool,
) -> None:
    """Advance the step counts and fill the coefficient table; see `reference.adam_coefs`."""
    common.check_coefs("triton adam_coefs", hyper, step, used, skip, out)
    common.check_device("triton adam_coefs", out)
    n_params = step.numel()
    if n_params == 0:
        return
    grid = (triton.cdiv(n_params, _COEF_BLOCK),)
    with common.on_device(out):
        adam_coefs_kernel[grid](
            hyper,
            step,
            used,
            skip,
            out,
            n_params,
            DECOUPLED=decoupled,
            BLOCK=_COEF_BLOCK,
            **common.LAUNCH_OPTIONS,
        )


def check_master(where: str, master: Tensor) -> None:
    """Raise ValueError unless the state is what the Triton kernels compute in."""
    if master.dtype != torch.float32:
        got = master.dtype
        raise ValueError(f"{where}: expected a float32 master, got {got}. Use the reference.")


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
    """Update one rank's shard in place, in one launch; see `reference.adam` for the formula.

    Args:
        shard: The flat buffers; master in float32.
        table: The fragments and their rows in ``coefs``. With starts that are multiples of 16 bytes
            in the narrowest dtype, as a layout gives them, every access is 16 bytes wide.
        coefs: float64 [n_params, 9] from `adam_coefs`.
        factor: float64 [1], the device scalar: 1 / (ranks x loss scale) x clip.
        scale: A further factor known on the host.
        decoupled: AdamW's weight decay; must be what `adam_coefs` was given.
        maximize: Ascend.
    """
    where = "triton adam"
    common.check_adam(where, shard, table, coefs, factor)
    common.check_device(where, shard.master)
    grads = common.adam_grads(where, shard)
    check_master(where, shard.master)
    block = common.block_numel(table.max_numel)
    chunks = table.chunks(block, shard.master.device)
    if len(chunks) == 0:
        return
    narrowest = min(tensor.element_size() for tensor in shard.named().values())
    with common.on_device(shard.master):
        adam_kernel[(len(chunks),)](
            grads,
            shard.master,
            shard.exp_avg,
            shard.exp_avg_sq,
            shard.max_exp_avg_sq,
            shard.params,
            chunks,
            coefs,
            factor,
            float(scale),
            DECOUPLED=decoupled,
            MAXIMIZE=maximize,
            ALIGN=min(table.align_numel, common.VECTOR_BYTES // narrowest),
            BLOCK=block,
            **common.LAUNCH_OPTIONS,
        )

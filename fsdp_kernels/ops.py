# SPDX-License-Identifier: Apache-2.0
"""Pick the implementation of each kernel: CUDA or Triton for CUDA tensors, C++ for CPU tensors.

`pack` and `norm` of CUDA tensors take the CUDA module where it was built, else Triton. Where the
C++ module was not built, CPU tensors take `triton_ops.reference`: same results, more passes over
memory. What each kernel computes is spelled in that module's docstrings.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from fsdp_kernels import _ext
from triton_ops import _common, _peers, reference
from triton_ops._common import AdamShard
from triton_ops._fragments import FragmentTable

_CPP = _ext.cpu()
_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_CUDA_DTYPES = frozenset(_CODES) - {torch.float64}  # the CUDA module's; Triton serves float64 too
_MAX_DIMS = 8  # of a gradient that the CUDA module reads where it lies


def pack(
    grads: Sequence[Tensor | None], starts: Sequence[int], out: Tensor, *, accumulate: bool = False
) -> None:
    """Cast gradients into their segments of a flat bucket; see `triton_ops.reference.pack`."""
    if out.is_cuda:
        dtypes = {out.dtype, *(grad.dtype for grad in grads if grad is not None)}
        if (module := _ext.cuda()) is not None and dtypes <= _CUDA_DTYPES:
            return pack_with(module, grads, starts, out, accumulate=accumulate)
        from triton_ops.pack import pack as on_device

        return on_device(grads, starts, out, accumulate=accumulate)
    if _CPP is None:
        return reference.pack(grads, starts, out, accumulate=accumulate)
    _common.check_pack("pack", grads, starts, out)
    # The list keeps copies of gradients with gaps alive until the kernel has read them.
    # A negated view (the imaginary part of a conjugate) has its sign beside its memory.
    dense = [None if grad is None else grad.resolve_neg().contiguous() for grad in grads]
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
        if (module := _ext.cuda()) is not None and grads.dtype in _CUDA_DTYPES:
            return norm_with(module, grads, table)
        from triton_ops.norm import norm as on_device

        return on_device(grads, table)
    if _CPP is None:
        return reference.norm(grads, table)
    _common.check_flat("norm grads", grads, grads.numel(), grads.device)
    where = (grads.data_ptr(), _CODES[grads.dtype])
    sums = _CPP.norm(where, grads.numel(), _rows(table.host()), torch.get_num_threads())
    return torch.tensor(sums, dtype=torch.float64)


def pack_with(
    module: ModuleType,
    grads: Sequence[Tensor | None],
    starts: Sequence[int],
    out: Tensor,
    *,
    accumulate: bool = False,
) -> None:
    """Run `pack` with the CUDA module, or with its build for the host (tests).

    Reads strided gradients where they lie. Nothing is allocated or uploaded.
    """
    _common.check_pack("cuda pack", grads, starts, out)
    sources, copies = [], []
    for grad, start in zip(grads, starts, strict=True):
        if grad is None:
            continue
        if grad.dim() > _MAX_DIMS or grad.is_neg():
            grad = grad.resolve_neg().contiguous()
            copies.append(grad)  # alive until the kernel is in the queue
        shape = (None, None) if grad.is_contiguous() else (tuple(grad.shape), grad.stride())
        sources.append((grad.data_ptr(), _CODES[grad.dtype], start, grad.numel(), *shape))
    to = (out.data_ptr(), _CODES[out.dtype])
    with _common.on_device(out):
        module.pack(sources, to, out.numel(), accumulate, _stream(out))


def norm_with(module: ModuleType, grads: Tensor, table: FragmentTable) -> Tensor:
    """Run `norm` with the CUDA module, or with its build for the host (tests)."""
    _common.check_flat("cuda norm grads", grads, grads.numel(), grads.device)
    _common.check_table("cuda norm", table, grads.numel())
    chunks = table.chunks(module.NORM_CHUNK_NUMEL, grads.device)
    scratch = grads.new_empty(module.norm_partials(len(chunks)), dtype=torch.float64)
    result = grads.new_empty(2, dtype=torch.float64)
    where = (grads.data_ptr(), _CODES[grads.dtype])
    with _common.on_device(grads):
        module.norm(where, _rows(chunks), scratch.data_ptr(), result.data_ptr(), _stream(grads))
    return result


def _stream(tensor: Tensor) -> int:
    """Return the handle of the current stream of the tensor's device; 0 on the host."""
    return torch._C._cuda_getCurrentRawStream(tensor.device.index) if tensor.is_cuda else 0


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
    grads = _common.adam_grads("adam", shard)
    grad_scale = factor.item() * (-scale if maximize else scale)
    tables = _rows(table.host()), _rows(coefs)
    _CPP.adam(_buffers(shard, grads), *tables, grad_scale, decoupled, torch.get_num_threads())


def reduce(
    peers: Sequence[Tensor],
    out: Tensor,
    *,
    table: FragmentTable | None = None,
    accumulate: bool = False,
) -> Tensor | None:
    """Sum a shard over the ranks' memory; see `triton_ops.reference.reduce`."""
    if out.is_cuda:
        from triton_ops.reduce import reduce as on_device

        return on_device(peers, out, table=table, accumulate=accumulate)
    if _CPP is None:
        return reference.reduce(peers, out, table=table, accumulate=accumulate)
    _peers.check_reduce("reduce", peers, out, table)
    to = (out.data_ptr(), _CODES[out.dtype])
    rows = (0, 0) if table is None else _rows(table.host())
    sums = _CPP.reduce(_typed(peers), to, out.numel(), rows, accumulate, torch.get_num_threads())
    return None if table is None else torch.tensor(sums, dtype=torch.float64)


def reduce_multicast(address: int, out: Tensor, *, accumulate: bool = False) -> None:
    """Let NVLink switches sum a shard; see `triton_ops.reduce.reduce_multicast`. CUDA only."""
    from triton_ops.reduce import reduce_multicast as on_device

    on_device(address, out, accumulate=accumulate)


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
    """Sum over the ranks' memory and update in one pass; see `triton_ops.reference.reduce_adam`."""
    if shard.master.is_cuda:
        from triton_ops.reduce_adam import reduce_adam as on_device

        return on_device(
            peers, shard, table, coefs, factor,
            scale=scale, decoupled=decoupled, maximize=maximize, publish=publish,
        )  # fmt: skip
    if _CPP is None:
        return reference.reduce_adam(
            peers, shard, table, coefs, factor,
            scale=scale, decoupled=decoupled, maximize=maximize, publish=publish,
        )  # fmt: skip
    _peers.check_reduce_adam("reduce_adam", peers, shard, publish)
    _common.check_adam("reduce_adam", shard, table, coefs, factor)
    options = factor.item() * (-scale if maximize else scale), decoupled
    copies = _typed(_peers.copies(shard, publish))
    tables = _rows(table.host()), _rows(coefs)
    numbers = _buffers(shard, None)
    _CPP.reduce_adam(_typed(peers), numbers, copies, *tables, options, torch.get_num_threads())


def _rows(table: Tensor) -> tuple[int, int]:
    return table.data_ptr(), table.shape[0]


def _typed(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return the addresses of tensors of one dtype, and the dtype's code."""
    code = _CODES[tensors[0].dtype] if tensors else 0
    return [tensor.data_ptr() for tensor in tensors], code


def _buffers(shard: AdamShard, grads: Tensor | None) -> tuple[int, ...]:
    """Spell a shard as the numbers that the C++ `adam` takes."""
    master, largest, params = shard.master, shard.max_exp_avg_sq, shard.params
    return (
        0 if grads is None else grads.data_ptr(),
        0 if grads is None else _CODES[grads.dtype],
        master.data_ptr(),
        _CODES[master.dtype],
        shard.exp_avg.data_ptr(),
        shard.exp_avg_sq.data_ptr(),
        0 if largest is None else largest.data_ptr(),
        0 if params is None else params.data_ptr(),
        0 if params is None else _CODES[params.dtype],
        master.numel(),
    )

# SPDX-License-Identifier: Apache-2.0
"""Pick the implementation of each kernel: Triton for CUDA tensors, C++ for CPU tensors.

Where the C++ module was not built, CPU tensors take `triton_ops.reference`: same results, more
passes over memory. What each kernel computes is spelled in that module's docstrings.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from triton_ops import reference
from triton_ops._common import AdamShard, FragmentTable


def pack(
    grads: Sequence[Tensor | None], starts: Sequence[int], out: Tensor, *, accumulate: bool = False
) -> None:
    """Cast gradients into their segments of a flat bucket; see `triton_ops.reference.pack`."""
    if out.is_cuda:
        from triton_ops import pack as kernel

        kernel.pack(grads, starts, out, accumulate=accumulate)
    else:
        reference.pack(grads, starts, out, accumulate=accumulate)


def norm(grads: Tensor, table: FragmentTable) -> Tensor:
    """Sum squares and count non-finite elements; see `triton_ops.reference.norm`."""
    if grads.is_cuda:
        from triton_ops import norm as kernel

        return kernel.norm(grads, table)
    return reference.norm(grads, table)


def adam_coefs(
    hyper: Tensor, step: Tensor, used: Tensor, skip: Tensor | None, out: Tensor, *, decoupled: bool
) -> None:
    """Advance step counts, fill coefficients; see `triton_ops.reference.adam_coefs`."""
    if out.is_cuda:
        from triton_ops import adam as kernel

        kernel.adam_coefs(hyper, step, used, skip, out, decoupled=decoupled)
    else:
        reference.adam_coefs(hyper, step, used, skip, out, decoupled=decoupled)


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
        from triton_ops import adam as kernel

        kernel.adam(
            shard, table, coefs, factor, scale=scale, decoupled=decoupled, maximize=maximize
        )
    else:
        reference.adam(
            shard, table, coefs, factor, scale=scale, decoupled=decoupled, maximize=maximize
        )

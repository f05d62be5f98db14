# SPDX-License-Identifier: Apache-2.0
"""The global gradient norm of a sharded optimizer."""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_kernels._adam_plan import BucketPlan, Plan
from fsdp_kernels.comm.base import Comm
from fsdp_kernels.trace import label


def sum_of_squares(plan: Plan, active: list[BucketPlan]) -> Tensor:
    """Return the squared norm of an optimizer's mean gradients, float64 [1] on the device.

    Args:
        plan: The optimizer's.
        active: Those of its buckets that have gradients.
    """
    # Nearly always one comm and one scale: then this is one sum and one all-reduce.
    parts: dict[tuple[Comm, float], list[Tensor]] = {}
    for b in active:
        key = (b.bucket.comm, b.bucket.grad_scale)
        parts.setdefault(key, []).append(b.bucket.grads.squares(b.table))
    totals: dict[Comm, Tensor] = {}
    for (comm, scale), norms in parts.items():
        squares = torch.stack(norms).sum(0)[:1] * (scale * scale)
        totals[comm] = totals[comm] + squares if comm in totals else squares
    for comm, total in totals.items():
        comm.all_reduce(total, label=label("norm", "")).wait()
    return sum(totals.values(), torch.zeros_like(plan.one))

# SPDX-License-Identifier: Apache-2.0
"""The job that a sharded model is: what `fully_shard` made, as the planner sees it."""

from __future__ import annotations

from typing import Any

from fsdp_kernels.bucket import Bucket
from fsdp_kernels.plan.job import Job, PlannedBucket, PlannedUnit
from fsdp_kernels.plan.memory import Memory, plan
from fsdp_kernels.plan.model import widths_of


def planned(model: Any, *, no_sync: bool = False, overlap_backward: bool = False) -> Memory:
    """Compute what this rank of a sharded model holds when it trains with `ShardedAdamW`.

    Args:
        model: A module that `fully_shard` has sharded.
        no_sync: Whether micro-batches accumulate under `no_sync`.
        overlap_backward: The optimizer's.
    """
    units = model.units
    comm = units[0].runtime.comm
    strategy = units[0].strategy
    job = Job(
        units=tuple(
            PlannedUnit(unit.name, tuple(_bucket(bucket) for bucket in unit.buckets))
            for unit in units
        ),
        strategy=strategy.name,
        shard=None if strategy.replicates else comm.world,
        prefetch=units[0].runtime.gathers.prefetch_units,
        no_sync=no_sync,
        overlap_backward=overlap_backward,
        shared_memory=any(b.placed is not None for unit in units for b in unit.buckets),
    )
    return plan(job, comm.everyone.world)


def _bucket(bucket: Bucket) -> PlannedBucket:
    segments = bucket.layout.segments
    return PlannedBucket(
        tuple(segment.name for segment in segments),
        tuple(segment.numel for segment in segments),
        widths_of(bucket.dtypes, trained=any(p.requires_grad for p in bucket.params)),
        bucket.layout.itemsize,
    )

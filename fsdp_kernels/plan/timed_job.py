# SPDX-License-Identifier: Apache-2.0
"""A planned job as the simulation takes it."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_kernels.plan.job import Job, PlannedUnit
from fsdp_kernels.plan.timing import Mesh, UnitWork, Workload


def work_of(units: Sequence[PlannedUnit], *, recompute: bool = False) -> tuple[UnitWork, ...]:
    """Return the units of a planned job; activation checkpointing keeps inputs alone."""
    return tuple(
        UnitWork(
            unit.name,
            unit.numel,
            unit.multiplied,
            unit.attention_width,
            unit.input_bytes if recompute and unit.name else unit.saved_bytes,
            unit.saved_bytes if recompute and unit.name else 0,
        )
        for unit in units
    )


def workload_of(job: Job, micro_batches: int = 1) -> Workload:
    """Return what a rank does in a step of a planned job.

    Raises:
        ValueError: The job does not say how many tokens a step has.
    """
    if not job.batch:
        raise ValueError(
            "--time: expected tokens to compute with, got none. Give --batch and --sequence."
        )
    numel = job.numel
    buckets = job.buckets
    return Workload(
        units=work_of(job.units, recompute=job.recompute),
        batch=job.batch,
        sequence=job.sequence,
        micro_batches=micro_batches,
        recompute=1.0 if job.recompute else 0.0,
        compute_bytes=float(sum(b.numel * b.widths.params for b in buckets) / numel),
        reduce_bytes=float(sum(b.numel * b.widths.reduce for b in buckets) / numel),
        grads_bytes=float(sum(b.numel * b.widths.grads for b in buckets) / numel),
    )


def mesh_of(job: Job, world: int) -> Mesh:
    """Return how a job's ranks share the model.

    Raises:
        ValueError: The strategy is not simulated, or the world cannot be divided so.
    """
    if job.strategy == "dp":
        raise ValueError(
            "--time: expected a strategy with a process for each GPU, got dp. Use --strategy ddp."
        )
    if job.offload or job.shared_memory:
        raise ValueError(
            "--time: expected parameters and state on the GPUs, got --offload or "
            "--shared-memory. Leave it out; nothing is known of the host's links."
        )
    strategy = {"hybrid": "zero3", "ddp": "replicate"}.get(job.strategy, job.strategy)
    return Mesh(world, job.group(world), strategy, job.prefetch, no_sync=job.no_sync)

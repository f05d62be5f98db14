# SPDX-License-Identifier: Apache-2.0
"""What a rank holds, in bytes by kind, each with the formula that it came from.

The formulas are those of `docs/design.md`, "Strategies" and "Memory of a rank";
`tests/test_plan_measured.py` holds them against what training allocates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

from fsdp_kernels.plan.buffers import Moment, Passing, UnitBytes, passing
from fsdp_kernels.plan.formulas import Figure, activation_terms, counted, padding, pool, units
from fsdp_kernels.plan.job import Job, PlannedBucket, PlannedUnit
from fsdp_kernels.plan.program import Policy
from fsdp_kernels.plan.sizes import show_bytes, show_count

STEADY = ("params", "params_shard", "master", "grads", "grads_shard", "optimizer")
PASSING = ("gather", "reduce", "autograd", "stepping", "activation")

KINDS = {
    "params": "parameters, in the dtype of computation",
    "params_shard": "the rank's shard of them, beside the full ones",
    "master": "parameters, as the step keeps them",
    "grads": "gradients",
    "grads_shard": "the rank's shard of them, beside the full ones",
    "optimizer": "optimizer state",
    "gather": "full buckets of gathered parameters",
    "reduce": "full buckets of gradients under reduction",
    "autograd": "a unit's gradients before they are packed",
    "stepping": "shards of gradients until their step in backward",
    "activation": "activations",
}


@dataclass(frozen=True, slots=True)
class Memory:
    """What one rank of a world holds.

    Attributes:
        job: Of which training.
        world: Ranks, all of them.
        figures: By kind, in the order of `KINDS`; each at its own highest.
        passing: A step.
        host: What lies in the host's memory for this rank.
        gather_whole: What it would take to gather the whole model at once.
        first: For dp, the first GPU's peak; else None.
    """

    job: Job
    world: int
    figures: dict[str, Figure]
    passing: Passing
    host: Figure
    gather_whole: Figure
    first: Figure | None

    def nbytes(self, kind: str) -> int:
        """Return the bytes of one kind."""
        return self.figures[kind].nbytes

    @property
    def steady(self) -> int:
        """What stays from step to step."""
        return ceil(self._sum(STEADY))

    @property
    def highest(self) -> Moment:
        """When activations and gradients outside of pools are most together."""
        return self.passing.highest

    @property
    def peak(self) -> int:
        """The most that a rank holds at once, and what is reserved.

        Pools keep their slots, so full buckets count as if all were in use at that moment.
        """
        moment = self.highest
        flat = self._sum((*STEADY, "gather", "reduce"))
        return ceil(flat) + moment.together + self.job.reserve_bytes

    def _sum(self, kinds: Iterable[str]) -> Fraction | int:
        return sum(self.figures[kind].exact for kind in kinds)

    @property
    def largest(self) -> int:
        """The peak of the fullest rank."""
        return max(self.peak, self.first.nbytes if self.first else 0)

    @property
    def fits(self) -> bool | None:
        """Whether every rank's peak fits on a device; None: nobody said how large that is."""
        if self.job.memory_bytes is None:
            return None
        return self.largest <= self.job.memory_bytes


def plan(job: Job, world: int) -> Memory:
    """Compute what each rank of a world holds.

    Raises:
        ValueError: The world and the shard group do not go together.
    """
    return _Planner(job, world).plan()


def smallest_world(job: Job, most: int = 1 << 20) -> int | None:
    """Return the fewest GPUs on which a job fits, or None if no number up to `most` is enough."""
    if job.memory_bytes is None:
        return None
    step = job.shard if job.shards and job.shard else 1

    def fits(groups: int) -> bool:
        return bool(plan(job, groups * step).fits)

    if not job.shards or job.shard:  # more replicas change nothing
        return step if fits(1) else None
    if not fits(most):
        return None
    low, high = 0, 1
    while not fits(high):
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


class _Planner:
    """The formulas, for one job and world."""

    def __init__(self, job: Job, world: int) -> None:
        self.job = job
        self.world = world
        self.shard = job.group(world)
        self.buckets = job.buckets
        if job.strategy in ("dp", "ddp"):  # torch's, which know no buckets of ours
            self.buckets = [replace(bucket, itemsize=0) for bucket in self.buckets]
        self.shares = job.shared_memory and self.shard > 1
        self.keeps_params = job.keeps_params and self.shard > 1 and not self.shares
        self.passing = Passing(0, 0, ())
        self.full_grads = job.defers_grads or (job.no_sync and job.strategy not in ("dp", "ddp"))

    def plan(self) -> Memory:
        """Return everything."""
        self.passing = self._step()
        figures = {
            "params": self._params(),
            "params_shard": self._beside(self.keeps_params, "params"),
            "master": self._sum("master", "master"),
            "grads": self._grads(),
            "grads_shard": self._beside(self.full_grads, "grads"),
            "optimizer": self._sum("state", "optimizer"),
            "gather": self._gather(),
            "reduce": self._reduce(),
            "autograd": self._autograd(),
            "stepping": self._stepping(),
            "activation": self._activation(),
        }
        kept = dict(figures)
        host = self._move_to_host(kept)
        first = None
        if self.job.strategy == "dp":
            first = Figure(
                sum(figure.exact for figure in kept.values()) + self.job.reserve_bytes,
                "what the others hold, and the optimizer state: only the first GPU steps",
            )
            if self.world > 1:
                for kind in ("optimizer", "master"):
                    kept[kind] = Figure(0, "on the first GPU only")
        whole = sum(b.numel * b.widths.params for b in self.buckets)
        formula = f"{show_count(self.job.numel)} parameters in full"
        at_once = Figure(whole, formula)
        return Memory(self.job, self.world, kept, self.passing, host, at_once, first)

    # -- shards -----------------------------------------------------------------------------------

    def _sum(self, width: str, what: str) -> Figure:
        """Bytes of the rank's shards of something."""
        return self._shards(((b, getattr(b.widths, width)) for b in self.buckets), what)

    def _shards(self, parts: Iterable[tuple[PlannedBucket, Fraction]], what: str) -> Figure:
        held = [(bucket, width) for bucket, width in parts if width]
        return self._total(held, self.shard, what) if held else Figure(0, f"no {what} kept")

    def _full(self, width: str, what: str) -> Figure:
        held = [(b, getattr(b.widths, width)) for b in self.buckets if getattr(b.widths, width)]
        total = sum(b.full_numel(self.shard) * w for b, w in held)
        return Figure(total, f"{counted(held)}, in full{padding(held, self.shard)} ({what})")

    def _total(self, held: list[tuple[PlannedBucket, Fraction]], shard: int, what: str) -> Figure:
        total = sum(bucket.shard_numel(shard) * width for bucket, width in held)
        over = f" / {shard} ranks" if shard > 1 else ""
        return Figure(total, f"{counted(held)}{over}{padding(held, shard)}")

    def _params(self) -> Figure:
        if self.keeps_params:
            return self._full("params", "kept from step to step")
        return self._sum("params", "parameters")

    def _grads(self) -> Figure:
        if self.full_grads:
            return self._full("reduce", "kept until the step")
        if self.job.steps_in_backward:
            return Figure(0, "each unit's go with its step in backward")
        return self._sum("grads", "gradients")

    def _beside(self, kept: bool, width: str) -> Figure:
        return self._sum(width, width) if kept else Figure(0, "not kept twice")

    # -- full buckets -----------------------------------------------------------------------------

    def _step(self) -> Passing:
        """Play a step."""
        job = self.job
        gathers = job.shards and not job.keeps_params and not self.shares
        policy = Policy(
            prefetch=job.prefetch,
            keeps_params=job.keeps_params,
            defers_grads=job.defers_grads,
            sharded=gathers,
            two_levels=1 < self.shard < self.world,
            clips=False,
            overlaps=job.steps_in_backward,
        )
        return passing(
            tuple(self._unit_bytes(unit, gathers) for unit in job.units),
            policy,
            grads_stay=self.full_grads or self.shares or job.strategy in ("dp", "ddp"),
        )

    def _unit_bytes(self, unit: PlannedUnit, gathers: bool) -> UnitBytes:
        def full(width: str) -> tuple[int, ...]:
            held = ((b, getattr(b.widths, width)) for b in unit.buckets)
            return tuple(ceil(b.full_numel(self.shard) * w) for b, w in held)

        again = self.job.recompute and unit.name != ""
        trained = sum(b.numel * b.widths.params for b in unit.buckets if b.widths.grads)
        shards = sum(b.shard_numel(self.shard) * b.widths.grads for b in unit.buckets)
        stays = self.job.strategy in ("dp", "ddp")  # where autograd put them
        return UnitBytes(
            name=unit.name or "root",
            gather=full("params") if gathers else (),
            reduce=full("reduce"),
            autograd=0 if stays else ceil(trained),
            forward=unit.input_bytes if again else unit.saved_bytes,
            inner=unit.inner_bytes if again else 0,
            stepping=ceil(shards) if self.job.steps_in_backward else 0,
        )

    def _gather(self) -> Figure:
        if not self.job.shards or self.job.keeps_params:
            return Figure(0, "nothing is gathered beside what is kept")
        if self.shares:
            return Figure(0, "full parameters lie in shared memory, once for all ranks")
        highest = max(self.passing.moments, key=lambda moment: moment.gather)
        used = f"{units(highest.gathered)}, at '{highest.what}'"
        return pool(self.passing.gather_bytes, highest.gather, used)

    def _reduce(self) -> Figure:
        if self.job.strategy in ("dp", "ddp"):
            return Figure(0, "gradients are reduced where they are kept")
        if self.shares:
            full = [b.full_numel(self.shard) * b.widths.reduce for b in self.buckets]
            return Figure(2 * max(full), f"2 x {show_bytes(ceil(max(full)))}, the largest bucket")
        if self.full_grads:
            return Figure(0, "full gradients are kept already")
        highest = max(self.passing.moments, key=lambda moment: moment.reduce)
        return pool(self.passing.reduce_bytes, highest.reduce, units(highest.reducing))

    def _autograd(self) -> Figure:
        if self.job.strategy in ("dp", "ddp"):
            return Figure(0, "gradients stay where autograd put them")
        highest = max(self.passing.moments, key=lambda moment: moment.autograd)
        return Figure(highest.autograd, f"{units(highest.unpacked)}, at '{highest.what}'")

    def _stepping(self) -> Figure:
        if not self.job.steps_in_backward:
            return Figure(0, "units are stepped after backward")
        highest = max(self.passing.moments, key=lambda moment: sum(moment.stepping.values()))
        used = f"{units(highest.stepping)}, at '{highest.what}'"
        return Figure(sum(highest.stepping.values()), used)

    def _activation(self) -> Figure:
        highest = max(moment.activation for moment in self.passing.moments)
        return Figure(highest, activation_terms(self.job))

    def _move_to_host(self, figures: dict[str, Figure]) -> Figure:
        kinds = []
        if "optimizer" in self.job.offload:
            kinds += ["master", "optimizer"]
        if "params" in self.job.offload:
            kinds += ["params"]
        total = sum(figures[kind].exact for kind in kinds)
        for kind in kinds:
            figures[kind] = Figure(0, f"{show_bytes(figures[kind].nbytes)} in host memory")
        return Figure(total, " + ".join(kinds) or "nothing is offloaded")

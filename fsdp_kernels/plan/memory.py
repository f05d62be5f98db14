# SPDX-License-Identifier: Apache-2.0
"""What a rank holds, in bytes by kind, each with the formula that it came from.

The formulas are those of `docs/design.md`, "Strategies" and "Memory of a rank";
`tests/test_plan_measured.py` holds them against what training allocates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from fsdp_kernels.plan.job import Job, PlannedBucket
from fsdp_kernels.plan.sizes import show_bytes, show_count, show_width

STEADY = ("params", "master", "grads", "optimizer", "copies")
PASSING = ("gather", "reduce", "autograd", "activation")

KINDS = {
    "params": "parameters, in the dtype of computation",
    "master": "parameters, as the step keeps them",
    "grads": "gradients",
    "optimizer": "optimizer state",
    "copies": "the rank's shards beside what it keeps in full",
    "gather": "full buckets of gathered parameters",
    "reduce": "full buckets of gradients under reduction",
    "autograd": "a unit's gradients before they are packed",
    "activation": "activations",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of bytes, and how it came about.

    Attributes:
        exact: The bytes of one rank; a fraction where parameters are divided as on paper.
        formula: The same with its terms.
    """

    exact: Fraction | int
    formula: str

    @property
    def nbytes(self) -> int:
        """Whole bytes."""
        return ceil(self.exact)


@dataclass(frozen=True, slots=True)
class Memory:
    """What one rank of a world holds.

    Attributes:
        job: Of which training.
        world: Ranks, all of them.
        figures: By kind, in the order of `KINDS`.
        host: What lies in the host's memory for this rank.
        gather_whole: What it would take to gather the whole model at once.
        first: For dp, the first GPU's peak; else None.
    """

    job: Job
    world: int
    figures: dict[str, Figure]
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
    def peak(self) -> int:
        """The most that a rank may hold at once, and what is reserved."""
        return ceil(self._sum((*STEADY, *PASSING))) + self.job.reserve_bytes

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
        self.shares = job.shared_memory and self.shard > 1
        self.keeps_params = job.keeps_params and self.shard > 1 and not self.shares
        self.full_grads = job.defers_grads or (job.no_sync and job.strategy not in ("dp", "ddp"))

    def plan(self) -> Memory:
        """Return everything."""
        figures = {
            "params": self._params(),
            "master": self._master(),
            "grads": self._grads(),
            "optimizer": self._sum("state", "optimizer"),
            "copies": self._copies(),
            "gather": self._gather(),
            "reduce": self._reduce(),
            "autograd": self._autograd(),
            "activation": self._activation(),
        }
        kept = dict(figures)
        host = self._move_to_host(kept)
        first = None
        if self.job.strategy == "dp":
            total = sum(figure.exact for figure in kept.values()) + self.job.reserve_bytes
            first = Figure(total, "the others' and the optimizer's, which runs on the first GPU")
            if self.world > 1:
                for kind in ("optimizer", "master"):
                    kept[kind] = Figure(0, "on the first GPU only")
        whole = sum(b.numel * b.widths.params for b in self.buckets)
        formula = f"{show_count(self.job.numel)} parameters in full"
        return Memory(self.job, self.world, kept, host, Figure(whole, formula), first)

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
        return Figure(total, f"{_counted(held)}, in full{_padding(held, self.shard)} ({what})")

    def _total(self, held: list[tuple[PlannedBucket, Fraction]], shard: int, what: str) -> Figure:
        total = sum(bucket.shard_numel(shard) * width for bucket, width in held)
        over = f" / {shard} ranks" if shard > 1 else ""
        return Figure(total, f"{_counted(held)}{over}{_padding(held, shard)}")

    def _params(self) -> Figure:
        if self.keeps_params:
            return self._full("params", "kept from step to step")
        return self._sum("params", "parameters")

    def _master(self) -> Figure:
        if self.shares:  # peers read the other copy in place
            return self._shards(((b, b.widths.master or b.widths.own) for b in self.buckets), "")
        return self._sum("master", "master")

    def _grads(self) -> Figure:
        if self.full_grads:
            return self._full("reduce", "kept until the step")
        return self._sum("grads", "gradients")

    def _copies(self) -> Figure:
        figures = []
        if self.keeps_params:
            figures.append(self._sum("params", "parameters"))
        if self.full_grads:
            figures.append(self._sum("grads", "gradients"))
        if not figures:
            return Figure(0, "nothing is kept twice")
        return Figure(sum(f.exact for f in figures), " + ".join(f.formula for f in figures))

    # -- full buckets -----------------------------------------------------------------------------

    def _unit_bytes(self, width: str) -> list[tuple[str, int]]:
        """The full buckets of each unit, the root first."""
        return [
            (
                unit.name or "root",
                ceil(
                    sum(b.full_numel(self.shard) * getattr(b.widths, width) for b in unit.buckets)
                ),
            )
            for unit in self.job.units
        ]

    def _gather(self) -> Figure:
        if not self.job.shards or self.job.keeps_params:
            return Figure(0, "nothing is gathered beside what is kept")
        if self.shares:
            return Figure(0, "full parameters lie in shared memory, once for all ranks")
        (_, root), *others = self._unit_bytes("params")
        count = min(1 + self.job.prefetch, len(others))
        name, largest = max(others, key=lambda unit: unit[1], default=("", 0))
        terms = [f"root {show_bytes(root)}"] if root else []
        if count:
            terms.append(f"{count} of the largest unit ({name}, {show_bytes(largest)})")
        return Figure(root + count * largest, " + ".join(terms))

    def _reduce(self) -> Figure:
        if self.job.strategy in ("dp", "ddp"):
            return Figure(0, "gradients are reduced where they are kept")
        units = self._unit_bytes("reduce")
        name, largest = max(units, key=lambda unit: unit[1])
        if self.shares:
            return Figure(2 * largest, f"2 of the largest ({name}, {show_bytes(largest)}), shared")
        if self.full_grads:
            return Figure(0, "full gradients are kept already")
        return Figure(largest, f"the largest unit ({name}, {show_bytes(largest)})")

    def _autograd(self) -> Figure:
        if self.job.strategy in ("dp", "ddp"):
            return Figure(0, "gradients stay where autograd put them")
        trained = [
            ceil(sum(b.numel * b.widths.params for b in unit.buckets if b.widths.grads))
            for unit in self.job.units
        ]
        return Figure(max(trained), f"the largest unit ({show_bytes(max(trained))}), once")

    def _activation(self) -> Figure:
        units = self.job.units
        saved = sum(unit.saved_bytes for unit in units)
        if not self.job.recompute:
            return Figure(saved, _activation_terms(self.job))
        root, *others = units
        inputs = sum(unit.input_bytes for unit in others)
        again = max((unit.saved_bytes for unit in others), default=0)
        formula = (
            f"inputs of {len(others)} units {show_bytes(inputs)} + one unit computed again "
            f"{show_bytes(again)} + outside of them {show_bytes(root.saved_bytes)}"
        )
        return Figure(root.saved_bytes + inputs + again, formula)

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


def _counted(held: list[tuple[PlannedBucket, Fraction]]) -> str:
    """Say how many parameters of how many bytes."""
    counts: dict[Fraction, int] = {}
    for bucket, width in held:
        counts[width] = counts.get(width, 0) + bucket.numel
    return " + ".join(
        f"{show_count(numel)} parameters x {show_width(width)}" for width, numel in counts.items()
    )


def _padding(held: list[tuple[PlannedBucket, Fraction]], shard: int) -> str:
    """Say how much of it is padding."""
    padding = sum((b.full_numel(shard) - b.numel) * w for b, w in held) / shard
    return f" + {show_bytes(ceil(padding))} of padding" if padding else ""


def _activation_terms(job: Job) -> str:
    saved = [unit.saved_bytes for unit in job.units]
    if not any(saved):
        return "none: give --batch and --sequence, or --activation-bytes"
    root, *others = saved
    terms = f"{len(others)} units, {show_bytes(sum(others))}"
    return terms + (f" + outside of them {show_bytes(root)}" if root else "")

# SPDX-License-Identifier: Apache-2.0
"""Numbers of bytes with the formulas that they came from, in words."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from fsdp_kernels.plan.job import Job, PlannedBucket
from fsdp_kernels.plan.sizes import show_bytes, show_count, show_width


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


def pool(nbytes: int, used: int, formula: str) -> Figure:
    """What a pool has, whose slots are as large as the largest bucket that ever used them."""
    if nbytes > used:
        formula += f" + {show_bytes(nbytes - used)} of slots that are larger than their users"
    return Figure(nbytes, formula)


def units(held: dict[str, int]) -> str:
    """Name units with their bytes."""
    return " + ".join(f"{name} {show_bytes(n)}" for name, n in held.items() if n) or "none"


def counted(held: list[tuple[PlannedBucket, Fraction]]) -> str:
    """Say how many parameters of how many bytes."""
    counts: dict[Fraction, int] = {}
    for bucket, width in held:
        counts[width] = counts.get(width, 0) + bucket.numel
    return " + ".join(
        f"{show_count(numel)} parameters x {show_width(width)}" for width, numel in counts.items()
    )


def padding(held: list[tuple[PlannedBucket, Fraction]], shard: int) -> str:
    """Say how much of it is padding."""
    nbytes = sum((b.full_numel(shard) - b.numel) * w for b, w in held) / shard
    return f" + {show_bytes(ceil(nbytes))} of padding" if nbytes else ""


def activation_terms(job: Job) -> str:
    """Say what activations are the sum of."""
    root, *others = job.units
    if not any(unit.saved_bytes for unit in job.units):
        return "none: give --batch and --sequence, or --activation-bytes"
    outside = f" + outside of them {show_bytes(root.saved_bytes)}" if root.saved_bytes else ""
    if not job.recompute:
        return f"{len(others)} units {show_bytes(sum(u.saved_bytes for u in others))}{outside}"
    inputs = sum(unit.input_bytes for unit in others)
    again = max((unit.inner_bytes for unit in others), default=0)
    return (
        f"inputs of {len(others)} units {show_bytes(inputs)} + one unit computed again "
        f"{show_bytes(again)}{outside}"
    )

# SPDX-License-Identifier: Apache-2.0
"""What passes during a step: full buckets, activations, gradients before they are packed.

The order is the runtime's own (`program.py`), and full buckets come from the runtime's own `Pool`,
whose slots have no memory here. Slots stay allocated once they were used, so what counts for full
buckets is the pool, not what is in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fsdp_kernels.plan.program import ROOT, Host, Op, Piece, Policy
from fsdp_kernels.pool import Pool, Slot
from fsdp_kernels.streams import HostStreams

_STEPS = 3  # the first learns the order, the second the deadlines


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """Bytes of a unit.

    Attributes:
        name: What formulas call it.
        gather: Its buckets' full parameters.
        reduce: Its buckets' full gradients.
        autograd: Its gradients as autograd leaves them.
        forward: What its forward leaves for backward.
        inner: What backward computes again, while it is there.
        stepping: The rank's shard of its gradients, where it lives from reduction to step only.
    """

    name: str
    gather: tuple[int, ...]
    reduce: tuple[int, ...]
    autograd: int
    forward: int
    inner: int
    stepping: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """What there is while one thing is done.

    Attributes:
        what: Verb and unit.
        gathered: Full parameters in use, by unit.
        reducing: Full gradients in use.
        unpacked: Gradients as autograd left them.
        stepping: Shards of gradients that wait for their step in backward.
        activation: Bytes of activations.
    """

    what: str
    gathered: dict[str, int]
    reducing: dict[str, int]
    unpacked: dict[str, int]
    stepping: dict[str, int]
    activation: int

    @property
    def gather(self) -> int:
        """Bytes of full parameters in use."""
        return sum(self.gathered.values())

    @property
    def reduce(self) -> int:
        """Bytes of full gradients in use."""
        return sum(self.reducing.values())

    @property
    def autograd(self) -> int:
        """Bytes of gradients that were not packed yet."""
        return sum(self.unpacked.values())

    @property
    def together(self) -> int:
        """Bytes of all that is allocated anew: activations, and gradients outside of pools."""
        return self.activation + self.autograd + sum(self.stepping.values())


@dataclass(frozen=True, slots=True)
class Passing:
    """A step.

    Attributes:
        gather_bytes: The pool of full parameters.
        reduce_bytes: The pool of full gradients.
        moments: A settled step, in order.
    """

    gather_bytes: int
    reduce_bytes: int
    moments: tuple[Moment, ...]

    @property
    def highest(self) -> Moment:
        """When there are most activations and gradients together."""
        return max(self.moments, key=lambda moment: moment.together)


def pieces(units: int) -> tuple[Piece, ...]:
    """Return the model in forward order: the root runs before the other units, and after them.

    What it does before them, mostly looking up a table, needs no weights in backward.
    """
    inside = [Piece(index) for index in range(1, units)]
    return (*([Piece(ROOT, reads=False)] if inside else []), *inside, Piece(ROOT))


@lru_cache(maxsize=256)
def _program(units: int, policy: Policy) -> tuple[tuple[Op, ...], ...]:
    host = Host(pieces(units), policy)
    return tuple(tuple(host.step()) for _ in range(_STEPS))


@lru_cache(maxsize=256)
def passing(units: tuple[UnitBytes, ...], policy: Policy, *, grads_stay: bool) -> Passing:
    """Play a few steps.

    Args:
        units: The root first.
        policy: How they are sharded.
        grads_stay: Whether full gradients are kept elsewhere, not in passing.
    """
    walk = _Walk(units, pieces(len(units)), grads_stay)
    for ops in _program(len(units), policy):
        walk.step(ops)
    return Passing(walk.params.peak_bytes, walk.grads.peak_bytes, tuple(walk.moments))


class _Walk:
    """Takes and gives back, operation by operation."""

    def __init__(
        self, units: Sequence[UnitBytes], order: Sequence[Piece], grads_stay: bool
    ) -> None:
        self._units = units
        self._grads_stay = grads_stay
        self.params = Pool(_nothing, HostStreams())
        self.grads = Pool(_nothing, HostStreams())
        self._gathered: dict[int, list[Slot]] = {}
        self._reducing: dict[int, list[Slot]] = {}
        self._unpacked: dict[str, int] = {}
        self._stepping: dict[str, int] = {}
        self._kept = 0
        self._last = {piece.unit: number for number, piece in enumerate(order)}
        self.moments: list[Moment] = []

    def step(self, ops: Sequence[Op]) -> None:
        """Play one step; `moments` are its own then."""
        self.moments = []
        for op in ops:
            getattr(self, f"_{op.verb}", self._nothing)(op)
        self._unpacked.clear()

    def _nothing(self, op: Op) -> None:
        """Neither takes memory nor lets it go."""

    def _note(self, op: Op, extra: int = 0) -> None:
        self.moments.append(
            Moment(
                f"{op.verb} {self._units[op.unit].name}",
                {self._units[unit].name: sum(self._units[unit].gather) for unit in self._gathered},
                {self._units[unit].name: sum(self._units[unit].reduce) for unit in self._reducing},
                dict(self._unpacked),
                dict(self._stepping),
                self._kept + extra,
            )
        )

    def _gather(self, op: Op) -> None:
        unit = self._units[op.unit]
        self._gathered[op.unit] = [self.params.take(unit.name, n) for n in unit.gather if n]
        self._note(op)

    def _free(self, op: Op) -> None:
        for slot in self._gathered.pop(op.unit, []):
            self.params.give_back(slot)
        self._note(op)

    def _forward(self, op: Op) -> None:
        if op.piece == self._last[op.unit]:
            self._kept += self._units[op.unit].forward
        self._note(op)

    def _backward(self, op: Op) -> None:
        unit = self._units[op.unit]
        first = op.piece == self._last[op.unit]
        if unit.autograd:
            self._unpacked[unit.name] = unit.autograd
        self._note(op, unit.inner if first else 0)
        if first:
            self._kept -= unit.forward
            self._note(op)

    def _pack(self, op: Op) -> None:
        unit = self._units[op.unit]
        if not self._grads_stay:
            self._reducing[op.unit] = [self.grads.take(unit.name, n) for n in unit.reduce if n]
        self._note(op)
        self._unpacked.pop(unit.name, None)

    def _reduce(self, op: Op) -> None:
        unit = self._units[op.unit]
        if unit.stepping:
            self._stepping[unit.name] = unit.stepping
            self._note(op)

    def _step(self, op: Op) -> None:
        self._stepping.pop(self._units[op.unit].name, None)

    def _finish(self, op: Op) -> None:
        for slot in self._reducing.pop(op.unit, []):
            self.grads.give_back(slot)
        self._note(op)


def _nothing(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")

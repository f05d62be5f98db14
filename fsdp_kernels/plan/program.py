# SPDX-License-Identifier: Apache-2.0
"""What the host does in one step, in order, as the runtime would.

The rules are those of `runtime.py`, `gathers.py`, `backward.py` and `reductions.py`, on names
instead of tensors: a forward visits units, an `Order` predicts what to prefetch and what to keep, a
backward touches units in turn, and reductions follow the clock of the gathers. The first step
learns; `settled` plays a few, so its predictions and deadlines are what the runtime's would be.
`tests/test_plan_order.py` holds the order against recorded ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fsdp_kernels.schedule import Order

Verb = Literal[
    "gather", "wait", "free", "forward", "backward", "pack", "reduce", "finish", "norm", "step"
]
ROOT = 0


@dataclass(frozen=True, slots=True)
class Op:
    """One thing that the host does or queues.

    Attributes:
        verb: A verb of the runtime; `finish` is the wait for a reduction.
        unit: Index of the unit; the root is 0.
        piece: Index of the piece of the model, for forward and backward.
    """

    verb: Verb
    unit: int
    piece: int = -1


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the model that runs in one go, with one unit's parameters.

    Attributes:
        unit: Whose; pieces of the root (0) may stand before, between and after the others.
        reads: Whether its backward reads the parameters (an embedding's does not).
    """

    unit: int
    reads: bool = True


@dataclass(frozen=True, slots=True)
class Policy:
    """How the units are sharded.

    Attributes:
        prefetch: Units gathered ahead.
        keeps_params: Full parameters stay until the optimizer has stepped (zero2, zero1).
        defers_grads: Gradients are reduced by the step (zero1).
        no_sync: All micro-batches but the last of a step leave their gradients to it.
        sharded: There is anything to gather; False where a rank has whole parameters (replicate).
        two_levels: Reductions of a shard group go on across replicas, once their first level is
            waited for.
        clips: Gradients are clipped by their norm.
        overlaps: Units are stepped in backward (`overlap_backward=True`).
    """

    prefetch: int = 1
    keeps_params: bool = False
    defers_grads: bool = False
    no_sync: bool = False
    sharded: bool = True
    two_levels: bool = False
    clips: bool = True
    overlaps: bool = False


@dataclass(slots=True)
class _Unit:
    state: Literal["sharded", "gathering", "full"] = "sharded"
    kept: bool = False
    deadline: int = -1
    last_arrival: int = -1
    issued: bool = False
    complete: bool = False


class Host:
    """The host's side of steps over one model.

    Args:
        pieces: The model in the order of its forward.
        policy: How it is sharded.
    """

    def __init__(self, pieces: Sequence[Piece], policy: Policy) -> None:
        self._pieces = pieces
        self._policy = policy
        self._overlaps = policy.overlaps and not policy.defers_grads
        self._units = [_Unit() for _ in range(1 + max(piece.unit for piece in pieces))]
        self._forward, self._backward = Order(), Order()
        self._ops: list[Op] = []
        self._queue: deque[int] = deque()
        self._running = -1
        self._clock = 0
        self._sync = True
        self._in_backward = False
        self._touched: list[int] = []
        self._current = -1

    def step(self, micro_batches: int = 1) -> list[Op]:
        """Return what the host does in the next step."""
        self._ops = []
        if self._policy.keeps_params and self._policy.sharded:
            for index, unit in enumerate(self._units):  # the last step has changed them
                if unit.kept:
                    unit.kept = False
                    self._do("free", index)
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            self._sync = not self._policy.defers_grads and (last or not self._policy.no_sync)
            self._run_forward()
            self._run_backward()
            if self._policy.defers_grads and last:
                for index in range(len(self._units)):
                    self._do("reduce", index)
                    self._do("finish", index)
        if self._policy.clips:
            self._do("norm", ROOT)
        for index in range(len(self._units) if not self._overlaps else 0):
            self._do("step", index)
        return self._ops

    def _do(self, verb: Verb, unit: int, piece: int = -1) -> None:
        self._ops.append(Op(verb, unit, piece))

    # -- gathers ----------------------------------------------------------------------------------

    def _gather(self, index: int) -> None:
        unit = self._units[index]
        if self._in_backward:
            self._finish_due()
            while self._queue and self._units[self._queue[0]].deadline <= self._clock:
                self._issue(self._queue.popleft())
            self._clock += 1
        unit.state = "gathering"
        if self._policy.sharded and not unit.kept:
            self._do("gather", index)

    def _ensure_full(self, index: int) -> None:
        unit = self._units[index]
        if unit.state == "sharded":
            self._gather(index)
        if unit.state == "gathering":
            unit.state = "full"
            self._do("wait", index)

    def _prefetch(self, order: Order) -> None:
        for index in order.upcoming(self._policy.prefetch):
            if self._units[index].state == "sharded":
                self._gather(index)

    def _is_expecting(self, order: Order) -> bool:
        upcoming = order.upcoming(len(order.last))
        return any(self._units[index].state == "sharded" for index in upcoming)

    def _free(self, index: int) -> None:
        self._units[index].state = "sharded"
        if self._policy.keeps_params or not self._policy.sharded:
            self._units[index].kept = True
        else:
            self._do("free", index)

    # -- forward ----------------------------------------------------------------------------------

    def _run_forward(self) -> None:
        self._enter(ROOT)
        for number, piece in enumerate(self._pieces):
            if piece.unit != ROOT:
                self._enter(piece.unit)
            self._do("forward", piece.unit, number)
            if piece.unit != ROOT:
                self._leave(piece.unit)
        self._forward.finish()
        for index, unit in enumerate(self._units):  # prefetched in vain
            if unit.state == "gathering":
                self._free(index)

    def _enter(self, index: int) -> None:
        self._forward.visit(index)
        self._ensure_full(index)
        self._prefetch(self._forward)

    def _leave(self, index: int) -> None:
        upcoming = self._forward.upcoming(1)
        comes_again = bool(upcoming) and upcoming[0] == index
        if not comes_again and not self._forward.is_final(index):
            self._free(index)

    # -- backward ---------------------------------------------------------------------------------

    def _run_backward(self) -> None:
        self._in_backward, self._clock, self._current = True, 0, -1
        self._touched = []
        if not self._backward.last:
            self._backward.last = self._forward.first_visits()[::-1]
        for unit in self._units:
            unit.issued = unit.complete = False
            unit.last_arrival = -1
        due = [i for i in self._to_reduce() if self._units[i].deadline >= 0]
        self._queue = deque(sorted(due, key=lambda i: self._units[i].deadline))
        first = {piece.unit: number for number, piece in reversed(list(enumerate(self._pieces)))}
        for number in range(len(self._pieces) - 1, -1, -1):
            piece = self._pieces[number]
            if piece.reads:
                self._touch(piece.unit)
            self._do("backward", piece.unit, number)
            self._arrived(piece.unit, complete=first[piece.unit] == number)
        self._end_backward()

    def _touch(self, index: int) -> None:
        previous, self._current = self._current, index
        if previous == index:
            self._ensure_full(index)
            return
        for other in [u for u in self._touched if ROOT not in (u, index)]:
            self._touched.remove(other)
            if self._units[other].state != "sharded":
                self._free(other)
            if not self._is_expecting(self._backward):
                self._finish_due()
            self._left(other)
        if index not in self._touched:
            self._touched.append(index)
        self._backward.visit(index)
        self._ensure_full(index)
        self._prefetch(self._backward)

    def _end_backward(self) -> None:
        if self._overlaps:  # no unit is stepped while it is full
            self._free_all()
        for index in (*self._queue, *self._to_reduce()):
            if not self._units[index].issued:
                self._issue(index)
        self._queue.clear()
        self._finish_running()
        for unit in self._units:
            if self._sync and unit.last_arrival >= 0:
                unit.deadline = unit.last_arrival
        self._backward.finish()
        self._in_backward = False
        self._free_all()

    def _free_all(self) -> None:
        for index, unit in enumerate(self._units):
            if unit.state != "sharded":
                self._free(index)

    # -- reductions -------------------------------------------------------------------------------

    def _to_reduce(self) -> list[int]:
        return list(range(len(self._units)))[::-1] if self._sync else []

    def _left(self, index: int) -> None:
        unit = self._units[index]
        if unit.deadline < 0 and not unit.issued and index in self._to_reduce():
            self._issue(index)

    def _arrived(self, index: int, complete: bool) -> None:
        unit = self._units[index]
        unit.last_arrival = self._clock
        if not complete:
            return
        unit.complete = True
        if not self._sync:
            self._do("pack", index)
        self._issue_complete()

    def _issue_complete(self) -> None:
        queue = self._queue
        while queue and self._is_due(queue[0]):
            if self._running >= 0 and (
                self._policy.two_levels
                or self._overlaps
                or self._units[self._running].deadline >= self._clock
            ):
                break
            self._issue(queue.popleft())

    def _is_due(self, index: int) -> bool:
        return self._units[index].deadline <= self._clock and self._units[index].complete

    def _issue(self, index: int) -> None:
        self._finish_running()
        self._units[index].issued = True
        self._do("pack", index)
        self._do("reduce", index)
        self._running = index

    def _finish_running(self) -> None:
        if self._running >= 0:
            self._do("finish", self._running)
            if self._overlaps:
                self._do("step", self._running)
        self._running = -1

    def _finish_due(self) -> None:
        """Where units are stepped: finish what every rank has issued by now."""
        if not self._overlaps or self._running < 0:
            return
        if self._units[self._running].deadline < self._clock:
            self._finish_running()
            self._issue_complete()


def settled(pieces: Sequence[Piece], policy: Policy, micro_batches: int = 1) -> list[Op]:
    """Return what the host does in a step after it has learned the order."""
    host = Host(pieces, policy)
    host.step(micro_batches)
    host.step(micro_batches)
    return host.step(micro_batches)

# SPDX-License-Identifier: Apache-2.0
"""What ranks do with shared memory in training, for the model of the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from arena_model import Rank


@dataclass(frozen=True)
class Training:
    """What every rank does, in the order in which the runtime does it.

    Attributes:
        steps: Optimizer steps.
        forward: Units in the order in which a forward calls them; one may come twice.
        micro_batches: Forwards and backwards for each step.
        evaluations: Forwards without gradients, so many before each forward and each step.
        carries: Whether a forward leaves units gathered for its backward, or the next forward.
        overlap: Whether a unit is stepped as soon as it is reduced.
        under_way: Reductions that may be under way when the next is issued.
        agrees: Whether ranks exchange words at the end of a backward, and norms in a step.
        edits: Ranks that edit their shard of the first unit after each step; their next gather
            publishes that.
        vain: Ranks that free the first unit without having waited for its gather, once a step.
        late: Ranks that issue a reduction only when they must, after the next unit's gather.
        quick: Ranks that free a unit before they post its gradients, not after.
        fails: For each rank, how many reductions it issues before the first step's backward fails.
        publishes: When an edit is published: "before" the gather says so, or, wrongly, "after".
    """

    steps: int = 2
    forward: str = "AB"
    micro_batches: int = 1
    evaluations: int = 0
    carries: bool = False
    overlap: bool = False
    under_way: int = 0
    agrees: bool = True
    edits: tuple[int, ...] = ()
    vain: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    quick: tuple[int, ...] = ()
    fails: tuple[int, ...] = ()
    publishes: str = "before"


def programs(training: Training, world: int, **options: Any) -> list[Rank]:
    """Write every rank's program down; options are those of `Rank`."""
    ranks = [Rank(rank, **options) for rank in range(world)]
    for rank in ranks:
        _Run(training, rank).do_all()
    return ranks


class _Run:
    """Calls a rank's methods."""

    def __init__(self, training: Training, rank: Rank) -> None:
        self.training = training
        self.rank = rank
        self.units = "".join(dict.fromkeys(training.forward))
        self.edited = False
        self.reducing: list[str] = []

    def does(self, what: tuple[int, ...]) -> bool:
        return self.rank.rank in what

    def do_all(self) -> None:
        training = self.training
        for step in range(training.steps):
            if training.vain:
                self.do_in_vain()
            self.do_evaluations()
            for _ in range(training.micro_batches):
                self.do_forward(keep_last=True)
                if step == 0 and training.fails:
                    self.do_failing_backward(training.fails[self.rank.rank])
                    self.do_forward(keep_last=True)
                self.do_backward()
            self.do_evaluations()
            self.do_step()

    # -- gathers ----------------------------------------------------------------------------------

    def gather(self, unit: str) -> None:
        publish = self.edited and unit == self.units[0]
        if publish:
            self.edited = False
        if publish and self.training.publishes == "before":
            self.rank.wait_released(unit)
            self.rank.write(unit)
        self.rank.gather(unit)
        if publish and self.training.publishes == "after":
            self.rank.write(unit)

    def visit(self, order: Sequence[str], at: int) -> None:
        """Make a unit full and prefetch the next one."""
        if order[at] not in self.rank.held():
            self.gather(order[at])
        self.rank.wait_ready(order[at])
        if at + 1 < len(order) and order[at + 1] not in self.rank.held():
            self.gather(order[at + 1])

    def do_in_vain(self) -> None:
        unit = self.units[0]
        self.gather(unit)
        if not self.does(self.training.vain):
            self.rank.wait_ready(unit)
        self.rank.release(unit)

    def do_evaluations(self) -> None:
        for _ in range(self.training.evaluations):
            self.do_forward(keep_last=False)

    def do_forward(self, keep_last: bool) -> None:
        order = self.training.forward
        if self.training.carries:
            self.release_all()  # what no backward has come for
        for at, unit in enumerate(order):
            self.visit(order, at)
            if keep_last and self.training.carries:
                continue
            following = order[at + 1 : at + 2]
            if following != unit and (following or not keep_last):
                self.rank.release(unit)

    def release_all(self) -> None:
        for unit in self.rank.held():
            self.rank.release(unit)

    # -- reductions -------------------------------------------------------------------------------

    def do_backward(self) -> None:
        order = self.units[::-1]
        late, quick = self.does(self.training.late), self.does(self.training.quick)
        for at, unit in enumerate(order):
            self.visit(order, at)
            if quick:
                self.rank.release(unit)
            if not late:
                self.reduce(unit)
            elif at > 0:
                self.reduce(order[at - 1])
            self.rank.release(unit)
        if late:
            self.reduce(order[-1])
        while self.reducing:
            self.finish()
        if self.training.agrees:
            self.rank.exchange()

    def reduce(self, unit: str) -> None:
        while len(self.reducing) > self.training.under_way:
            self.finish()
        self.rank.begin()
        self.rank.post()
        self.reducing.append(unit)

    def finish(self) -> None:
        unit = self.reducing.pop(0)
        self.rank.wait_posted()
        self.rank.consume()
        if self.training.overlap:
            self.rank.wait_released(unit)
            self.rank.write(unit)

    def do_failing_backward(self, issued: int) -> None:
        """Issue some reductions, fail, and match the other ranks' before the next forward."""
        order = self.units[::-1]
        for at, unit in enumerate(order):
            self.visit(order, at)
            self.rank.release(unit)
            if at < issued:
                if self.reducing:
                    self.reducing.pop()
                    self.rank.wait_posted()
                    self.rank.consume()
                self.rank.begin()
                self.rank.post()
                self.reducing.append(unit)
        self.release_all()
        self.rank.exchange()  # how many each has issued
        while self.reducing:
            self.reducing.pop()
            self.rank.consume()  # without having waited: nobody wants the result
        for _ in range(max(self.training.fails) - issued):
            self.rank.skip()

    def do_step(self) -> None:
        self.release_all()
        if self.training.agrees:
            self.rank.exchange()
        if not self.training.overlap:
            for unit in self.units:
                self.rank.wait_released(unit)
                self.rank.write(unit)
        self.edited = self.does(self.training.edits)

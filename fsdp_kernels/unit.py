# SPDX-License-Identifier: Apache-2.0
"""One unit: a module whose own parameters are gathered, used and freed together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import TYPE_CHECKING, NoReturn

from torch import nn

from fsdp_kernels.bucket import Bucket
from fsdp_kernels.strategy import ZERO3, Strategy
from fsdp_kernels.trace import span

if TYPE_CHECKING:
    from fsdp_kernels.runtime import Runtime


class State(StrEnum):
    """Where a unit's parameters are.

    REDUCING is what a sharded unit shows while its gradients are being reduced. It excludes
    nothing: a backward may ask for the weights again meanwhile.
    """

    SHARDED = "SHARDED"
    GATHERING = "GATHERING"
    FULL = "FULL"
    REDUCING = "REDUCING"


_LEGAL: dict[State, frozenset[State]] = {
    State.SHARDED: frozenset({State.GATHERING}),
    State.GATHERING: frozenset({State.FULL, State.SHARDED}),
    State.FULL: frozenset({State.SHARDED}),
}


_ALONE = nullcontext()


class Unit:
    """A module, its buckets and their common state.

    Attributes:
        module: The module whose forward needs the parameters. The module owns the unit, not the
            other way round.
        name: Path in the root, "" for the root.
        position: Index in the runtime's list of units.
        runtime: The context shared by all units of a root; replaced when an ancestor is sharded.
        buckets: One per (dtype, requires_grad).
        strategy: What stays whole on this rank.
        sync: Whether a backward reduces the gradients (False under `no_sync`).
        active: How many forwards of the module are running.
        packed: Saved tensors of the running forward that are views of the full parameters.
        saved_before: `Runtime.saved` when that forward began.
        arrived: Gradients that came in the present backward.
        last_arrival: Gather clock when the last of them came; -1 before any.
        issued: Whether the present backward has issued the reduction.
        late: Whether a gradient came after that.
        inner: Whether a gradient came from a backward inside the present one.
        stepped: Whether the present backward has stepped the unit.
        deadline: Gather clock at which all ranks issue the reduction; -1 before they have agreed.
        carried: Whether the unit stays full, and hidden, for backward because a free would free no
            memory. Its turn there counts as a gather.
        has_pending: Whether a backward under `no_sync` left gradients that are still to be reduced;
            the same on every rank, whichever parameters each of them used.
    """

    def __init__(
        self, module: nn.Module, buckets: list[Bucket], strategy: Strategy = ZERO3
    ) -> None:
        self.module = module
        self.strategy = strategy
        self.name = ""
        self.position = 0
        self.runtime: Runtime = None  # type: ignore[assignment]  # set at once by Runtime.adopt
        self.adopted = False
        self.buckets = buckets
        self.rnns: list[nn.RNNBase] = []
        self.sync = True
        self.active = 0
        self.packed = 0
        self.saved_before = 0
        self.arrived = 0
        self.late = False
        self.issued = False
        self.inner = self.stepped = False
        self.last_arrival = -1
        self.deadline = -1
        self.carried = False
        self._reducing = False
        self._hidden = False
        self._state = State.SHARDED
        for index, bucket in enumerate(buckets):
            bucket.unit, bucket.index = self, index
            if strategy.keeps_params:
                bucket.keep()
        self.has_children = next(module.children(), None) is not None

    @property
    def label(self) -> str:
        """The name for messages and traces."""
        return self.name or "root"

    @property
    def state(self) -> State:
        """One of the state machine's names; a backward that failed is recovered from first.

        SHARDED too where only a free that frees nothing was put off: modules show shards, and the
        full parameters take no memory of this rank's.
        """
        self.runtime.recover()
        if self.carried and self._hidden:
            return State.SHARDED
        if self._reducing and self._state is State.SHARDED:
            return State.REDUCING
        return self._state

    def is_full(self) -> bool:
        """Whether the parameters can be read now."""
        return self._state is State.FULL

    def is_idle(self) -> bool:
        """Whether the parameters are full (or about to be) and no forward is running."""
        return self.active == 0 and self._state in (State.FULL, State.GATHERING)

    def is_hidden(self) -> bool:
        """Whether the unit is full but its modules show the sharded parameters."""
        return self._hidden

    def is_sharded(self) -> bool:
        """Whether a gather may start."""
        return self._state is State.SHARDED

    def is_placed(self) -> bool:
        """Whether the full parameters are in memory that all ranks share."""
        return any(bucket.placed is not None for bucket in self.buckets)

    def contains(self, other: Unit) -> bool:
        """Whether another unit's module is this one's or lies inside it."""
        return not self.name or other.name == self.name or other.name.startswith(f"{self.name}.")

    def _move(self, to: State) -> None:
        if to not in _LEGAL[self._state]:
            self._illegal(to)
        self._state = to

    def _illegal(self, to: State) -> NoReturn:
        legal = ", ".join(sorted(_LEGAL[self._state]))
        raise RuntimeError(
            f"unit '{self.label}': cannot go from {self._state} to {to}; from {self._state} it "
            f"can go to {legal}. If you called unshard() or reshard(), call them outside forward "
            "and backward."
        )

    # -- gather, wait, free -----------------------------------------------------------------------

    def gather(self) -> None:
        """Issue the gathers of all buckets."""
        self._move(State.GATHERING)
        with self._grouped(self.buckets):
            for bucket in self.buckets:
                bucket.leaves.follow_requires_grad()
                bucket.gather()
                self.runtime.gathers.claim(bucket)

    def _grouped(self, buckets: list[Bucket]) -> AbstractContextManager[object]:
        return self.runtime.comm.grouped() if len(buckets) > 1 else _ALONE

    def wait(self) -> None:
        """Make the parameters readable on the current stream."""
        self._move(State.FULL)
        if self.buckets:
            self.runtime.emit("wait", self)
            with span("wait", self.name):
                for bucket in self.buckets:
                    bucket.wait()
        if self.rnns:
            self.sync_rnns()

    def show(self) -> None:
        """Let the modules see the full parameters, where they were hidden."""
        if self._hidden:
            self._hidden = False
            for bucket in self.buckets:
                bucket.leaves.show()
            if self.rnns:
                self.sync_rnns()

    def hide(self) -> None:
        """Let the modules see the sharded parameters, though the unit stays full for its backward.

        Whoever edits `module.weight` between forward and backward then edits the real one.
        """
        self._hidden = True
        for bucket in self.buckets:
            bucket.leaves.hide()
        if self.rnns:
            self.sync_rnns()

    def free(self) -> None:
        """Hide and release the full parameters; a fault is raised after all buckets are free."""
        self._move(State.SHARDED)
        self._free_buckets()

    def _free_buckets(self) -> None:
        self._hidden = self.carried = False
        fault: RuntimeError | None = None
        for bucket in self.buckets:
            self.runtime.gathers.disclaim(bucket)
            try:
                bucket.free()
            except RuntimeError as error:
                fault = fault or error
        if self.rnns:
            self.sync_rnns()
        if fault is not None:
            raise fault

    def sync_rnns(self) -> None:
        """Let nn.RNNBase, which reads a list of its own, see what attributes now show."""
        for rnn in self.rnns:
            rnn._flat_weights = [
                getattr(rnn, name) if hasattr(rnn, name) else None
                for name in rnn._flat_weights_names
            ]

    def has_kept(self) -> bool:
        """Whether the next gather needs nothing but what was kept of the last."""
        return all(bucket.has_kept() for bucket in self.buckets)

    def check_kept(self) -> None:
        """Refuse a backward whose forward had other parameters; only this rank may know of it."""
        for bucket in self.buckets:
            if bucket.has_stale():
                self._refuse_edited(f"strategy '{self.strategy.name}' keeps them")

    def check_carried(self) -> None:
        """Refuse a backward whose forward had other parameters; only this rank may know of it."""
        if not self.is_current():
            self._refuse_edited("over shared memory they stay gathered")

    def _refuse_edited(self, why: str) -> NoReturn:
        raise RuntimeError(
            f"unit '{self.label}': expected its parameters unchanged between forward and backward "
            f"({why}), got an in-place change (an edit, a load or an optimizer step). Run backward "
            "before changing parameters."
        )

    def is_current(self) -> bool:
        """Whether what was gathered still is what the shards say."""
        return all(bucket.is_current() for bucket in self.buckets)

    # -- gradients --------------------------------------------------------------------------------

    def trainable(self) -> int:
        """Leaves that require a gradient."""
        count = 0
        for bucket in self.buckets:  # no generator: it is asked at every gradient
            count += bucket.leaves.count_trainable()
        return count

    def reduces_now(self) -> bool:
        """Whether this backward reduces the gradients; the same on every rank.

        A unit whose forward still runs (it calls autograd itself) waits for the next backward.
        """
        return self.sync and self.active == 0 and not self.strategy.defers_grads

    def is_complete(self) -> bool:
        """Whether all gradients have come that can."""
        return self.arrived >= self.trainable()

    def reduced_buckets(self) -> list[Bucket]:
        """The buckets whose gradients are reduced: the same on every rank."""
        return [b for b in self.buckets if b.grads.left_over or b.leaves.count_trainable()]

    def has_left_over(self) -> bool:
        """Whether a backward under `no_sync` left gradients that are still to be reduced."""
        return any(bucket.grads.left_over for bucket in self.buckets)

    def pack(self) -> None:
        """Move the gradients out of the leaves; they wait for a backward that reduces."""
        for bucket in self.buckets:
            if bucket.grads.has_unpacked():
                bucket.grads.pack()

    def leave_over(self) -> None:
        """End a backward that does not reduce: what came waits, packed, for one that does."""
        self.pack()
        for bucket in self.buckets:
            bucket.grads.leave_over()

    def reduce(self, lend: Sequence[Bucket] = ()) -> None:
        """Issue the reductions of everything pending, zeros where no gradient came.

        Args:
            lend: Buckets whose step reads the ranks' gradients, if it can.
        """
        self._reducing = True
        buckets = self.reduced_buckets()
        with self._grouped(buckets):
            for bucket in buckets:
                bucket.grads.reduce(lend=bucket in lend)

    def finish_reduce(self) -> None:
        """Wait for the reductions; the shards' gradients are then accumulated."""
        self._reducing = False
        with span("wait", self.name):
            for bucket in self.buckets:
                bucket.grads.finish()

    def discard_reduce(self) -> None:
        """Wait for the reductions of a backward that failed; drop their results."""
        self._reducing = False
        for bucket in self.buckets:
            bucket.grads.discard()

    def begin_count(self) -> None:
        """Forget what arrived in the last backward."""
        self.arrived = 0
        self.last_arrival = -1
        self.late = self.issued = self.inner = self.stepped = False
        for bucket in self.buckets:
            bucket.grads.arrived = [False] * len(bucket.leaves)

    def abandon(self) -> None:
        """After a failed backward: sharded, without gradients. What was issued is under way."""
        self.active = self.packed = 0
        self._reducing = False
        for bucket in self.buckets:
            bucket.grads.abandon()
        self.begin_count()
        self._state = State.SHARDED
        self._free_buckets()

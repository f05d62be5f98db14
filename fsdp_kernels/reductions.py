# SPDX-License-Identifier: Apache-2.0
"""When gradients are reduced, and what the ranks agree on at the end of a backward.

Every rank must issue the same gathers and reductions in the same order, though ranks complete units
at different times: a parameter that one rank does not use never arrives there. What all ranks share
in a backward is the sequence of its gathers. So that sequence is the clock: at the end of each
backward the ranks agree, for each unit, on the number of gathers after which its last gradient had
arrived on every rank, and in the next backward its reduction is issued exactly there, complete or
not. In its first backward a unit has no such deadline, and is reduced when backward leaves it for
another. What has not been issued at the end is issued there, zeros where no gradient came.

A gradient that comes after its unit's reduction is late; the ranks agree on which units have late
ones, reduce those again, and the deadline moves. Since the order is one on all ranks, a rank may
wait for one reduction before it issues the next, and one reduce bucket is enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from fsdp_kernels.bucket import Bucket
from fsdp_kernels.comm.base import Comm
from fsdp_kernels.schedule import Order
from fsdp_kernels.stepping import Stepping
from fsdp_kernels.trace import label, span
from fsdp_kernels.unit import Unit

_HASH = 1 << 20  # sums of its squares stay exact in float64


class Reductions:
    """The reductions of one root's units.

    Attributes:
        agreed: bool [number of parameters], on the device: which have a gradient on any rank. The
            buckets hold slices of it.
        clock: Gathers issued in the backward under way.
        in_turn: Whether backward came to a unit of this root last, not to one of another root.
        unsettled: Whether a backward failed or left gradients: `reduce_left_over` has work to do.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        buckets: Sequence[Bucket],
        comm: Comm,
        forward: Order,
        stepping: Stepping,
    ) -> None:
        self._units = units
        self._buckets = buckets
        self._comm = comm
        # Over two levels, a wait needs the others' wait: only where all ranks come by.
        self._together = comm.everyone is not comm and comm.world > 1
        self._forward = forward
        self._stepping = stepping
        self._queue: deque[Unit] = deque()  # not issued yet, by deadline
        self._issued: list[Unit] = []
        self._running: Unit | None = None
        self._failed = False
        self._rounds = 0  # before the last gather of this backward
        self.in_turn = self.unsettled = False
        self._backwards = 0
        # Hash of the gathers since the ranks last agreed; of the reductions where a rank gathers
        # alone, and so may run forwards that no other runs.
        self._sequence = 0
        self._alone = comm.world == 1
        self.clock = 0
        self._largest_bytes = 0  # of a full gradient bucket
        self.agreed = torch.zeros(0, dtype=torch.bool)

    def share_agreement(self, device: torch.device) -> None:
        """Lay the buckets' bits side by side, after units were adopted; deadlines are void then."""
        parts = [bucket.grads.agreed for bucket in self._buckets]
        self.agreed = torch.cat([torch.zeros(0, dtype=torch.bool, device=device), *parts])
        split = torch.split(self.agreed, self._bits())
        for bucket, agreed in zip(self._buckets, split, strict=True):
            bucket.grads.agreed = agreed
        for unit in self._units:
            unit.deadline = -1
        self._largest_bytes = max(
            (b.layout.full_numel * b.dtypes.reduce.itemsize for b in self._buckets), default=0
        )

    # -- during a backward ------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Lay out what is to be reduced and when."""
        self.settle()
        self.clock = self._rounds = 0
        self._issued = []
        due = [unit for unit in self._to_reduce() if unit.deadline >= 0]
        self._queue = deque(sorted(due, key=lambda unit: unit.deadline))
        if any(unit.sync for unit in self._units):
            self._comm.prepare_reductions(self._largest_bytes)

    def before_gather(self, unit: Unit, in_backward: bool) -> None:
        """Issue what is due before a unit's gather, and count the gather."""
        if not self._alone:
            # What is kept is not sent: a rank that gathers what others kept is out of step.
            self._note(2 * unit.position + unit.has_kept())
        if in_backward:
            if self._stepping.active:
                self._meet_before(unit)
            self.issue_due()
            self.clock += 1

    def _meet_before(self, unit: Unit) -> None:
        """Finish what is due, and hold a round before a gather, if that was none.

        The gather would wait for a rank whose backward has failed. What is due is one on all ranks
        when they come to a gather, however early each has finished it, and so are the rounds.
        """
        self.finish_due()
        waits = unit.is_sharded() and not unit.has_kept() and not self._alone
        if waits and self._stepping.rounds == self._rounds:
            self._stepping.meet()
        self._rounds = self._stepping.rounds

    def finish_due(self) -> None:
        """Where units are stepped: finish a reduction that every rank has issued by now."""
        running = self._running
        if self._stepping.active and running is not None and running.deadline < self.clock:
            self._finish_running()
            self._issue_complete()

    def issue_due(self) -> None:
        """Issue what all ranks issue before the next gather, complete here or not."""
        while self._queue and self._queue[0].deadline <= self.clock:
            self._issue(self._queue.popleft())

    def _note(self, number: int) -> None:
        self._sequence = (self._sequence * 31 + number + 1) % _HASH

    def left(self, unit: Unit) -> None:
        """Note that backward has left a unit for another."""
        if unit.deadline < 0 and not unit.issued and unit in self._to_reduce():
            self.issue_due()  # first, on all ranks: where it is complete, it may be issued already
            self._issue(unit)

    def arrived(self, unit: Unit) -> None:
        """Note that one of a unit's gradients has come."""
        unit.last_arrival = self.clock
        if unit.stepped:
            raise RuntimeError(
                f"unit '{unit.label}': expected no gradient after its step "
                "(overlap_backward=True), got one, from a backward inside the backward. Use "
                "checkpoint(use_reentrant=False), or pass overlap_backward=False."
            )
        if unit.issued:
            unit.late = True
        elif unit.is_complete():
            if not unit.reduces_now():
                unit.pack()  # waits for a backward that reduces
            self._issue_complete()

    def _issue_complete(self) -> None:
        """Issue what is due and complete here; other ranks may come to it later.

        Not between what another root issues, which would be between others on those ranks.
        """
        if not self.in_turn:
            return
        queue = self._queue
        while queue and queue[0].deadline <= self.clock and queue[0].is_complete():
            running = self._running
            if running is not None and (
                self._together or self._stepping.active or running.deadline >= self.clock
            ):
                # Issued early here, by others maybe only before the next gather: to wait for them
                # now would hang if this backward fails in between.
                break
            self._issue(queue.popleft())

    def end_backward(self) -> None:
        """Reduce the rest (zeros where no gradient came), and agree on what was used."""
        rest = [unit for unit in (*self._queue, *self._to_reduce()) if not unit.issued]
        rest = list(dict.fromkeys(rest))
        if self._stepping.active:
            running = [] if self._running is None else [self._running]
            self._stepping.decide([*running, *rest])
        for unit in rest:
            self._issue(unit)
        self._queue.clear()
        self._finish_running()
        for unit in self._units:
            if not unit.reduces_now():
                unit.leave_over()
                self.unsettled = True
            elif unit.late:
                unit.pack()
        reducing = [unit for unit in self._units if unit.reduces_now()]
        if reducing:
            for unit in self._agree(reducing):
                unit.reduce()
                unit.finish_reduce()
        if self._stepping.active:
            self._stepping.finish_rest()

    def reduce_left_over(self) -> None:
        """Reduce what backwards under `no_sync` left (collective, if there is anything).

        Gradients that one rank alone has accumulated are never shown, stepped with or lost.
        """
        self.settle()
        self.unsettled = False
        left = [unit for unit in self._units if unit.has_left_over()]
        for unit in left:
            unit.reduce()
            unit.finish_reduce()
        if left:
            self._agree(left)

    def _to_reduce(self) -> list[Unit]:
        """The units that this backward reduces, in an order that all ranks share."""
        return [u for u in reversed(self._units) if u.reduces_now() and u.reduced_buckets()]

    def _issue(self, unit: Unit) -> None:
        self._finish_running()
        if self._alone:
            self._note(unit.position)
        unit.issued = True
        unit.reduce(self._stepping.to_lend(unit))
        self._issued.append(unit)
        self._running = unit

    def _finish_running(self) -> None:
        unit, self._running = self._running, None
        if unit is None:
            return
        if self._stepping.active:
            self._stepping.finish(unit)
        else:
            unit.finish_reduce()

    # -- failure ----------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Note that a backward failed. Its reductions stay issued: `settle` will match them."""
        self._failed = self.unsettled = True
        self._running = None

    def settle(self) -> None:
        """Match the reductions of a failed backward (collective, after one that failed).

        How many each rank had issued may differ. The missing ones are issued with zeros, so that no
        later reduction is paired with them, and all results are dropped.
        """
        if not self._failed:
            return
        heard = self._stepping.report(self._issued)
        while heard.going:  # a rank in a backward has heard that it must end, and will be here
            heard = self._stepping.report(self._issued)
        self._failed = False
        numbers = heard.units.tolist()
        # A rank may be behind by units that were complete on another and due. All have one order.
        behind = [unit for unit in self._units if numbers[unit.position] > len(self._issued)]
        for unit in sorted(behind, key=lambda unit: numbers[unit.position]):
            unit.reduce()
            self._issued.append(unit)
        for unit in self._issued:
            unit.discard_reduce()
        self._sequence = 0

    # -- what the ranks agree on ------------------------------------------------------------------

    def _agree(self, reduced: Sequence[Unit]) -> list[Unit]:
        """One small exchange between the hosts; returns the units to be reduced once more.

        Its words are, under a maximum: a bit for each parameter (used), for each unit whether a
        gradient came late and when the last one came, and three numbers with their negatives,
        which are equal on all ranks if and only if the two maxima cancel: which backward this is, a
        hash of the gathers (or reductions) since the last one, and what is stepped in backward.
        """
        buckets = {bucket for unit in reduced for bucket in unit.buckets}
        bits: list[bool] = []
        for bucket in self._buckets:
            pending = bucket.grads.pending
            bits.extend(pending if bucket in buckets else [False] * len(pending))
        self._backwards = (self._backwards + 1) % _HASH
        same = [self._backwards, self._sequence, self._stepping.owned]
        late = [unit.late for unit in self._units]
        arrivals = [unit.last_arrival for unit in self._units]
        # NOTE: words of the hosts, agreed between the hosts: a late bit or a deadline decides what
        # the host issues next, and to read it from the device would drain the device's queue.
        words = torch.tensor(
            [*bits, *late, *arrivals, *same, *(-number for number in same)], dtype=torch.float64
        )
        with span("agree", "used parameters"):
            words = self._comm.agree(words, label=label("agree", "used parameters"))
        used = words[: len(bits)] > 0
        self.agreed |= used.to(self.agreed.device, non_blocking=True)
        for bucket, agreed in zip(self._buckets, torch.split(used, self._bits()), strict=True):
            if bucket in buckets:
                bucket.grads.reduced(agreed.tolist())
        return self._read(words[len(bits) :].tolist(), reduced)

    def _bits(self) -> list[int]:
        """Number of parameters of each bucket."""
        return [bucket.grads.agreed.numel() for bucket in self._buckets]

    def _read(self, numbers: list[float], reduced: Sequence[Unit]) -> list[Unit]:
        count = len(self._units)
        late, arrivals, checks = numbers[:count], numbers[count : 2 * count], numbers[2 * count :]
        self._check_same(checks)
        self._sequence = 0
        for unit in reduced:
            # Without any arrival (a gradient penalty's first half) what was known stays.
            if arrivals[unit.position] >= 0:
                unit.deadline = int(arrivals[unit.position])
        return [unit for unit in reduced if late[unit.position]]

    def _check_same(self, checks: Sequence[float]) -> None:
        rank = self._comm.rank
        half = len(checks) // 2
        largest, smallest = checks[:half], [-number for number in checks[half:]]
        if largest[0] != smallest[0]:
            raise RuntimeError(
                f"backward on rank {rank}: expected every rank in the same backward, got number "
                f"{smallest[0]:g} on one and {largest[0]:g} on another, {self._backwards} here. "
                "Run the same number of forwards and backwards on every rank."
            )
        if largest[1] != smallest[1]:
            order = ", ".join(self._units[i].label for i in self._forward.first_visits())
            verb, mixed = ("reduce", "gradients") if self._alone else ("gather", "weights")
            raise RuntimeError(
                f"backward on rank {rank}: expected every rank to {verb} the same units in the "
                f"same order, got different orders; here the forward was: {order}. Their {mixed} "
                "were mixed: discard this step, and call the same modules in the same order on "
                "every rank."
            )
        if largest[2] != smallest[2]:
            self._stepping.refuse_owned()
        self._stepping.agree_owned()

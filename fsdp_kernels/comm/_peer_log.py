# SPDX-License-Identifier: Apache-2.0
"""What reductions over peers' memory do, for the log of a recorded schedule.

The other ranks are one stream of the log, `"peers"`: they run the same program, so what they do to
this rank's slots, and this rank to theirs, is known. A barrier orders both before it and after it.
Each method is called where its operations are queued, while somebody records.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_kernels import trace

_PEERS = "peers"
_REDUCE = "reduce"


@dataclass(frozen=True, slots=True)
class LoggedReduction:
    """One reduction in the log.

    Attributes:
        label: Of the collective.
        slot: Number of the slot that it uses on every rank.
        reads, writes: What the sum reads and writes beside the slots.
        ready: The event after the barrier "all have packed".
        done: The event after the sum.
    """

    label: str
    slot: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    ready: int
    done: int

    @classmethod
    def post(cls, label: str, slot: int, compute: str, *, ready: bool) -> LoggedReduction:
        """Note that this rank has packed, and the barrier; `ready`: it has an event."""
        events = trace.new_event(), trace.new_event()
        reads, writes = trace.operands(label, events[1], compute)
        logged = cls(label, slot, reads, writes, *events)
        trace.access(label, compute, writes=(logged._mine,))
        _order(compute, _REDUCE)
        trace.access(label, _PEERS, writes=(logged._theirs,))
        _meet()
        trace.access(label, _PEERS, reads=(logged._mine,))
        if ready:
            trace.recorded(_REDUCE, logged.ready)
        return logged

    def sum(self) -> None:
        """Note the sum, on the reduce stream."""
        trace.access(self.label, _REDUCE, (*self.reads, *self._both), self.writes)
        trace.recorded(_REDUCE, self.done)

    def lend(self, compute: str) -> None:
        """Note that a compute stream waits, and then reads in a kernel of the caller's."""
        trace.waited(compute, self.ready)
        trace.access(self.label, compute, self._both)

    def read(self, compute: str) -> None:
        """Note that what was lent is read by now, and that the reduce stream waits for that."""
        trace.access(self.label, compute, self._both)
        _order(compute, _REDUCE)

    def give_back(self) -> int:
        """Note the barrier "all have read"; return the number of the event after it."""
        trace.access(self.label, _PEERS, reads=(self._mine,))
        _meet()
        trace.access(self.label, _PEERS, writes=(self._theirs,))  # they may pack again from here
        consumed = trace.new_event()
        trace.recorded(_REDUCE, consumed)
        return consumed

    @property
    def _mine(self) -> str:
        return f"slot {self.slot} of this rank"

    @property
    def _theirs(self) -> str:
        return f"slot {self.slot} of peers"

    @property
    def _both(self) -> tuple[str, str]:
        return self._mine, self._theirs


def _order(earlier: str, later: str) -> None:
    event = trace.new_event()
    trace.recorded(earlier, event)
    trace.waited(later, event)


def _meet() -> None:
    """A barrier on the reduce stream."""
    mine, theirs = trace.new_event(), trace.new_event()
    trace.recorded(_REDUCE, mine)
    trace.recorded(_PEERS, theirs)
    trace.waited(_PEERS, mine)
    trace.waited(_REDUCE, theirs)

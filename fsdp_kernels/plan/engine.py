# SPDX-License-Identifier: Apache-2.0
"""A discrete-event simulation of streams: what starts when, and who waits for whom.

A stream runs what is queued on it in order. Marks are events that other streams may wait for.
Computation takes its time whatever else runs; transfers that use the same links at the same time
share them equally. The host queues at once: it is ahead of the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from fsdp_kernels.plan.network import Phase, Where


@dataclass(frozen=True, slots=True)
class Ran:
    """What a stream did.

    Attributes:
        stream: Which.
        label: What.
        start_s: When it began.
        stop_s: When it ended.
    """

    stream: str
    label: str
    start_s: float
    stop_s: float


@dataclass(slots=True)
class _Work:
    """Something that takes time: first an unshared part, then a share of a link.

    Attributes:
        fixed_s: What is left of the unshared part.
        transfer_s: What is left of the transfer, on links of its own.
        where: Which links; None for computation.
    """

    label: str
    fixed_s: float
    transfer_s: float = 0.0
    where: Where | None = None
    start_s: float = -1.0


@dataclass(frozen=True, slots=True)
class _Mark:
    number: int


@dataclass(frozen=True, slots=True)
class _Wait:
    number: int


@dataclass
class Engine:
    """Streams, and what the host has queued on them.

    Attributes:
        ran: What has run, in the order in which it ended.
        marks: When each mark was reached, once `run` has returned.
    """

    ran: list[Ran] = field(default_factory=list)
    marks: dict[int, float] = field(default_factory=dict)
    _queues: dict[str, deque[_Work | _Mark | _Wait]] = field(default_factory=dict)
    _count: int = 0

    def compute(self, label: str, seconds: float, stream: str = "compute") -> None:
        """Queue computation."""
        self._queue(stream).append(_Work(label, seconds))

    def transfer(self, stream: str, label: str, phase: Phase) -> None:
        """Queue a collective."""
        work = _Work(label, phase.latency_s, phase.transfer_s, phase.where)
        self._queue(stream).append(work)

    def mark(self, stream: str) -> int:
        """Mark a stream's present end; returns the mark's number."""
        self._count += 1
        self._queue(stream).append(_Mark(self._count))
        return self._count

    def wait(self, stream: str, mark: int) -> None:
        """Let nothing queued from now on start before a mark was reached."""
        self._queue(stream).append(_Wait(mark))

    def run(self) -> float:
        """Run everything; returns the time at which the last of it ended.

        Raises:
            RuntimeError: Streams wait for one another for ever.
        """
        now = 0.0
        while True:
            active = self._start(now)
            if not active:
                break
            now = self._advance(active, now)
        stuck = [stream for stream, queue in self._queues.items() if queue]
        if stuck:
            raise RuntimeError(
                f"simulation: expected every stream to end, got {', '.join(stuck)} waiting for "
                "marks that nobody reaches. This is a fault of the simulator."
            )
        return now

    def _queue(self, stream: str) -> deque[_Work | _Mark | _Wait]:
        return self._queues.setdefault(stream, deque())

    def _start(self, now: float) -> dict[str, _Work]:
        """Pass marks and waits as far as they go; returns what runs on each stream now."""
        active: dict[str, _Work] = {}
        moved = True
        while moved:
            moved = False
            for stream, queue in self._queues.items():
                while queue and not isinstance(queue[0], _Work):
                    head = queue[0]
                    if isinstance(head, _Wait) and head.number not in self.marks:
                        break
                    if isinstance(head, _Mark):
                        self.marks[head.number] = now
                    queue.popleft()
                    moved = True
                if queue and isinstance(queue[0], _Work) and stream not in active:
                    work = active[stream] = queue[0]
                    if work.start_s < 0:
                        work.start_s = now
        return active

    def _advance(self, active: dict[str, _Work], now: float) -> float:
        """Let time pass until something ends, or begins to use a link; returns the time then."""
        users = _users(active.values())

        def left(work: _Work) -> float:
            if work.fixed_s > 0 or work.where is None:
                return work.fixed_s
            return work.transfer_s * users[work.where]

        passed = min(left(work) for work in active.values())
        for stream, work in active.items():
            last = left(work) <= passed
            if work.fixed_s > 0 or work.where is None:
                work.fixed_s = 0.0 if last else work.fixed_s - passed
                last = last and not work.transfer_s
            else:
                work.transfer_s = 0.0 if last else work.transfer_s - passed / users[work.where]
            if last:
                self._queues[stream].popleft()
                self.ran.append(Ran(stream, work.label, work.start_s, now + passed))
        return now + passed


def _users(active: Iterable[_Work]) -> dict[Where, int]:
    users: dict[Where, int] = {"inside": 0, "between": 0}
    for work in active:
        if work.where is not None and not work.fixed_s > 0:
            users[work.where] += 1
    return users

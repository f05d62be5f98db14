# SPDX-License-Identifier: Apache-2.0
"""Labels, profiler ranges and the recorded schedule: one name for a thing wherever it shows.

A label reads `fk.gather[layers.3/0]`: verb, unit path, bucket index. The same string stands in
profiler traces, in errors and, without its brackets, in recorded schedules.

A recorded schedule also has a `log`: which buffers each operation reads and writes on which stream,
and which events streams record and wait for. From it a test derives what is ordered before what.
And it has `moments`, with times, which `Schedule.save_trace` draws.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

from torch.autograd import profiler as _profiler

from fsdp_kernels.timeline import Kind, Moment, drawn, now


@lru_cache(maxsize=16384)  # every bucket asks for the same few at every step
def label(verb: str, unit: str, bucket: int | None = None) -> str:
    """Return the label of an operation, such as `fk.gather[layers.3/0]`.

    Args:
        verb: One of gather, wait, free, prefetch, reduce, step.
        unit: The unit's path in the model; "" is the root.
        bucket: Index of the bucket in the unit, where the operation concerns one.
    """
    return f"fk.{verb}[{_place(unit, bucket)}]"


def _place(unit: str, bucket: int | None) -> str:
    name = unit or "root"
    return name if bucket is None else f"{name}/{bucket}"


@dataclass(frozen=True, slots=True)
class ScheduleEvent:
    """One thing that the runtime did, in the order in which the host did it.

    `str(event)` is the short form, such as `gather layers.3/0`.
    """

    verb: str
    unit: str
    bucket: int | None = None

    @property
    def label(self) -> str:
        """The label that the same operation has in traces and errors."""
        return label(self.verb, self.unit, self.bucket)

    def __str__(self) -> str:
        return f"{self.verb} {_place(self.unit, self.bucket)}"


@dataclass(frozen=True, slots=True)
class Access:
    """An operation on a stream, and the buffers that it touches.

    Attributes:
        label: What the operation is, such as `fk.pack[layers.3/0]`.
        stream: `"compute"` (the first compute stream that was seen; others are `"compute#2"` and so
            on), the role of a collective's stream, or `"peers"`: what other ranks do where they
            read this rank's memory.
        reads: Names of the buffers that it reads, such as `params slot 1`.
        writes: Names of those that it writes. Memory that is allocated or let go counts as written
            on the stream of its allocation: whoever gets it next on that stream may write at once.
    """

    label: str
    stream: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Recorded:
    """A stream's present position was marked by an event."""

    stream: str
    event: int


@dataclass(frozen=True, slots=True)
class Waited:
    """A stream was told to start nothing further before an event."""

    stream: str
    event: int


Entry = Access | Recorded | Waited


class Schedule(list[ScheduleEvent]):
    """The events of one `record_schedule()`, in order.

    `str(schedule)` has one short form per line, for comparing with a literal list.

    Attributes:
        log: What was queued on which stream, in the order in which the host did it. Collectives and
            waits are in it where the communicator has streams of its own.
        moments: The same with times: ranges of the host, collectives, and memory held.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Entry] = []
        self.moments: list[Moment] = []

    def save_trace(self, path: str | os.PathLike[str], rank: int = 0) -> None:
        """Write what was recorded as a trace that Perfetto and chrome://tracing open.

        Streams are rows, verbs are slices with their labels, and the bytes in use of full
        parameters, full gradients, gradients in leaves and shards of gradients are counters. Times
        are the host's (`timeline.py` says what that means where a device computes).

        Args:
            path: The JSON file.
            rank: This rank's number, which tells the files of several ranks apart.
        """
        drawn(self.moments, f"fsdp_kernels rank {rank}", rank).save(path)

    def labels(self) -> list[str]:
        """Return every event's label, such as `fk.gather[layers.3/0]`."""
        return [event.label for event in self]

    def lines(self) -> list[str]:
        """Return every event's short form, such as `gather layers.3/0`."""
        return [str(event) for event in self]

    def __str__(self) -> str:
        return "\n".join(self.lines())


# Replaced as a whole, never changed in place: `emit` reads it without a lock, from whichever thread
# runs the hooks (backward has its own on CUDA). Public, since to look at it costs no call.
recorders: tuple[Schedule, ...] = ()
_lock = threading.Lock()


@contextmanager
def record_schedule() -> Iterator[Schedule]:
    """Record what the runtime does, in any thread, while the context is open.

    Recorders may be nested or overlap; each sees every event of its own time.

    Yields:
        The schedule, a list that grows as events happen and stays valid afterwards.
    """
    global recorders
    schedule = Schedule()
    with _lock:
        if not recorders:
            _compute_streams.clear()
            _announced.clear()
            _results.clear()
        recorders = (*recorders, schedule)
    try:
        yield schedule
    finally:
        with _lock:
            # By identity: two recorders of the same events are equal lists.
            recorders = tuple(other for other in recorders if other is not schedule)


def emit(verb: str, unit: str, bucket: int | None = None) -> None:
    """Append an event to every open recorder; does nothing, quickly, when there is none."""
    if recorders:
        event = ScheduleEvent(verb, unit, bucket)
        for schedule in recorders:
            schedule.append(event)


def moment(kind: Kind, label: str, nbytes: int = 0) -> None:
    """Note that something happens now; ask `recorders` first, since labels cost more."""
    found = now(kind, label, nbytes)
    for schedule in recorders:
        schedule.moments.append(found)


# -- the log: what is ordered before what ---------------------------------------------------------

_compute_streams: dict[int, str] = {}
_announced: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
_results: dict[int, tuple[str, ...]] = {}
_own_events = itertools.count(1)


def recording() -> bool:
    """Whether anybody records; ask before making the names of buffers, which costs more."""
    return bool(recorders)


def compute_stream(handle: int) -> str:
    """Return the name of a compute stream, which the handle tells apart from others."""
    name = _compute_streams.get(handle)
    if name is None:
        count = len(_compute_streams)
        name = _compute_streams[handle] = f"compute#{count + 1}" if count else "compute"
    return name


def new_event() -> int:
    """Return the number of an event that is not a communicator's: those are positive."""
    return -next(_own_events)


def access(
    label: str, stream: str, reads: tuple[str, ...] = (), writes: tuple[str, ...] = ()
) -> None:
    """Note an operation that was queued on a stream."""
    _log(Access(label, stream, reads, writes))


def recorded(stream: str, event: int) -> None:
    """Note that an event marks a stream's present position."""
    _log(Recorded(stream, event))


def waited(stream: str, event: int) -> None:
    """Note that a stream waits for an event; and then reads what nobody was announced to read."""
    _log(Waited(stream, event))
    results = _results.pop(event, ())
    if results:
        access("fk.read", stream, results)


def announce(label: str, reads: tuple[str, ...] = (), writes: tuple[str, ...] = ()) -> None:
    """Say what the next collective with a label reads and writes: its backend sees only tensors."""
    if recorders:
        _announced[label] = (reads, writes)


@dataclass(frozen=True, slots=True)
class Issued:
    """A collective as its backend has issued it.

    Attributes:
        label: The collective's label.
        stream: The stream that it runs on.
        started: The event of the compute stream that it waits for.
        done: The event that marks its end.
    """

    label: str
    stream: str
    started: int
    done: int


def collectives(compute: str, issued: Sequence[Issued]) -> None:
    """Note collectives that were issued together: one alone, or a group that shares its events.

    What was not announced was made on the compute stream right before, and is read right after the
    wait: so does all code here that does not keep the ticket.

    Args:
        compute: The compute stream whose work they wait for.
        issued: At least one.
    """
    touched = [operands(one.label, one.done, compute) for one in issued]
    for started in dict.fromkeys(one.started for one in issued):
        recorded(compute, started)
    for stream, start in dict.fromkeys((one.stream, one.started) for one in issued):
        waited(stream, start)
    for one, (reads, writes) in zip(issued, touched, strict=True):
        access(one.label, one.stream, reads, writes)
    for stream, done in dict.fromkeys((one.stream, one.done) for one in issued):
        recorded(stream, done)


def operands(label: str, done: int, compute: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what a collective that is issued now reads and writes; see `collectives`.

    Args:
        label: Its label.
        done: The event that will mark its end.
        compute: The compute stream whose work it waits for.
    """
    announced = _announced.pop(label, None)
    if announced is not None:
        return announced
    names = (f"operands of {label}",)
    access(label, compute, writes=names)
    _results[done] = _results.get(done, ()) + names
    return names, names


def _log(entry: Entry) -> None:
    for schedule in recorders:
        schedule.log.append(entry)


_NO_SPAN: AbstractContextManager[None] = nullcontext()


def span(verb: str, unit: str, bucket: int | None = None) -> AbstractContextManager[object]:
    """Return a range while a profiler (or `emit_nvtx`) or a recorder listens, else a null one.

    A `record_function` costs microseconds even when nobody listens, which small units would notice.
    """
    if recorders:
        return _recorded_span(label(verb, unit, bucket))
    if _profiler._is_profiler_enabled:
        return _profiler.record_function(label(verb, unit, bucket))
    return _NO_SPAN


@contextmanager
def _recorded_span(label: str) -> Iterator[None]:
    moment("begin", label)
    try:
        with _profiler.record_function(label) if _profiler._is_profiler_enabled else _NO_SPAN:
            yield
    finally:
        moment("end", label)

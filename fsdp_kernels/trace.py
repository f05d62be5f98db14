# SPDX-License-Identifier: Apache-2.0
"""Labels, profiler ranges and the recorded schedule: one name for a thing wherever it shows.

A label reads `fk.gather[layers.3/0]`: verb, unit path, bucket index. The same string stands in
profiler traces, in errors and, without its brackets, in recorded schedules.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from torch.autograd import profiler as _profiler


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


class Schedule(list[ScheduleEvent]):
    """The events of one `record_schedule()`, in order.

    `str(schedule)` has one short form per line, for comparing with a literal list.
    """

    def labels(self) -> list[str]:
        """Return every event's label, such as `fk.gather[layers.3/0]`."""
        return [event.label for event in self]

    def lines(self) -> list[str]:
        """Return every event's short form, such as `gather layers.3/0`."""
        return [str(event) for event in self]

    def __str__(self) -> str:
        return "\n".join(self.lines())


# Replaced as a whole, never changed in place: `emit` reads it without a lock, from whichever thread
# runs the hooks (backward has its own on CUDA).
_recorders: tuple[Schedule, ...] = ()
_lock = threading.Lock()


@contextmanager
def record_schedule() -> Iterator[Schedule]:
    """Record what the runtime does, in any thread, while the context is open.

    Recorders may be nested or overlap; each sees every event of its own time.

    Yields:
        The schedule, a list that grows as events happen and stays valid afterwards.
    """
    global _recorders
    schedule = Schedule()
    with _lock:
        _recorders = (*_recorders, schedule)
    try:
        yield schedule
    finally:
        with _lock:
            # By identity: two recorders of the same events are equal lists.
            _recorders = tuple(other for other in _recorders if other is not schedule)


def emit(verb: str, unit: str, bucket: int | None = None) -> None:
    """Append an event to every open recorder; does nothing, quickly, when there is none."""
    if _recorders:
        event = ScheduleEvent(verb, unit, bucket)
        for schedule in _recorders:
            schedule.append(event)


_NO_SPAN: AbstractContextManager[None] = nullcontext()


def span(label: str) -> AbstractContextManager[object]:
    """Return a profiler range while a profiler (or `emit_nvtx`) is active, else a shared null one.

    A `record_function` costs microseconds even when nobody listens, which small units would notice.
    """
    if _profiler._is_profiler_enabled:
        return _profiler.record_function(label)
    return _NO_SPAN

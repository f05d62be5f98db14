# SPDX-License-Identifier: Apache-2.0
"""The one small interface to streams and events.

The runtime names streams by role: `"compute"` is always torch's current stream and is never stored,
`"gather"` and `"reduce"` are the ones that collectives run on. Events are named by the fact that
they prove (`freed`). A collective waits by itself for what the current stream has when it is
issued, and a ticket's wait makes the current stream wait for the collective; so events are needed
only where memory passes between two compute streams, and cost nothing while there is one.

There may be several: autograd runs an operation's backward on the stream of its forward, and makes
one stream wait for another only where a gradient passes between them. What those streams share
behind autograd's back (gathered weights, gradients in leaves) is ordered by `Users`. Reductions are
waited for on streams on which a unit is used or a gradient has come, so that orders them too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from fsdp_kernels import trace

Stream = Literal["compute", "gather", "reduce"]


class Event(Protocol):
    """A position in a stream."""


class Place(Protocol):
    """A stream that memory was allocated on, and must be freed on."""


class Streams(Protocol):
    """Records events on the current stream and makes streams wait for them.

    Attributes:
        single: Whether there is never more than one compute stream: what orders several is skipped.
    """

    single: bool

    def here(self) -> Place | None:
        """Return the current stream, for memory that is allocated now."""

    def name(self, place: Place | None = None) -> str:
        """Return how recorded schedules call the current stream, or that of an allocation."""

    def record(self) -> Event | None:
        """Mark the present position of the current stream."""

    def wait(self, stream: Stream, event: Event | None) -> None:
        """Let nothing issued from now on in a role start before an event; None costs nothing."""

    def wait_at(self, place: Place | None, event: Event | None) -> None:
        """Make the stream of an allocation wait for an event, before the memory is let go."""

    def follow(self, place: Place | None) -> None:
        """Make the current stream wait for what another one has queued by now."""

    def precede(self, place: Place | None) -> None:
        """Make another stream wait for what the current one has queued by now."""


class Users:
    """The compute streams that use some memory at present: nearly always one.

    Attributes:
        places: Each of them once.
    """

    __slots__ = ("places",)

    def __init__(self) -> None:
        self.places: list[Place] = []

    def add(self, streams: Streams) -> bool:
        """Note that the current stream uses the memory; whether others did before it."""
        if streams.single:
            return False
        here = streams.here()
        if here is None or here in self.places:
            return False
        self.places.append(here)
        return len(self.places) > 1

    def join(self, streams: Streams) -> None:
        """Make the current stream wait for all of them."""
        for place in self.places:
            streams.follow(place)

    def release(self, streams: Streams) -> None:
        """Make all of them wait for the current stream, and forget them."""
        for place in self.places:
            streams.precede(place)
        self.places.clear()


class HostStreams:
    """Streams where the host's own order is the only order."""

    single = True

    def here(self) -> Place | None:
        """Nothing to tell apart."""
        return None

    def name(self, place: Place | None = None) -> str:
        """The one there is."""
        return "compute"

    def record(self) -> Event | None:
        """Nothing to mark: whatever the host issued before has been ordered."""
        return None

    def wait(self, stream: Stream, event: Event | None) -> None:
        """Nothing to wait for."""

    def wait_at(self, place: Place | None, event: Event | None) -> None:
        """Nothing to wait for."""

    def follow(self, place: Place | None) -> None:
        """Nothing to wait for."""

    def precede(self, place: Place | None) -> None:
        """Nothing waits."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """An event and the stream that it was recorded on; its number in recorded schedules."""

    event: Any
    stream: Any
    number: int


class CudaStreams:
    """CUDA streams and events, through `torch.cuda` or an object that looks like it.

    Args:
        gather: The stream of gathers; None where they run in the current stream's order.
        reduce: The stream of reductions; likewise.
        cuda: `torch.cuda`.
        current: Returns the current stream's handle; None asks `cuda` for the stream itself, which
            takes longer.
    """

    single = False

    def __init__(
        self,
        gather: Any = None,
        reduce: Any = None,
        cuda: Any = torch.cuda,
        current: Callable[[], int] | None = None,
    ) -> None:
        self._own = {"gather": gather, "reduce": reduce}
        self._cuda = cuda
        self._current = current
        self._seen: dict[int, Any] = {}

    def here(self) -> Any:
        """Return the current stream."""
        if self._current is None:
            return self._cuda.current_stream()
        handle = self._current()
        stream = self._seen.get(handle)
        if stream is None:
            stream = self._seen[handle] = self._cuda.current_stream()
        return stream

    def name(self, place: Place | None = None) -> str:
        """Return the stream's name, by its handle."""
        stream: Any = place or self.here()
        return trace.compute_stream(stream.cuda_stream)

    def record(self) -> Event | None:
        """Record a timing-free event on the current stream."""
        return self._mark(self.here())

    def _mark(self, stream: Any) -> _Mark:
        event = self._cuda.Event()
        event.record(stream)
        number = 0
        if trace.recording():
            number = trace.new_event()
            trace.recorded(self.name(stream), number)
        return _Mark(event, stream, number)

    def wait(self, stream: Stream, event: Event | None) -> None:
        """Make a role's stream wait, unless its next work waits for the event's stream anyway."""
        if isinstance(event, _Mark):
            current = self.here()
            if event.stream != current:
                own = self._own.get(stream)
                (own or current).wait_event(event.event)
                if trace.recording():
                    trace.waited(stream if own else self.name(current), event.number)

    def wait_at(self, place: Place | None, event: Event | None) -> None:
        """Make the stream of an allocation wait, unless the event is its own."""
        if isinstance(event, _Mark) and place is not None and event.stream != place:
            self._wait(place, event)

    def follow(self, place: Place | None) -> None:
        """Make the current stream wait for another one."""
        here = self.here()
        if place is not None and place != here:
            self._wait(here, self._mark(place))

    def precede(self, place: Place | None) -> None:
        """Make another stream wait for the current one."""
        here = self.here()
        if place is not None and place != here:
            self._wait(place, self._mark(here))

    def _wait(self, stream: Any, mark: _Mark) -> None:
        stream.wait_event(mark.event)
        if trace.recording():
            trace.waited(self.name(stream), mark.number)

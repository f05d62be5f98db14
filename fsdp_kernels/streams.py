# SPDX-License-Identifier: Apache-2.0
"""The one small interface to streams and events.

The runtime names streams by role: `"compute"` is always torch's current stream and is never stored,
`"gather"` and `"reduce"` are the ones that collectives run on. Events are named by the fact that
they prove (`freed`). A collective waits by itself for what the current stream has when it is
issued, and a ticket's wait makes the current stream wait for the collective; so events are needed
only where memory passes between two compute streams, and cost nothing while there is one.
"""

from __future__ import annotations

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
    """Records events on the current stream and makes streams wait for them."""

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


class HostStreams:
    """Streams where the host's own order is the only order."""

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
    """

    def __init__(self, gather: Any = None, reduce: Any = None, cuda: Any = torch.cuda) -> None:
        self._own = {"gather": gather, "reduce": reduce}
        self._cuda = cuda

    def here(self) -> Place | None:
        """Return the current stream."""
        place: Place = self._cuda.current_stream()
        return place

    def name(self, place: Place | None = None) -> str:
        """Return the stream's name, by its handle."""
        stream: Any = place or self.here()
        return trace.compute_stream(stream.cuda_stream)

    def record(self) -> Event | None:
        """Record a timing-free event on the current stream."""
        stream = self._cuda.current_stream()
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
            current = self._cuda.current_stream()
            if event.stream != current:
                own = self._own.get(stream)
                (own or current).wait_event(event.event)
                if trace.recording():
                    trace.waited(stream if own else self.name(current), event.number)

    def wait_at(self, place: Place | None, event: Event | None) -> None:
        """Make the stream of an allocation wait, unless the event is its own."""
        if isinstance(event, _Mark) and place is not None and event.stream != place:
            place.wait_event(event.event)  # type: ignore[attr-defined]
            if trace.recording():
                trace.waited(self.name(place), event.number)

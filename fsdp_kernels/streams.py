# SPDX-License-Identifier: Apache-2.0
"""The one small interface to streams and events.

The runtime names streams by role: `"compute"` is always torch's current stream, `"gather"` and
`"reduce"` are the ones that collectives run on. A collective waits by itself for what the current
stream has when it is issued, and a ticket's wait makes the current stream wait for the collective.
So events are needed only where memory passes between two compute streams. What is kept of its last
use is the stream (`freed`): if another one takes the memory, it waits for all that the first has
queued by then. While there is one compute stream, there are no events.

There may be several: autograd runs an operation's backward on the stream of its forward, and makes
one stream wait for another only where a gradient passes between them. What those streams share
behind autograd's back (gathered weights, gradients in leaves) is ordered by `Users`. Reductions are
waited for on streams on which a unit is used or a gradient has come, so that orders them too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch

from fsdp_kernels import trace

Stream = Literal["compute", "gather", "reduce"]


class Place(Protocol):
    """A stream that memory was allocated on, or used on last."""


class Streams(Protocol):
    """Makes streams wait for what others have queued.

    Attributes:
        single: Whether there is never more than one compute stream: what orders several is skipped.
    """

    single: bool

    def here(self) -> Place | None:
        """Return the current stream, for memory that is allocated or let go now."""

    def name(self, place: Place | None = None) -> str:
        """Return how recorded schedules call the current stream, or that of an allocation."""

    def wait(self, stream: Stream, place: Place | None) -> None:
        """Let nothing issued from now on in a role start before what a stream has queued by now.

        Costs nothing if that is the current stream, for which a role's next work waits anyway.
        """

    def wait_at(self, place: Place | None, other: Place | None) -> None:
        """Make the stream of an allocation wait for another one, before the memory is let go."""

    def follow(self, place: Place | None) -> None:
        """Make the current stream wait for what another one has queued by now."""

    def precede(self, place: Place | None) -> None:
        """Make another stream wait for what the current one has queued by now."""

    def close(self) -> None:
        """Forget the streams of roles, which are about to be destroyed."""


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

    def wait(self, stream: Stream, place: Place | None) -> None:
        """Nothing to wait for."""

    def wait_at(self, place: Place | None, other: Place | None) -> None:
        """Nothing to wait for."""

    def follow(self, place: Place | None) -> None:
        """Nothing to wait for."""

    def precede(self, place: Place | None) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing to forget."""


class CudaStreams:
    """CUDA streams and events, through `torch.cuda` or an object that looks like it.

    Args:
        gather: The stream of gathers; None where they run in the current stream's order.
        reduce: The stream of reductions; likewise.
        cuda: `torch.cuda`.
        current: Returns the current stream's handle; None asks `cuda` for the stream itself, which
            takes longer.
        device: Whose streams; None is the current device.
    """

    single = False

    def __init__(
        self,
        gather: Any = None,
        reduce: Any = None,
        cuda: Any = torch.cuda,
        current: Callable[[], int] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._own = {"gather": gather, "reduce": reduce}
        self._cuda = cuda
        self._current = current
        self._device = device
        self._seen: dict[int, Any] = {}

    def here(self) -> Any:
        """Return the current stream."""
        if self._current is None:
            return self._cuda.current_stream(self._device)
        handle = self._current()
        stream = self._seen.get(handle)
        if stream is None:
            stream = self._seen[handle] = self._cuda.current_stream(self._device)
        return stream

    def name(self, place: Place | None = None) -> str:
        """Return the stream's name, by its handle."""
        stream: Any = place or self.here()
        return trace.compute_stream(stream.cuda_stream)

    def wait(self, stream: Stream, place: Place | None) -> None:
        """Make a role's stream wait, unless its next work waits for that one anyway."""
        current = self.here()
        if place is not None and place != current:
            own = self._own[stream] if stream != "compute" else None
            self._order(own or current, place, role=stream if own else None)

    def wait_at(self, place: Place | None, other: Place | None) -> None:
        """Make the stream of an allocation wait, unless it is the other one."""
        if place is not None and other is not None and place != other:
            self._order(place, other)

    def follow(self, place: Place | None) -> None:
        """Make the current stream wait for another one."""
        self.wait_at(self.here(), place)

    def precede(self, place: Place | None) -> None:
        """Make another stream wait for the current one."""
        self.wait_at(place, self.here())

    def close(self) -> None:
        """Let the current stream do what the roles' streams did."""
        self._own = {"gather": None, "reduce": None}

    def _order(self, later: Any, earlier: Any, role: Stream | None = None) -> None:
        event = self._cuda.Event()
        event.record(earlier)
        later.wait_event(event)
        if trace.recording():
            number = trace.new_event()
            trace.recorded(self.name(earlier), number)
            trace.waited(role or self.name(later), number)

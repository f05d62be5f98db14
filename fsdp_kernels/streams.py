# SPDX-License-Identifier: Apache-2.0
"""The one small interface to streams and events.

The runtime names streams by role (`"compute"`, `"gather"`, `"reduce"`) and events by the fact that
they prove (`packed`, `freed`, `stepped`). The compute stream is always torch's current one and is
never stored. On a host without streams, and over a process group, which orders its own stream
against the current one, there is nothing to do: `HostStreams`.
"""

from __future__ import annotations

from typing import Literal, Protocol

Stream = Literal["compute", "gather", "reduce"]


class Event(Protocol):
    """A position in a stream."""


class Streams(Protocol):
    """Records events on streams and makes streams wait for them."""

    def record(self, stream: Stream) -> Event | None:
        """Mark the present position of a stream."""

    def wait(self, stream: Stream, event: Event | None) -> None:
        """Make a stream wait for an event; None proves nothing and costs nothing."""


class HostStreams:
    """Streams where the host's own order is the only order."""

    def record(self, stream: Stream) -> Event | None:
        """Nothing to mark: whatever the host issued before has been ordered."""
        return None

    def wait(self, stream: Stream, event: Event | None) -> None:
        """Nothing to wait for."""

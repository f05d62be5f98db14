# SPDX-License-Identifier: Apache-2.0
"""Finds accesses that nothing orders, in a recorded log of streams, events and buffers.

Each stream has a vector clock. Work on one stream is ordered; a wait joins the waiting stream's
clock with that of the event; what the host issues after it has itself waited for an event comes
after that event on every stream. Two accesses of one buffer, at least one of them a write, that are
not ordered are a race, whether or not the machine at hand would have shown it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import SupportsIndex

from fsdp_kernels import trace
from fsdp_kernels.trace import Access, Entry, Recorded, Waited

HOST = "host"
"""Stands for the host as a stream: `Waited(HOST, event)` is a host that blocks until the event."""

Clock = dict[str, int]


@dataclass(frozen=True)
class Race:
    """Two accesses of a buffer that nothing orders; numbers are places in the log."""

    buffer: str
    first: int
    second: int
    labels: tuple[str, str]
    streams: tuple[str, str]

    def __str__(self) -> str:
        first, second = (
            f"{label} on {stream} (entry {place})"
            for label, stream, place in zip(
                self.labels, self.streams, (self.first, self.second), strict=True
            )
        )
        return f"'{self.buffer}': nothing orders {first} and {second}"


class Clocks:
    """The vector clocks of all streams at one point of a log."""

    def __init__(self) -> None:
        self._streams: dict[str, Clock] = {HOST: {}}
        self._events: dict[int, Clock] = {}

    def tick(self, stream: str) -> Clock:
        """Queue an operation on a stream; return its clock."""
        clock = self._issue(stream)
        clock[stream] = clock.get(stream, 0) + 1
        return clock

    def record(self, stream: str, event: int) -> None:
        """Mark a stream's present position by an event."""
        if event in self._events or event == 0:
            raise ValueError(f"event {event}: expected a new number, got one seen before.")
        self._events[event] = dict(self._issue(stream))

    def adds(self, stream: str, event: int) -> bool:
        """Whether a wait would order anything that was not ordered already."""
        clock = self._issue(stream)
        return any(clock.get(other, 0) < tick for other, tick in self._event(event).items())

    def wait(self, stream: str, event: int) -> None:
        """Make a stream wait for an event."""
        _join(self._issue(stream), self._event(event))

    def _issue(self, stream: str) -> Clock:
        clock = self._streams.setdefault(stream, {})
        _join(clock, self._streams[HOST])
        return clock

    def _event(self, event: int) -> Clock:
        if event not in self._events:
            raise ValueError(
                f"event {event}: expected one that was recorded before, got an unknown one. "
                "Begin to record before the first event."
            )
        return self._events[event]


def _join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick


@dataclass(frozen=True)
class _Seen:
    """The last access of a kind that a stream made to a buffer: it comes after all earlier ones."""

    tick: int
    place: int
    label: str


def races(log: Iterable[Entry], without: Collection[int] = ()) -> list[Race]:
    """Return the races of a log, each pair of labels and streams once for a buffer.

    Args:
        log: What was recorded.
        without: Places of waits that are left out.

    Raises:
        ValueError: A wait for an event that the log does not have, or one event recorded twice.
    """
    clocks = Clocks()
    writes: dict[str, dict[str, _Seen]] = {}
    reads: dict[str, dict[str, _Seen]] = {}
    found: dict[tuple[object, ...], Race] = {}
    for place, entry in enumerate(log):
        if isinstance(entry, Recorded):
            clocks.record(entry.stream, entry.event)
        elif isinstance(entry, Waited):
            if place not in without:
                clocks.wait(entry.stream, entry.event)
        else:
            clock = clocks.tick(entry.stream)
            mine = _Seen(clock[entry.stream], place, entry.label)
            for buffer in dict.fromkeys((*entry.reads, *entry.writes)):
                before = [writes.setdefault(buffer, {})]
                if buffer in entry.writes:
                    before.append(reads.setdefault(buffer, {}))
                for seen in before:
                    for race in _unordered(buffer, seen, clock, entry, place):
                        found.setdefault((buffer, race.labels, race.streams), race)
                kind = writes if buffer in entry.writes else reads
                kind.setdefault(buffer, {})[entry.stream] = mine
    return list(found.values())


def _unordered(
    buffer: str, seen: dict[str, _Seen], clock: Clock, entry: Access, place: int
) -> Iterable[Race]:
    for stream, other in seen.items():
        if clock.get(stream, 0) < other.tick:
            labels, streams = (other.label, entry.label), (stream, entry.stream)
            yield Race(buffer, other.place, place, labels, streams)


def waits(log: Sequence[Entry]) -> list[int]:
    """Return the places of the waits in a log."""
    return [place for place, entry in enumerate(log) if isinstance(entry, Waited)]


def implied_waits(log: Iterable[Entry]) -> set[int]:
    """Return the places of waits that order nothing that was not ordered before them."""
    clocks = Clocks()
    found = set()
    for place, entry in enumerate(log):
        if isinstance(entry, Recorded):
            clocks.record(entry.stream, entry.event)
        elif isinstance(entry, Waited):
            if not clocks.adds(entry.stream, entry.event):
                found.add(place)
            clocks.wait(entry.stream, entry.event)
        else:
            clocks.tick(entry.stream)
    return found


Site = tuple[str, str, str]
"""A file of the package, a function in it, and the kind of wait: see `SitedLog`."""


@dataclass(frozen=True)
class Analysis:
    """What became of a log when waits were left out.

    Attributes:
        races: Of the whole log.
        needed: For each site, how many of its waits leave a race when they alone are left out.
        implied: How many order nothing that was not ordered already.
        unneeded: How many order something, but nothing that anybody touches before another wait
            orders it too.
        found: Whether leaving out all of a site's waits together leaves a race.
    """

    races: list[str]
    needed: Counter[Site]
    implied: Counter[Site]
    unneeded: Counter[Site]
    found: dict[Site, bool]


def analyse(log: SitedLog) -> Analysis:
    """Leave out each wait alone, and each site's waits together."""
    implied = implied_waits(log)
    whole = races(log)
    counts: dict[str, Counter[Site]] = {"needed": Counter(), "implied": Counter(), "": Counter()}
    for place, site in log.sites.items():
        kind = ""
        if place in implied:
            kind = "implied"
        elif len(races(log, [place])) > len(whole):
            kind = "needed"
        counts[kind][site] += 1
    found = {
        site: len(races(log, log.places(site))) > len(whole) for site in set(log.sites.values())
    }
    return Analysis(
        [str(race) for race in whole], counts["needed"], counts["implied"], counts[""], found
    )


# -- where a wait was made ------------------------------------------------------------------------

_PACKAGE = Path(trace.__file__).parent
_BELOW = (_PACKAGE / "trace.py", _PACKAGE / "streams.py")
_TEST_STREAMS = Path(__file__).parent / "streamed_comm.py"


class SitedLog(list[Entry]):
    """A log that notes which line of the runtime caused each of its waits.

    Attributes:
        sites: By place in the log: `(file, function, kind)`, where kind is `issue` (a collective
            waits for the compute stream before it starts), `ticket` (a stream waits for a
            collective) or the method of `Streams` that was called. What a test's own streams do is
            `("the test", "", "")`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sites: dict[int, Site] = {}

    def append(self, entry: Entry, /) -> None:
        if isinstance(entry, Waited):
            self.sites[len(self)] = _site()
        super().append(entry)

    def places(self, site: Site) -> list[int]:
        """The places of a site's waits."""
        return [place for place, other in self.sites.items() if other == site]

    def insert(self, index: SupportsIndex, entry: Entry, /) -> None:
        raise NotImplementedError("a log only grows at its end")


def _site() -> Site:
    kind = "ticket"
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if frame.f_code.co_name == "collectives" and path == _PACKAGE / "trace.py":
            kind = "issue"
        elif path == _PACKAGE / "streams.py":
            if not frame.f_code.co_name.startswith("_"):
                kind = frame.f_code.co_name
        elif path == _TEST_STREAMS and frame.f_code.co_name == "wait":
            return "the test", "", ""
        elif (
            path.is_relative_to(_PACKAGE)
            and path not in _BELOW
            and path.parent != _PACKAGE / "comm"
        ):
            return path.name, frame.f_code.co_name, kind
        frame = frame.f_back
    return "?", "?", kind

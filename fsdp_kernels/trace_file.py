# SPDX-License-Identifier: Apache-2.0
"""Rows of slices and counters over time, as a file that Perfetto and chrome://tracing open.

The format is the trace-event format's JSON: complete events (`"X"`) for slices, counter events
(`"C"`) for counters, metadata (`"M"`) for the names of rows. Slices of one row never overlap.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Slice:
    """What a row did from one time to another.

    Attributes:
        row: The row, such as a stream.
        label: What it did, such as `fk.gather[layers.3/0]`.
        start_ns: When it began, in nanoseconds from any origin.
        stop_ns: When it ended.
    """

    row: str
    label: str
    start_ns: int
    stop_ns: int


@dataclass(frozen=True, slots=True)
class Sample:
    """A counter's value from one time on, until its next sample."""

    counter: str
    time_ns: int
    value: int


@dataclass
class TraceFile:
    """What is drawn: rows from top to bottom, then counters.

    Attributes:
        name: What the process is called.
        rows: The rows, in the order in which they stand; those of slices that are not named here
            follow in the order of their first slice.
        pid: Number that tells several such files apart when they are opened together, as a rank.
    """

    name: str
    rows: list[str] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    pid: int = 0

    def check(self) -> None:
        """Refuse what viewers draw wrongly.

        Raises:
            ValueError: A slice ends before it begins, two slices of one row overlap, or a counter
                is negative.
        """
        last: dict[str, Slice] = {}
        for one in sorted(self.slices, key=lambda s: (s.start_ns, s.stop_ns)):
            before = last.get(one.row)
            if one.stop_ns < one.start_ns:
                raise ValueError(
                    f"trace '{self.name}': expected slices that end after they begin, got {one}. "
                    "Pass times in order."
                )
            if before is not None and before.stop_ns > one.start_ns:
                raise ValueError(
                    f"trace '{self.name}': expected slices of row '{one.row}' one after the "
                    f"other, got {before} and {one}. Give them rows of their own."
                )
            last[one.row] = one
        for sample in self.samples:
            if sample.value < 0:
                raise ValueError(
                    f"trace '{self.name}': expected counters from 0, got {sample}. "
                    "Count what was there before the first sample too."
                )

    def all_rows(self) -> list[str]:
        """Return every row, in order."""
        return list(dict.fromkeys([*self.rows, *(one.row for one in self.slices)]))

    def events(self) -> list[dict[str, Any]]:
        """Return the trace events; times are microseconds from the first slice or sample."""
        rows = {row: index + 1 for index, row in enumerate(self.all_rows())}
        times = [one.start_ns for one in self.slices] + [one.time_ns for one in self.samples]
        origin = min(times, default=0)
        events = [self._meta("process_name", 0, name=self.name)]
        for row, tid in rows.items():
            events.append(self._meta("thread_name", tid, name=row))
            events.append(self._meta("thread_sort_index", tid, sort_index=tid))
        for one in sorted(self.slices, key=lambda s: (rows[s.row], s.start_ns, s.stop_ns)):
            events.append(
                {
                    "ph": "X",
                    "name": one.label,
                    "cat": verb_of(one.label),
                    "pid": self.pid,
                    "tid": rows[one.row],
                    "ts": (one.start_ns - origin) / 1000,
                    "dur": (one.stop_ns - one.start_ns) / 1000,
                }
            )
        for sample in self.samples:
            events.append(
                {
                    "ph": "C",
                    "name": sample.counter,
                    "pid": self.pid,
                    "tid": 0,
                    "ts": (sample.time_ns - origin) / 1000,
                    "args": {"bytes": sample.value},
                }
            )
        return events

    def _meta(self, name: str, tid: int, /, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": self.pid, "tid": tid, "args": args}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Check, then write one JSON object.

        Raises:
            ValueError: See `check`.
        """
        self.check()
        content = {"traceEvents": self.events(), "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(content) + "\n")


def verb_of(label: str) -> str:
    """Return the verb of a label: `gather` for `fk.gather[layers.3/0]`."""
    return label.partition("[")[0].removeprefix("fk.")


def count(changes: Iterable[tuple[str, int, int]]) -> list[Sample]:
    """Turn changes of counters into samples, each counter's first at the first time of all.

    Args:
        changes: (counter, time_ns, by how much), in any order. Of several at one time, only the
            result of all is sampled.
    """
    ordered = sorted(changes, key=lambda change: change[1])
    values: dict[str, int] = dict.fromkeys((counter for counter, _, _ in ordered), 0)
    first = ordered[0][1] if ordered else 0
    found: dict[tuple[str, int], int] = {(counter, first): 0 for counter in values}
    for counter, time_ns, change in ordered:
        values[counter] += change
        found[counter, time_ns] = values[counter]
    return [Sample(counter, time_ns, value) for (counter, time_ns), value in found.items()]


def one_after_another(row: str, bounds: Sequence[tuple[str, int, int]]) -> list[Slice]:
    """Place the work of an in-order stream, of which only bounds are known.

    A stream does one thing after another: what was issued earlier is done when a later one is, and
    none begins before its predecessor has ended.

    Args:
        row: The stream.
        bounds: (label, when it was issued, when it was known to be done), in the order of issue.
    """
    slices: list[Slice] = []
    stops = [stop for _, _, stop in bounds]
    for index in range(len(stops) - 2, -1, -1):
        stops[index] = min(stops[index], stops[index + 1])
    free = 0
    for (label, issued, _), stop in zip(bounds, stops, strict=True):
        start = min(max(issued, free), stop)
        free = max(free, stop)
        slices.append(Slice(row, label, start, stop))
    return slices

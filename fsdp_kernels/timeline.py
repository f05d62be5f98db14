# SPDX-License-Identifier: Apache-2.0
"""What a recorded schedule's moments say about time: rows of slices, and bytes held.

Every time is the host's. On a CPU the host computes, so its row is the work itself. Where a device
computes, the host's row shows when work was queued, and a collective lasts from when it was issued
to when it was waited for: `torch.profiler`, which shows the same labels, has the device's times.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Literal

from fsdp_kernels.trace_file import Slice, TraceFile, count, one_after_another, verb_of

Kind = Literal["begin", "end", "turn", "issue", "done", "hold", "drop"]


@dataclass(frozen=True, slots=True)
class Moment:
    """One thing at one time.

    Attributes:
        kind: A range of the host began or ended; backward turned to a unit (or, without a label,
            ended); a collective was issued or waited for; memory was taken or let go.
        label: Which: a label, or for memory its kind and owner, as in `full_grads[layers.3/0]`.
        nbytes: Of memory.
        time_ns: `time.perf_counter_ns`.
        thread: The host's thread.
    """

    kind: Kind
    label: str
    nbytes: int
    time_ns: int
    thread: int


def now(kind: Kind, label: str, nbytes: int = 0) -> Moment:
    """Return a moment of this time and thread."""
    return Moment(kind, label, nbytes, perf_counter_ns(), threading.get_ident())


def drawn(moments: Sequence[Moment], name: str, pid: int = 0) -> TraceFile:
    """Draw moments: the host's threads, the two streams of collectives, memory and its counters."""
    trace = TraceFile(name, pid=pid)
    moments = sorted(moments, key=lambda moment: moment.time_ns)  # threads append out of order
    threads: dict[int, list[Moment]] = defaultdict(list)
    for moment in moments:
        if moment.kind in ("begin", "end", "turn"):
            threads[moment.thread].append(moment)
    for index, of_thread in enumerate(threads.values()):
        row = f"compute#{index + 1}" if index else "compute"
        trace.rows.append(row)
        trace.slices += _innermost(row, of_thread)
    trace.rows += ["gather", "reduce"]
    trace.slices += _collectives(moments)
    held = _lifetimes(moments)
    trace.slices += _lanes(held)
    trace.samples = count(
        change
        for memory in held
        for change in (
            (memory.kind, memory.start_ns, memory.nbytes),
            (memory.kind, memory.stop_ns, -memory.nbytes),
        )
        if change[2] > 0 or not memory.kept
    )
    return trace


def _innermost(row: str, moments: Iterable[Moment]) -> list[Slice]:
    """Cut a thread's time at every moment; each piece belongs to the innermost open range."""
    slices: list[Slice] = []
    turn, open_ranges = "", [""]
    since = 0
    for moment in moments:
        label = open_ranges[-1] or turn
        if label and moment.time_ns > since:
            if slices and (slices[-1].label, slices[-1].stop_ns) == (label, since):
                since = slices.pop().start_ns  # a call of one of the unit's own submodules
            slices.append(Slice(row, label, since, moment.time_ns))
        since = moment.time_ns
        if moment.kind == "turn":
            turn = moment.label
        elif moment.kind == "begin":
            open_ranges.append(moment.label)
        elif moment.label in open_ranges:  # its beginning was recorded too
            while open_ranges.pop() != moment.label:
                pass
    return slices


def _collectives(moments: Sequence[Moment]) -> list[Slice]:
    waiting: dict[str, deque[int]] = defaultdict(deque)
    bounds: dict[str, list[tuple[str, int, int]]] = {"gather": [], "reduce": []}
    for moment in moments:
        of_row = bounds["reduce" if verb_of(moment.label) == "reduce" else "gather"]
        if moment.kind == "issue":
            waiting[moment.label].append(len(of_row))
            of_row.append((moment.label, moment.time_ns, moments[-1].time_ns))
        elif moment.kind == "done" and waiting[moment.label]:
            index = waiting[moment.label].popleft()
            of_row[index] = (*of_row[index][:2], moment.time_ns)
    return [one for row, found in bounds.items() for one in one_after_another(row, found)]


@dataclass
class _Memory:
    """Memory that was held for a time; `kept` if nobody let it go while it was recorded."""

    kind: str
    owner: str
    nbytes: int
    start_ns: int
    stop_ns: int
    kept: bool


def _lifetimes(moments: Sequence[Moment]) -> list[_Memory]:
    """Pair what was taken with what was let go; what was there before is held from the start."""
    held: dict[str, _Memory] = {}
    gone: list[_Memory] = []
    for moment in moments:
        kind, _, owner = moment.label.partition("[")
        if moment.kind == "hold":
            if moment.label not in held:
                held[moment.label] = _Memory(
                    kind, owner, moment.nbytes, moment.time_ns, moments[-1].time_ns, True
                )
        elif moment.kind == "drop":
            memory = held.pop(moment.label, None)
            if memory is None:
                memory = _Memory(kind, owner, moment.nbytes, moments[0].time_ns, 0, True)
            memory.stop_ns, memory.kept = moment.time_ns, False
            gone.append(memory)
    return sorted([*gone, *held.values()], key=lambda memory: memory.start_ns)


def _lanes(held: Iterable[_Memory]) -> list[Slice]:
    """Draw full buffers in as few rows as never hold two at once: what a pool's slots do."""
    free_at: dict[str, list[int]] = {"full_params": [], "full_grads": []}
    slices: list[Slice] = []
    for memory in held:
        lanes = free_at.get(memory.kind)
        if lanes is None:
            continue
        lane = next((i for i, free in enumerate(lanes) if free <= memory.start_ns), len(lanes))
        lanes[lane:] = [memory.stop_ns, *lanes[lane + 1 :]]
        label = f"{memory.kind}[{memory.owner}"
        slices.append(Slice(f"{memory.kind} {lane}", label, memory.start_ns, memory.stop_ns))
    return sorted(slices, key=lambda one: one.row)

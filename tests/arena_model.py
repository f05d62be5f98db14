# SPDX-License-Identifier: Apache-2.0
"""A model of the shared-memory protocol, and a search through every interleaving of its ranks.

`Rank` has the methods of csrc/cpu/protocol.h under the same names; calling them writes a program of
small steps down (arena_scenarios.py does, as the runtime would). A program has no branches, and
each epoch and each piece of memory has one writer, so what memory holds follows from how far each
rank has come: a state is one position per rank.

What is checked in every reachable state: who reads sees, from each owner, the version that the
owner's own program order says, complete; and some rank can go on until all have ended.

A wait looks at all ranks at once here and at one after the other in C++: that is the same, since
epochs only grow. Memory is sequentially consistent here; that a reader's processor sees what was
written before the epoch is for the ThreadSanitizer test to show (test_arena_threads.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

MASK = (1 << 32) - 1
WRITING = -1

Key = tuple[Hashable, ...]


@dataclass
class Step:
    """What a rank does at once.

    Attributes:
        name: For traces and mutations.
        wait: (key, number): before it, this epoch of every rank must have reached the number.
        sets: Epochs of this rank: key -> number.
        writes: Memory of this rank: key -> tag, or WRITING while it is written.
        reads: Memory that is read from here on: key -> number whose tag every rank must show.
        done: Memory that is not read any more from here on.
    """

    name: str
    wait: tuple[Key, int] | None = None
    sets: dict[Key, int] = field(default_factory=dict)
    writes: dict[Key, int] = field(default_factory=dict)
    reads: dict[Key, int] = field(default_factory=dict)
    done: tuple[Key, ...] = ()


class Rank:
    """One rank's program, written down call by call.

    Args:
        rank: Its number.
        mutations: Names of rules that are broken: `drop <step>` (what the step waits for, or what
            it sets), `weak <step>` (waits for the number before), `early <step>` (an epoch is set
            before the write or the end of the read that it announces).
        start: The number that every epoch starts at.
        slots: Gradient buckets of each rank.
        message_slots: Messages of each rank in an exchange.
    """

    def __init__(
        self,
        rank: int,
        mutations: Sequence[str] = (),
        start: int = 0,
        slots: int = 2,
        message_slots: int = 2,
    ) -> None:
        self.rank = rank
        self.start = start
        self.steps: list[Step] = []
        self.shown: dict[tuple[Key, int], int] = {}  # (memory, number) -> the tag it must show
        self._mutations = frozenset(mutations)
        self._slots, self._message_slots = slots, message_slots
        self._number: dict[str, int] = {}
        self._held: set[str] = set()
        self._version: dict[str, int] = {}
        self._begun = self._posted = self._consumed = self._messages = start

    # -- parameters -------------------------------------------------------------------------------

    def gather(self, bucket: str) -> None:
        assert bucket not in self._held
        number = self._number.get(bucket, self.start) + 1 & MASK
        self._number[bucket] = number
        self._held.add(bucket)
        self.shown[("params", bucket), number] = self._version.get(bucket, 0)
        self._set("gather", ("ready", bucket), number)

    def wait_ready(self, bucket: str) -> None:
        assert bucket in self._held
        number = self._number[bucket]
        self._wait("wait_ready", ("ready", bucket), number, reads={("params", bucket): number})

    def release(self, bucket: str) -> None:
        if bucket in self._held:
            self._held.remove(bucket)
            number = self._number[bucket]
            self._set_after_read("release", ("released", bucket), number, ("params", bucket))

    def wait_released(self, bucket: str) -> None:
        assert bucket not in self._held
        self._wait("wait_released", ("released", bucket), self._number.get(bucket, self.start))

    def write(self, bucket: str) -> None:
        """Write this rank's shard, as the fused step does and as an edit's publication does."""
        self._version[bucket] = version = self._version.get(bucket, 0) + 1
        self._write(("params", bucket), version)

    def held(self) -> list[str]:
        return sorted(self._held)

    # -- gradients --------------------------------------------------------------------------------

    def begin(self) -> None:
        assert (self._posted - self._consumed) & MASK < self._slots
        self._begun = self._begun + 1 & MASK
        self._wait("begin", ("consumed",), self._begun - self._slots & MASK)

    def post(self) -> None:
        """Fill this rank's slot and say so."""
        number = self._posted = self._begun
        self.shown[self._slot(number), number] = number
        self._set_after_write("post", ("grads",), number, self._slot(number), number)

    def wait_posted(self) -> None:
        number = self._consumed + 1 & MASK
        self._wait("wait_posted", ("grads",), number, reads={self._slot(number): number})

    def consume(self) -> None:
        number = self._consumed = self._consumed + 1 & MASK
        self._set_after_read("consume", ("consumed",), number, self._slot(number))

    def skip(self) -> None:
        assert self._posted == self._consumed
        number = self._begun = self._posted = self._consumed = self._consumed + 1 & MASK
        self._set("skip", ("consumed",), number)
        self._set("skip", ("grads",), number)

    def outstanding(self) -> int:
        return self._posted - self._consumed & MASK

    def _slot(self, number: int) -> Key:
        return ("slot", number % self._slots)

    # -- messages ---------------------------------------------------------------------------------

    def exchange(self) -> None:
        number = self._messages = self._messages + 1 & MASK
        message: Key = ("message", number % self._message_slots)
        self.shown[message, number] = number
        self._set_after_write("send", ("posted",), number, message, number)
        self._wait("receive", ("posted",), number, reads={message: number})
        self.steps.append(Step("copied", done=(message,)))

    # -- steps ------------------------------------------------------------------------------------

    def _wait(self, name: str, key: Key, number: int, reads: dict[Key, int] | None = None) -> None:
        wait: tuple[Key, int] | None = (key, number)
        if f"drop {name}" in self._mutations:
            wait = None
        elif f"weak {name}" in self._mutations:
            wait = (key, number - 1 & MASK)
        self.steps.append(Step(name, wait, reads=reads or {}))

    def _set(self, name: str, key: Key, number: int) -> None:
        if f"drop {name}" not in self._mutations:
            self.steps.append(Step(name, sets={key: number}))

    def _write(self, memory: Key, tag: int) -> None:
        self.steps.append(Step("write", writes={memory: WRITING}))
        self.steps.append(Step("written", writes={memory: tag}))

    def _set_after_write(self, name: str, key: Key, number: int, memory: Key, tag: int) -> None:
        if f"early {name}" in self._mutations:
            self._set(name, key, number)
            self._write(memory, tag)
        else:
            self._write(memory, tag)
            self._set(name, key, number)

    def _set_after_read(self, name: str, key: Key, number: int, memory: Key) -> None:
        if f"early {name}" in self._mutations:
            self._set(name, key, number)
            self.steps.append(Step("read", done=(memory,)))
        elif f"drop {name}" in self._mutations:
            self.steps.append(Step("read", done=(memory,)))
        else:
            self.steps.append(Step(name, sets={key: number}, done=(memory,)))


# -- the search -----------------------------------------------------------------------------------


@dataclass
class Result:
    """What a search found: how many states, and the first fault with the way to it."""

    states: int
    fault: str = ""
    trace: tuple[str, ...] = ()


class _Table:
    """One rank's program as tables over its position: 0 is before the first step."""

    def __init__(self, rank: Rank) -> None:
        self.steps = rank.steps
        self.epochs: dict[Key, list[int]] = {}
        self.memory: dict[Key, list[int]] = {}
        self.reading: list[dict[Key, int]] = [{}]
        now: dict[Key, int] = {}
        for step in rank.steps:
            now = {key: number for key, number in now.items() if key not in step.done}
            now |= step.reads
            self.reading.append(now)
        self._fill(self.epochs, [step.sets for step in rank.steps], rank.start)
        self._fill(self.memory, [step.writes for step in rank.steps], 0)

    def _fill(self, table: dict[Key, list[int]], changes: list[dict[Key, int]], first: int) -> None:
        for key in {key for change in changes for key in change}:
            values = [first]
            for change in changes:
                values.append(change.get(key, values[-1]))
            table[key] = values


def search(ranks: Sequence[Rank], limit: int = 2_000_000) -> Result:
    """Visit every state that the ranks can reach, until a fault is found."""
    tables = [_Table(rank) for rank in ranks]
    waits = [[_conditions(tables, step, rank.start) for step in rank.steps] for rank in ranks]
    shows = _shows(ranks, tables)
    ends = tuple(len(rank.steps) for rank in ranks)
    first = (0,) * len(ranks)
    parents: dict[tuple[int, ...], tuple[int, ...] | None] = {first: None}
    todo = [first]
    others = range(len(ranks))
    while todo:
        state = todo.pop()
        moved = False
        for i in others:
            at = state[i]
            if at == ends[i] or not all(state[o] >= need for o, need in waits[i][at]):
                continue
            moved = True
            new = (*state[:i], at + 1, *state[i + 1 :])
            if new in parents:
                continue
            parents[new] = state
            for reader in others:
                for owner, memory, good in shows[reader][new[reader]]:
                    if new[owner] not in good:
                        fault = f"rank {reader} reads {memory} of rank {owner} too early or late"
                        return Result(len(parents), fault, _trace(ranks, parents, new))
            todo.append(new)
        if not moved and state != ends:
            where = [_name(rank, at) for rank, at in zip(ranks, state, strict=True)]
            fault = f"deadlock: the ranks stand before {where}"
            return Result(len(parents), fault, _trace(ranks, parents, state))
        assert len(parents) < limit, f"more than {limit} states: make the scenario smaller"
    return Result(len(parents))


def _conditions(tables: list[_Table], step: Step, start: int) -> list[tuple[int, int]]:
    """Turn a wait into (rank, position it must have come to): epochs only ever grow."""
    if step.wait is None:
        return []
    key, number = step.wait
    needs = []
    for rank, table in enumerate(tables):
        values = table.epochs.get(key, [start])
        reached = [at for at, value in enumerate(values) if _has_reached(value, number)]
        needs.append((rank, reached[0] if reached else len(table.steps) + 1))
    return [(rank, need) for rank, need in needs if need > 0]


def _has_reached(value: int, target: int) -> bool:
    """Compare as csrc/cpu/epoch.h does: by the sign of the 32-bit difference."""
    return (value - target) & MASK < 1 << 31


def _shows(
    ranks: Sequence[Rank], tables: list[_Table]
) -> list[list[list[tuple[int, Key, frozenset[int]]]]]:
    """For each reader and position: (owner, memory, positions of the owner that are right)."""
    good: dict[tuple[int, Key, int], frozenset[int]] = {}

    def right(owner: int, memory: Key, number: int) -> frozenset[int]:
        known = (owner, memory, number)
        if known not in good:
            tag = ranks[owner].shown.get((memory, number))
            end = len(ranks[owner].steps)
            values = tables[owner].memory.get(memory, [0] * (end + 1))
            good[known] = frozenset(at for at, value in enumerate(values) if value == tag)
        return good[known]

    return [
        [
            [
                (owner, memory, right(owner, memory, number))
                for memory, number in reading.items()
                for owner in range(len(ranks))
            ]
            for reading in table.reading
        ]
        for table in tables
    ]


def _name(rank: Rank, at: int) -> str:
    return rank.steps[at].name if at < len(rank.steps) else "its end"


def _trace(
    ranks: Sequence[Rank],
    parents: dict[tuple[int, ...], tuple[int, ...] | None],
    state: tuple[int, ...],
) -> tuple[str, ...]:
    lines: list[str] = []
    now: tuple[int, ...] | None = state
    while now is not None and (before := parents[now]) is not None:
        (who,) = (i for i, at in enumerate(now) if at != before[i])
        lines.append(f"{who}: {ranks[who].steps[before[who]].name}")
        now = before
    return tuple(reversed(lines))

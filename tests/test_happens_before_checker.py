# SPDX-License-Identifier: Apache-2.0
"""The happens-before checker itself, on logs written by hand."""

from __future__ import annotations

import random

import pytest
from happens_before import HOST, SitedLog, implied_waits, races, waits

from fsdp_kernels import trace
from fsdp_kernels.trace import Access, Entry, Recorded, Waited, record_schedule


def read(stream: str, *buffers: str) -> Access:
    return Access(f"read on {stream}", stream, reads=buffers)


def write(stream: str, *buffers: str) -> Access:
    return Access(f"write on {stream}", stream, writes=buffers)


def test_one_stream_is_ordered() -> None:
    assert not races([write("a", "x"), read("a", "x"), write("a", "x")])


@pytest.mark.parametrize("first", [read, write])
@pytest.mark.parametrize("second", [read, write])
def test_two_streams_race_unless_both_read(first, second) -> None:  # type: ignore[no-untyped-def]
    log = [first("a", "x"), second("b", "x")]
    assert bool(races(log)) == (first is write or second is write)
    assert not races([first("a", "x"), second("b", "y")])


def test_a_race_is_described() -> None:
    log = [Access("fk.pack[a/0]", "compute", ("g",), ("s",)), Access("fk.reduce", "reduce", ("s",))]
    (race,) = races(log)
    assert (race.buffer, race.first, race.second) == ("s", 0, 1)
    assert str(race) == (
        "'s': nothing orders fk.pack[a/0] on compute (entry 0) and fk.reduce on reduce (entry 1)"
    )


def test_a_wait_orders_what_came_before_the_event() -> None:
    assert not races([write("a", "x"), Recorded("a", 1), Waited("b", 1), read("b", "x")])
    late = [Recorded("a", 1), write("a", "x"), Waited("b", 1), read("b", "x")]
    assert len(races(late)) == 1, "the event was recorded before the write"
    early = [write("a", "x"), Recorded("a", 1), read("b", "x"), Waited("b", 1)]
    assert len(races(early)) == 1, "the wait came after the read"
    wrong = [write("a", "x"), Recorded("a", 1), Waited("c", 1), read("b", "x")]
    assert len(races(wrong)) == 1, "another stream waited"


def test_order_is_transitive() -> None:
    chain = [
        write("a", "x"),
        Recorded("a", 1),
        Waited("b", 1),
        Recorded("b", 2),
        Waited("c", 2),
        read("c", "x"),
    ]
    assert not races(chain)
    assert races(chain, without=[2])
    assert races(chain, without=[4])


def test_a_read_must_be_over_before_the_next_write() -> None:
    log = [
        write("a", "x"),
        Recorded("a", 1),
        Waited("b", 1),
        read("b", "x"),
        write("a", "x"),
    ]
    (race,) = races(log)
    assert race.labels == ("read on b", "write on a")
    assert not races([*log[:4], Recorded("b", 2), Waited("a", 2), log[4]])


def test_each_reader_counts() -> None:
    """A write must come after the readers on every stream, not only after the last one."""
    log: list[Entry] = [write("a", "x"), Recorded("a", 1)]
    for stream in ("b", "c"):
        log += [Waited(stream, 1), read(stream, "x")]
    log += [Recorded("c", 2), Waited("a", 2), write("a", "x")]
    (race,) = races(log)
    assert race.streams == ("b", "a")


def test_an_earlier_write_of_the_same_stream_counts() -> None:
    """The last write is ordered by its event; the wait for the first one alone is too little."""
    log = [write("a", "x"), Recorded("a", 1), write("a", "x"), Waited("b", 1), read("b", "x")]
    (race,) = races(log)
    assert race.first == 2


def test_an_access_may_read_and_write() -> None:
    log = [Access("scale", "a", ("x",), ("x",)), read("b", "x")]
    assert [str(race) for race in races(log)] == [
        "'x': nothing orders scale on a (entry 0) and read on b on b (entry 1)"
    ]
    assert len(races([write("a", "x"), Access("scale", "b", ("x",), ("x",))])) == 1


def test_what_a_host_issues_after_it_waited_is_ordered() -> None:
    log = [
        write("a", "x"),
        Recorded("a", 1),
        Waited(HOST, 1),
        read(HOST, "x"),
        write("b", "x"),
    ]
    assert not races(log)
    assert races(log, without=[2])
    assert races([write("a", "x"), Recorded("a", 1), write("b", "x"), Waited(HOST, 1)])


def test_a_host_that_did_not_wait_orders_nothing() -> None:
    assert races([read("a", "x"), write(HOST, "x")])
    assert not races([write(HOST, "x"), read("a", "x"), read("b", "x")]), "issued afterwards"


def test_races_of_a_pair_are_told_once() -> None:
    log = [write("a", "x"), read("b", "x")] * 5
    assert {race.labels for race in races(log)} == {
        ("write on a", "read on b"),
        ("read on b", "write on a"),
    }
    assert len(races(log)) == 2


def test_logs_must_be_whole() -> None:
    with pytest.raises(ValueError, match="event 7: expected one that was recorded before"):
        races([Waited("a", 7)])
    with pytest.raises(ValueError, match="event 7: expected a new number"):
        races([Recorded("a", 7), Recorded("b", 7)])
    with pytest.raises(ValueError, match="event 0"):
        races([Recorded("a", 0)])


def test_a_wait_that_adds_no_order_is_implied() -> None:
    log = [
        write("a", "x"),
        Recorded("a", 1),
        Waited("b", 1),
        Waited("b", 1),  # again
        Recorded("b", 2),
        Waited("c", 2),
        Waited("c", 1),  # through b
        Recorded("a", 3),
        Waited("a", 3),  # its own
        write("a", "y"),
        Recorded("a", 4),
        Waited("b", 4),
    ]
    assert waits(log) == [2, 3, 5, 6, 8, 11]
    assert implied_waits(log) == {3, 6, 8}
    log += [Waited(HOST, 4), Waited("d", 1)]
    assert implied_waits(log) == {3, 6, 8, 13}, "the host waited for all of that stream"


def random_log(rng: random.Random) -> list[Entry]:
    log: list[Entry] = []
    events = 0
    for _ in range(rng.randint(2, 14)):
        kind, stream = rng.randrange(5), rng.choice(["a", "b", "c"])
        if kind == 0:
            events += 1
            log.append(Recorded(stream, events))
        elif kind == 1 and events:
            log.append(Waited(rng.choice([stream, stream, HOST]), rng.randint(1, events)))
        else:
            log.append(rng.choice([read, write])(stream, rng.choice("xy")))
    return log


def reachable(log: list[Entry]) -> set[tuple[int, int]]:
    """Which entries come before which: the edges spelled out, and every path followed."""
    after: dict[int, set[int]] = {place: set() for place in range(len(log))}
    for place, entry in enumerate(log):
        for later in range(place + 1, len(log)):
            other = log[later]
            if other.stream == entry.stream or (isinstance(entry, Waited) and entry.stream == HOST):
                after[place].add(later)
            if (
                isinstance(entry, Recorded)
                and isinstance(other, Waited)
                and entry.event == other.event
            ):
                after[place].add(later)
    found = set()
    for start in after:
        stack = [start]
        while stack:
            for place in after[stack.pop()]:
                if (start, place) not in found:
                    found.add((start, place))
                    stack.append(place)
    return found


def ordered(log: list[Entry], paths: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Which accesses come before which, by their number among the accesses."""
    number = {place: n for n, place in enumerate(accesses(log))}
    return {(number[a], number[b]) for a, b in paths if a in number and b in number}


def accesses(log: list[Entry]) -> list[int]:
    return [place for place, entry in enumerate(log) if isinstance(entry, Access)]


def conflicts(first: Entry, second: Entry) -> bool:
    if not isinstance(first, Access) or not isinstance(second, Access):
        return False
    touched = set(first.reads) | set(first.writes), set(second.reads) | set(second.writes)
    return bool(touched[0] & set(second.writes) or touched[1] & set(first.writes))


def test_clocks_agree_with_a_search_for_paths() -> None:
    rng = random.Random(5)
    seen = {True: 0, False: 0}
    for _ in range(3000):
        log = random_log(rng)
        paths = reachable(log)
        want = {
            (log[a].stream, log[b].stream)
            for a in range(len(log))
            for b in range(a + 1, len(log))
            if conflicts(log[a], log[b]) and (a, b) not in paths
        }
        assert {race.streams for race in races(log)} == want, log
        seen[bool(want)] += 1
        for place in implied_waits(log):
            dropped = [entry for i, entry in enumerate(log) if i != place]
            assert ordered(dropped, reachable(dropped)) == ordered(log, paths), (place, log)
    assert min(seen.values()) > 300, seen


def test_a_sited_log_says_who_waits() -> None:
    with record_schedule() as schedule:
        schedule.log = log = SitedLog()
        trace.recorded("compute", 1)
        trace.waited("gather", 1)
        trace.collectives("compute", [trace.Issued("gather", "gather", 2, 3)])
    assert log.sites == {1: ("?", "?", "ticket"), 4: ("?", "?", "issue")}
    assert log.places(("?", "?", "issue")) == [4]

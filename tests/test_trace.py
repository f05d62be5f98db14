# SPDX-License-Identifier: Apache-2.0
"""Labels, the schedule recorder and profiler ranges."""

from __future__ import annotations

import threading
from collections.abc import Callable
from timeit import timeit

import pytest
import torch
from harness import run_ranks
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fsdp_kernels import ShardedAdamW, fully_shard, trace
from fsdp_kernels.trace import (
    Access,
    Issued,
    Recorded,
    ScheduleEvent,
    Waited,
    emit,
    label,
    record_schedule,
    span,
)


def test_labels() -> None:
    assert label("gather", "layers.3", 0) == "fk.gather[layers.3/0]"
    assert label("wait", "layers.3") == "fk.wait[layers.3]"
    assert label("reduce", "", 1) == "fk.reduce[root/1]"
    assert label("step", "") == "fk.step[root]"


def test_events_have_a_label_and_a_short_form() -> None:
    event = ScheduleEvent("gather", "layers.3", 0)
    assert event.label == "fk.gather[layers.3/0]"
    assert str(event) == "gather layers.3/0"
    assert str(ScheduleEvent("wait", "layers.3")) == "wait layers.3"
    assert str(ScheduleEvent("free", "")) == "free root"
    assert event == ScheduleEvent("gather", "layers.3", 0)
    with pytest.raises(AttributeError):
        event.verb = "free"  # type: ignore[misc]


def test_a_schedule_is_a_list() -> None:
    emit("gather", "before")
    with record_schedule() as schedule:
        emit("gather", "layers.0", 0)
        emit("wait", "layers.0")
    emit("gather", "after")
    assert schedule == [ScheduleEvent("gather", "layers.0", 0), ScheduleEvent("wait", "layers.0")]
    assert schedule.labels() == ["fk.gather[layers.0/0]", "fk.wait[layers.0]"]
    assert schedule.lines() == ["gather layers.0/0", "wait layers.0"]
    assert str(schedule) == "gather layers.0/0\nwait layers.0"


def test_recorders_nest_and_overlap() -> None:
    outer, inner = record_schedule(), record_schedule()
    first = outer.__enter__()
    second = inner.__enter__()
    emit("gather", "a")
    outer.__exit__(None, None, None)  # both hold equal events: only the outer one may close
    emit("free", "a")
    inner.__exit__(None, None, None)
    emit("step", "")
    assert first.lines() == ["gather a"]
    assert second.lines() == ["gather a", "free a"]


def test_a_recorder_closes_on_an_exception() -> None:
    recorder = record_schedule()
    schedule = recorder.__enter__()
    assert not recorder.__exit__(ValueError, ValueError("on purpose"), None), "swallowed it"
    emit("gather", "a")
    assert schedule == []


def test_events_of_other_threads_are_recorded() -> None:
    """On CUDA, backward has a thread of its own."""
    with record_schedule() as schedule:
        thread = threading.Thread(target=emit, args=("reduce", "layers.0", 0))
        thread.start()
        thread.join()
    assert schedule.lines() == ["reduce layers.0/0"]


def test_a_span_is_null_without_a_profiler_and_a_range_with_one() -> None:
    name = label("gather", "layers.3", 0)
    where = "gather", "layers.3", 0
    assert span(*where) is span("free", "other"), "a new object for nobody"
    with span(*where):
        pass
    with profile(activities=[ProfilerActivity.CPU]) as profiler, span(*where):
        torch.ones(2).add(1)
    assert name in {event.key for event in profiler.key_averages()}
    assert span(*where) is span("free", "other")


def test_the_log_has_what_was_queued_on_which_stream() -> None:
    trace.access("fk.pack[a/0]", "compute", ("leaf grads",), ("grads slot 0",))
    assert not trace.recording()
    with record_schedule() as schedule:
        assert trace.recording()
        trace.access("fk.pack[a/0]", "compute", ("leaf grads",), ("grads slot 0",))
        trace.recorded("compute", -1)
        trace.waited("gather", -1)
        emit("gather", "a")
    assert schedule.lines() == ["gather a"]
    assert schedule.log == [
        Access("fk.pack[a/0]", "compute", ("leaf grads",), ("grads slot 0",)),
        Recorded("compute", -1),
        Waited("gather", -1),
    ]


def test_a_collective_has_the_buffers_that_were_announced_for_it() -> None:
    trace.announce("gather", ("forgotten",), ("by then",))  # nobody records
    with record_schedule() as schedule:
        trace.collectives("compute", [Issued("gather", "gather", 1, 2)])
        trace.announce("gather", ("shard",), ("full",))
        trace.collectives("compute", [Issued("gather", "gather", 3, 4)])
        trace.collectives("compute", [Issued("gather", "gather", 5, 6)])
    accesses = [e for e in schedule.log if isinstance(e, Access) and e.stream == "gather"]
    other = Access("gather", "gather", *[("operands of gather",)] * 2)
    assert accesses == [other, Access("gather", "gather", ("shard",), ("full",)), other]


def test_what_is_not_announced_is_made_before_the_collective_and_read_after_the_wait() -> None:
    with record_schedule() as schedule:
        trace.collectives("compute", [Issued("sum", "gather", 1, 2)])
        trace.waited("compute#2", 2)
        trace.waited("compute", 2)
    operands = ("operands of sum",)
    assert schedule.log == [
        Access("sum", "compute", writes=operands),
        Recorded("compute", 1),
        Waited("gather", 1),
        Access("sum", "gather", operands, operands),
        Recorded("gather", 2),
        Waited("compute#2", 2),
        Access("fk.read", "compute#2", operands),
        Waited("compute", 2),
    ]


def test_a_group_of_collectives_shares_its_events() -> None:
    group = [
        Issued("a", "gather", 1, 2),
        Issued("b", "gather", 1, 2),
        Issued("c", "reduce", 1, 3),
    ]
    with record_schedule() as schedule:
        for one in group:
            trace.announce(one.label, ("x",), ("y",))
        trace.collectives("compute#2", group)
    assert schedule.log == [
        Recorded("compute#2", 1),
        Waited("gather", 1),
        Waited("reduce", 1),
        *(Access(one.label, one.stream, ("x",), ("y",)) for one in group),
        Recorded("gather", 2),
        Recorded("reduce", 3),
    ]


def test_compute_streams_are_named_in_the_order_in_which_they_are_seen() -> None:
    with record_schedule(), record_schedule():
        names = [trace.compute_stream(handle) for handle in (70, 0, 70, 12)]
    assert names == ["compute", "compute#2", "compute", "compute#3"]
    with record_schedule():
        assert trace.compute_stream(12) == "compute"


def test_own_events_differ_from_a_communicators() -> None:
    first, second = trace.new_event(), trace.new_event()
    assert second < first < 0


def nothing(verb: str, unit: str, bucket: int | None = None) -> None:
    pass


QUIET: list[Callable[[], object]] = [
    lambda: emit("gather", "a", 0),
    lambda: trace.recording(),
    lambda: trace.announce("fk.gather[a/0]", ("shard",), ("full",)),
]


@pytest.mark.parametrize("call", QUIET)
def test_recording_to_nobody_is_cheap(call: Callable[[], object]) -> None:
    """Compared with a call that does nothing, as a ratio: clocks of shared machines lie."""
    baseline = min(timeit(lambda: nothing("gather", "a", 0), number=2000) for _ in range(7))
    assert min(timeit(call, number=2000) for _ in range(7)) < 3 * baseline


def profiled_step(rank: int, world: int) -> set[str]:
    """Return the ranges that a profile of one training step shows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    fully_shard(model, units=nn.Linear)
    optimizer = ShardedAdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(torch.ones(3, 8)).sum().backward()
        optimizer.step()
    return {event.key for event in profiler.key_averages() if event.key.startswith("fk.")}


@pytest.mark.parametrize("world", [1, 2])
def test_a_profile_of_a_step_shows_the_labels(world: int) -> None:
    expected = {"fk.norm[root]", "fk.agree[used parameters]"}
    for unit in ("0", "1"):
        expected.add(f"fk.wait[{unit}]")
        expected |= {f"fk.{verb}[{unit}/0]" for verb in ("gather", "pack", "reduce", "step")}
    assert all(found == expected for found in run_ranks(profiled_step, world))

# SPDX-License-Identifier: Apache-2.0
"""Labels, the schedule recorder and profiler ranges."""

from __future__ import annotations

import threading
from timeit import timeit

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fsdp_kernels.trace import ScheduleEvent, emit, label, record_schedule, span


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
    assert span(name) is span("other"), "a new object for nobody"
    with span(name):
        pass
    with profile(activities=[ProfilerActivity.CPU]) as profiler, span(name):
        torch.ones(2).add(1)
    assert name in {event.key for event in profiler.key_averages()}
    assert span(name) is span("other")


def test_recording_to_nobody_is_cheap() -> None:
    """Compared with a call that does nothing, as a ratio: clocks of shared machines lie."""

    def nothing(verb: str, unit: str, bucket: int | None = None) -> None:
        pass

    baseline = min(timeit(lambda: nothing("gather", "a", 0), number=2000) for _ in range(7))
    cost = min(timeit(lambda: emit("gather", "a", 0), number=2000) for _ in range(7))
    assert cost < 3 * baseline

# SPDX-License-Identifier: Apache-2.0
"""How the tests of a device read a profile, on events that are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_tools import Interval, intervals, join
from torch.profiler import ProfilerActivity, profile, record_function


def event(
    name: str,
    begin: int,
    end: int,
    number: int,
    *,
    stream: int | None = None,
    linked: int = 0,
    mirrored: bool = False,
) -> Any:
    """Make an event of the host, or of a stream of the device."""
    return SimpleNamespace(
        name=lambda: name,
        device_type=lambda: "DeviceType.CPU" if stream is None else "DeviceType.CUDA",
        device_resource_id=lambda: stream,
        start_ns=lambda: begin,
        duration_ns=lambda: end - begin,
        correlation_id=lambda: number,
        linked_correlation_id=lambda: linked,
        is_user_annotation=lambda: mirrored,
    )


def ours(name: str) -> bool:
    return name.startswith("fk.")


def test_device_events_get_the_label_of_the_range_that_launched_them() -> None:
    events = [
        event("fk.step[root]", 0, 100, 1),
        event("fk.gather[a/0]", 10, 20, 2),
        event("cudaMemcpyAsync", 12, 13, 7),
        event("aten::mm", 30, 40, 7),  # torch counts its operations with numbers of its own
        event("cudaLaunchKernel", 33, 34, 8),
        event("Memcpy DtoD", 200, 220, 7, stream=20),
        event("fk.gather[a/0]", 200, 220, 7, stream=20, mirrored=True),
        event("ProfilerStep#1", 0, 900, 0, stream=7, mirrored=True),
        event("gemm", 150, 210, 8, stream=7),
    ]
    assert join(events, ours) == [
        Interval("gemm", 7, 150, 210, "fk.step[root]"),
        Interval("Memcpy DtoD", 20, 200, 220, "fk.gather[a/0]"),
    ]


def test_a_launch_that_the_profiler_missed_is_found_by_its_operation() -> None:
    events = [
        event("fk.gather[a/0]", 10, 20, 2),
        event("aten::copy_", 12, 13, 3),
        event("kernel", 50, 60, 99, stream=20, linked=3),
        event("kernel", 70, 80, 98, stream=20, linked=44),
    ]
    assert [interval.label for interval in join(events, ours)] == ["fk.gather[a/0]", ""]


@pytest.mark.parametrize(("begin", "meet"), [(0, False), (5, True), (14, True), (20, False)])
def test_intervals_meet(begin: int, meet: bool) -> None:
    one, other = Interval("a", 1, 10, 20), Interval("b", 2, begin, begin + 10)
    assert one.meets(other) is other.meets(one) is meet


def test_a_profile_of_the_host_has_no_intervals() -> None:
    """What is read of an event exists in this torch."""
    with profile(activities=[ProfilerActivity.CPU]) as prof, record_function("fk.gather[a/0]"):
        torch.ones(4).add_(1)
    assert intervals(prof, ours) == []
    assert intervals(prof, lambda name: False) == []

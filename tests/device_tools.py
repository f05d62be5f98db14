# SPDX-License-Identifier: Apache-2.0
"""What tests of a CUDA device share: nothing waits, held-up streams, intervals of a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")
S = TypeVar("S")


def without_waiting(calls: Callable[[], T]) -> T:
    """Call, and fail at the first operation of torch that waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def held_up(
    calls: Callable[[], T], before: Callable[[], object], look: Callable[[], S]
) -> tuple[T, S]:
    """Call on a side stream that is held up, and look from the current stream meanwhile.

    Args:
        calls: What is called on the side stream.
        before: Called on the current stream first.
        look: Called on the current stream while the side stream is held up.

    Returns:
        What `calls` and `look` returned, once everything is done.
    """
    side, cycles = torch.cuda.Stream(), 50_000_000
    while True:
        before()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(cycles)
            begun = side.record_event()
            result = calls()
        seen = look()
        torch.cuda.current_stream().synchronize()
        held = not begun.query()
        torch.cuda.synchronize()
        if held:
            return result, seen
        cycles *= 2  # the host was slower than that: nothing was shown


@dataclass(frozen=True)
class Interval:
    """Something that ran on a stream of the device.

    Attributes:
        name: The kernel's or the copy's name.
        stream: The profiler's number of the stream.
        begin, end: In ns.
        label: The innermost range of the host, of those asked for, that launched it; or "".
    """

    name: str
    stream: int
    begin: int
    end: int
    label: str = ""

    def meets(self, other: Interval) -> bool:
        """Tell whether there was a moment at which both ran."""
        return self.begin < other.end and other.begin < self.end


def intervals(prof: Any, is_label: Callable[[str], bool]) -> list[Interval]:
    """List what ran on the device, in order of time, each with the range that launched it.

    Args:
        prof: A finished `torch.profiler.profile` of CPU and CUDA.
        is_label: Whether a range of the host (a `record_function`) is of interest.
    """
    return join(prof.profiler.kineto_results.events(), is_label)


def join(events: Iterable[Any], is_label: Callable[[str], bool]) -> list[Interval]:
    """Find for each event of the device the range of the host in which it was launched.

    A call of CUDA and what it launches have a number in common; where the profiler missed the call,
    the operation of torch around it is known by another number.
    """
    ranges: list[tuple[int, int, str]] = []
    calls: dict[int, int] = {}
    operations: dict[int, int] = {}
    device: list[Any] = []
    for event in events:
        if "CUDA" in str(event.device_type()):
            if not (event.is_user_annotation() or is_label(event.name())):  # mirrored from the host
                device.append(event)
        elif is_label(event.name()):
            ranges.append((event.start_ns(), event.start_ns() + event.duration_ns(), event.name()))
            operations[event.correlation_id()] = event.start_ns()
        elif event.name().startswith("cu"):  # cudaLaunchKernel, cuLaunchKernelEx, cudaMemcpyAsync
            calls[event.correlation_id()] = event.start_ns()
        else:
            operations[event.correlation_id()] = event.start_ns()
    found = []
    for event in device:
        at = calls.get(event.correlation_id(), operations.get(event.linked_correlation_id()))
        around = [r for r in ranges if at is not None and r[0] <= at < r[1]]
        label = max(around)[2] if around else ""  # the innermost begins last
        begin = event.start_ns()
        end = begin + event.duration_ns()
        found.append(Interval(event.name(), event.device_resource_id(), begin, end, label))
    return sorted(found, key=lambda interval: interval.begin)

# SPDX-License-Identifier: Apache-2.0
"""Which streams gathers and reductions run on, in which order and beside what, from the profiler.

With a device, of a real step; everywhere, of steps that are made up, right ones and wrong ones.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from device_cases import SIMULATED, Where
from device_profile import (
    MARKER,
    Step,
    check_order,
    check_overlap,
    check_streams,
    profiled_step,
)
from device_tools import Interval
from harness import run_ranks

CHECKS = [check_streams, check_order, check_overlap]
COMPUTE, GATHER, REDUCE = 7, 20, 21


@pytest.fixture(scope="module")
def real() -> Step:
    step: Step = run_ranks(profiled_step, 1, Where(), fresh=True, timeout=60)[0]
    for interval in step.intervals:
        print(interval)  # shown where a test fails
    return step


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_a_step_on_a_device(check: object, real: Step) -> None:
    assert callable(check)
    check(real)


def made_up() -> Step:
    """Play a forward and a backward of four layers, prefetched, reduced beside the next layer."""
    found = [Interval("fill", COMPUTE, 0, 1, MARKER), Interval("spin_kernel", COMPUTE, 1, 90)]
    order = []
    for place in range(4):
        begin = 100 * (place + 1)
        label = f"fk.gather[{place}/0]"
        order.append(label)
        found.append(Interval("ncclAllGather", GATHER, begin - 80, begin - 10, label))
        label = f"fk.compute[{place}]"
        found.append(Interval("gemm", COMPUTE, begin, begin + 95, label))
    for place in (3, 2, 1, 0):
        begin = 500 + 100 * (3 - place)
        found.append(Interval("gemm", COMPUTE, begin, begin + 90))
        label = f"fk.reduce[{place}/0]"
        found.append(Interval("pack", COMPUTE, begin + 91, begin + 99, label))
        found.append(Interval("ncclReduceScatter", REDUCE, begin + 99, begin + 150, label))
        order.append(label)
    return Step(sorted(found, key=lambda i: i.begin), order)


def changed(label: str, **fields: object) -> Step:
    """Return the step with the fields of one move or computation changed."""
    step = made_up()
    step.intervals = [
        replace(i, **fields) if i.label == label and i.name != "pack" else i for i in step.intervals
    ]
    step.intervals.sort(key=lambda i: i.begin)
    return step


@pytest.mark.parametrize("check", CHECKS)
def test_the_made_up_step_is_right(check: object) -> None:
    assert callable(check)
    check(made_up())


def test_wrong_streams_are_found() -> None:
    for label, stream, words in (
        ("fk.gather[1/0]", REDUCE, "gather ran on the streams"),
        ("fk.reduce[2/0]", 99, "reduce ran on the streams"),
    ):
        with pytest.raises(AssertionError, match=words):
            check_streams(changed(label, stream=stream))
    shared = made_up()
    shared.intervals = [
        replace(i, stream=GATHER if i.stream == REDUCE else i.stream) for i in shared.intervals
    ]
    with pytest.raises(AssertionError, match="share a stream"):
        check_streams(shared)
    alone = made_up()
    alone.intervals = [replace(i, stream=COMPUTE) for i in alone.intervals]
    with pytest.raises(AssertionError, match="gather ran on the streams"):
        check_streams(alone)


def test_a_wrong_order_is_found() -> None:
    with pytest.raises(AssertionError, match="gather: issued"):
        check_order(changed("fk.gather[3/0]", begin=25, end=28))
    with pytest.raises(AssertionError, match="layer 2 computed before it was gathered"):
        check_order(changed("fk.gather[2/0]", begin=250, end=310))
    with pytest.raises(AssertionError, match="reduce: issued"):
        check_order(changed("fk.reduce[3/0]", begin=990, end=995))
    short = made_up()
    short.order.pop(0)
    with pytest.raises(AssertionError, match="gather: issued"):
        check_order(short)


def test_no_overlap_is_found() -> None:
    for verb, words in (("gather", "no gather ran"), ("reduce", "no reduce ran")):
        apart = made_up()
        apart.intervals = [
            replace(i, begin=i.begin + 9000, end=i.end + 9000)
            if i.label.startswith(f"fk.{verb}[") and i.name != "pack"
            else i
            for i in apart.intervals
        ]
        with pytest.raises(AssertionError, match=words):
            check_overlap(apart)


def test_the_profiled_step_runs_without_a_device() -> None:
    """On a simulated one there is nothing to see of the device; the host's order is there."""
    import nccl_sim

    nccl_sim.load()
    (step,) = run_ranks(profiled_step, 1, SIMULATED)
    assert step.intervals == []
    gathers = [label for label in step.order if label.startswith("fk.gather[")]
    assert gathers[:4] == [f"fk.gather[{place}/0]" for place in range(4)]
    assert step.order.count("fk.reduce[0/0]") == 1

# SPDX-License-Identifier: Apache-2.0
"""Traces of a recorded step: well-formed files, rows without overlaps, counters back at rest."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import Block, Net, Turn, build, mse, sharded_adamw
from torch.profiler import ProfilerActivity, profile

from fsdp_kernels import MixedPrecisionPolicy, fully_shard, record_schedule
from fsdp_kernels.timeline import Kind, Moment, drawn
from fsdp_kernels.trace_file import Sample, Slice, TraceFile, count, one_after_another, verb_of

COUNTERS = ("full_params", "full_grads", "leaf_grads", "shard_grads")


class Traced:
    """A trace file, read back.

    Attributes:
        slices: Of each row, (label, start, stop) in order, in microseconds.
        counters: Of each counter, (time, bytes) in order.
    """

    def __init__(self, path: Path) -> None:
        content = json.loads(path.read_text())
        assert content.keys() == {"traceEvents", "displayTimeUnit"}
        rows: dict[int, str] = {}
        self.process = ""
        self.slices: dict[str, list[tuple[str, float, float]]] = {}
        self.counters: dict[str, list[tuple[float, int]]] = {}
        for event in content["traceEvents"]:
            self._take(event, rows)

    def _take(self, event: dict[str, Any], rows: dict[int, str]) -> None:
        if event["ph"] == "M":
            if event["name"] == "process_name":
                self.process = event["args"]["name"]
            elif event["name"] == "thread_name":
                rows[event["tid"]] = event["args"]["name"]
                self.slices[event["args"]["name"]] = []
        elif event["ph"] == "X":
            stop = event["ts"] + event["dur"]
            assert event["cat"] == verb_of(event["name"])
            self.slices[rows[event["tid"]]].append((event["name"], event["ts"], stop))
        else:
            assert event["ph"] == "C"
            found = self.counters.setdefault(event["name"], [])
            found.append((event["ts"], event["args"]["bytes"]))

    def labels(self, row: str) -> list[str]:
        return [label for label, _, _ in self.slices[row]]

    def check(self) -> None:
        for row, slices in self.slices.items():
            assert slices, f"row '{row}' is empty"
            free = 0.0
            for label, start, stop in slices:
                assert start >= free - 1e-3, f"{label} overlaps its predecessor on row '{row}'"
                assert stop >= start
                free = stop
        for name, samples in self.counters.items():
            assert samples == sorted(samples, key=lambda sample: sample[0])
            assert min(value for _, value in samples) >= 0, name


def step(rank: int, world: int, folder: Path, options: dict[str, Any]) -> Any:
    """Trace the fourth step; return the profiler's labels and the largest full bytes allowed."""
    model = build(partial(Net, depth=3))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, units=Block, mp_policy=policy, **options)
    optimizer = sharded_adamw(model.parameters(), max_grad_norm=1.0)
    for number in range(4):
        with record_schedule() as schedule, profile(activities=[ProfilerActivity.CPU]) as profiler:
            mse(model, Turn(rank, world, number, torch.float32))
            optimizer.step()
            optimizer.zero_grad()
    schedule.save_trace(folder / f"{rank}.json", rank)
    profiled = {event.key for event in profiler.key_averages() if event.key.startswith("fk.")}
    root, block, *_ = [sum(b.layout.full_numel for b in unit.buckets) for unit in model.units]
    shards = sum(b.layout.shard_numel for unit in model.units for b in unit.buckets)
    # The root stays, and two blocks with prefetch; all of them where they take no memory.
    blocks = 2 if options["comm"] == "process_group" else 3
    peaks = {
        "full_params": 2 * (root + blocks * block),
        "full_grads": 2 * max(root, block),
        "shard_grads": 4 * shards,
    }
    return profiled, peaks


@pytest.mark.parametrize(
    "options",
    [
        {"comm": "process_group"},
        {"comm": "shared_memory"},
        {"comm": "process_group", "strategy": "zero2"},
    ],
    ids=["process_group", "shared_memory", "zero2"],
)
def test_a_step_of_two_ranks(options: dict[str, Any], tmp_path: Path) -> None:
    units = ["root", "blocks.0", "blocks.1", "blocks.2"]
    for rank, (profiled, peaks) in enumerate(run_ranks(step, 2, tmp_path, options)):
        traced = Traced(tmp_path / f"{rank}.json")
        traced.check()
        assert traced.process == f"fsdp_kernels rank {rank}"
        reduced = traced.labels("reduce")
        assert sorted(reduced) == sorted(f"fk.reduce[{unit}/0]" for unit in units)
        gathered = [label for label in traced.labels("gather") if verb_of(label) == "gather"]
        if "strategy" not in options:  # the root and the last block stay full for backward
            again = ["blocks.1", "blocks.0"] if options["comm"] == "process_group" else []
            assert gathered == [f"fk.gather[{unit}/0]" for unit in [*units, *again]]
        own = set(traced.labels("compute"))
        assert {f"fk.{verb}[{u}]" for u in units for verb in ("forward", "backward")} <= own
        assert {f"fk.{verb}[{u}/0]" for u in units for verb in ("pack", "reduce", "step")} <= own
        waits = [one for one in traced.slices["compute"] if verb_of(one[0]) == "wait"]
        for label, _, done in traced.slices["reduce"] + traced.slices["gather"]:
            if verb_of(label) in ("gather", "reduce"):
                assert any(start <= done <= stop for _, start, stop in waits), label
        assert profiled <= own, "the profiler shows other labels"
        assert {label for label in own if verb_of(label) == "gather"} <= profiled
        for counter in COUNTERS:
            values = [value for _, value in traced.counters[counter]]
            if "strategy" not in options or counter != "full_params":  # kept, not freed
                assert values[-1] == 0, counter
                assert max(values) == peaks.get(counter, max(values)) > 0, counter


def moments(*parts: tuple[Kind, str, int, int]) -> list[Moment]:
    return [Moment(kind, label, nbytes, time, 1) for kind, label, nbytes, time in parts]


def test_a_row_shows_the_innermost_range() -> None:
    found = drawn(
        moments(
            ("end", "fk.forward[before]", 0, 3),  # its beginning was not recorded
            ("begin", "fk.forward[root]", 0, 5),
            ("begin", "fk.forward[a]", 0, 8),
            ("begin", "fk.forward[a]", 0, 9),  # of a submodule
            ("end", "fk.forward[a]", 0, 11),
            ("end", "fk.forward[a]", 0, 12),
            ("end", "fk.forward[root]", 0, 20),
            ("turn", "fk.backward[a]", 0, 30),
            ("begin", "fk.pack[a/0]", 0, 32),
            ("end", "fk.pack[a/0]", 0, 35),
            ("turn", "fk.backward[root]", 0, 40),
            ("turn", "", 0, 50),
            ("begin", "fk.step[a/0]", 0, 60),
            ("end", "fk.step[a/0]", 0, 61),
        ),
        "",
    )
    assert [(one.label, one.start_ns, one.stop_ns) for one in found.slices] == [
        ("fk.forward[root]", 5, 8),
        ("fk.forward[a]", 8, 12),
        ("fk.forward[root]", 12, 20),
        ("fk.backward[a]", 30, 32),
        ("fk.pack[a/0]", 32, 35),
        ("fk.backward[a]", 35, 40),
        ("fk.backward[root]", 40, 50),
        ("fk.step[a/0]", 60, 61),
    ]


def test_every_thread_has_a_row() -> None:
    other = Moment("begin", "fk.wait[a]", 0, 2, 2), Moment("end", "fk.wait[a]", 0, 4, 2)
    mine = moments(("begin", "fk.wait[b]", 0, 1), ("end", "fk.wait[b]", 0, 3))
    found = drawn([*other, *mine], "")
    assert found.rows == ["compute", "compute#2", "gather", "reduce"]
    assert found.slices == [
        Slice("compute", "fk.wait[b]", 1, 3),
        Slice("compute#2", "fk.wait[a]", 2, 4),
    ]


def test_collectives_run_one_after_another() -> None:
    found = drawn(
        moments(
            ("done", "fk.gather[before/0]", 0, 0),
            ("issue", "fk.gather[a/0]", 0, 1),
            ("issue", "fk.reduce[a/0]", 0, 2),
            ("issue", "fk.gather[b/0]", 0, 3),
            ("issue", "fk.gather[c/0]", 0, 4),
            ("done", "fk.gather[b/0]", 0, 6),  # so a is done too
            ("done", "fk.gather[a/0]", 0, 8),
            ("done", "fk.reduce[a/0]", 0, 9),
            ("turn", "", 0, 12),  # nobody has waited for c
        ),
        "",
    )
    assert found.slices == [
        Slice("gather", "fk.gather[a/0]", 1, 6),
        Slice("gather", "fk.gather[b/0]", 6, 6),
        Slice("gather", "fk.gather[c/0]", 6, 12),
        Slice("reduce", "fk.reduce[a/0]", 2, 9),
    ]
    assert one_after_another("x", []) == []


def test_what_was_held_before_counts_from_the_start() -> None:
    found = drawn(
        moments(
            ("turn", "", 0, 10),
            ("hold", "full_params[a/0]", 8, 11),
            ("drop", "shard_grads[a/0]", 5, 12),
            ("hold", "full_params[a/0]", 8, 13),  # kept: it says so again
            ("hold", "full_params[b/0]", 4, 14),
            ("drop", "full_params[a/0]", 8, 15),
            ("hold", "full_params[c/0]", 8, 16),
        ),
        "",
    )
    assert [(s.counter, s.time_ns, s.value) for s in found.samples] == [
        ("shard_grads", 10, 5),
        ("full_params", 10, 0),
        ("full_params", 11, 8),
        ("shard_grads", 12, 0),
        ("full_params", 14, 12),
        ("full_params", 15, 4),
        ("full_params", 16, 12),
    ]
    assert found.slices == [
        Slice("full_params 0", "full_params[a/0]", 11, 15),
        Slice("full_params 0", "full_params[c/0]", 16, 16),
        Slice("full_params 1", "full_params[b/0]", 14, 16),
    ]


def test_changes_at_one_time_are_one_sample() -> None:
    changes = [("a", 3, 5), ("a", 1, 2), ("a", 3, -6), ("b", 3, 1)]
    assert count(changes) == [
        Sample("a", 1, 2),
        Sample("b", 1, 0),
        Sample("a", 3, 1),
        Sample("b", 3, 1),
    ]


@pytest.mark.parametrize(
    ("slices", "samples", "message"),
    [
        ([Slice("r", "a", 5, 4)], [], "slices that end after they begin"),
        ([Slice("r", "a", 0, 4), Slice("r", "b", 3, 5)], [], "row 'r' one after the other"),
        ([], [Sample("bytes", 0, -1)], "counters from 0"),
    ],
)
def test_what_viewers_draw_wrongly_is_refused(
    slices: list[Slice], samples: list[Sample], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        TraceFile("wrong", [], slices, samples).save(tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()

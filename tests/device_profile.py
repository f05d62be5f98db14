# SPDX-License-Identifier: Apache-2.0
"""A training step under the profiler: on which streams gathers and reductions ran, and beside what.

`profiled_step` runs as a rank and returns what happened; `check_*` say what must hold of it, by
intervals and their order, never by how long anything took.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from device_cases import Where
from device_tools import Interval, intervals
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from fsdp_kernels import NcclComm, ShardedAdamW, fully_shard, record_schedule
from fsdp_kernels.comm import Ticket

MARKER = "fk.marker[compute]"


class LabelledComm(NcclComm):
    """Puts every collective's label around the calls that launch it."""

    def _issue(self, operation: str, label: str, *what: Any) -> Ticket:
        with record_function(label):
            return super()._issue(operation, label, *what)


class Layer(nn.Linear):
    """Puts a label around the forward; backward's launches have none."""

    def forward(self, x: Tensor) -> Tensor:
        with record_function(f"fk.compute[{self.place}]"):
            return super().forward(x)

    place = 0


@dataclass
class Step:
    """What one training step was.

    Attributes:
        intervals: What ran on the device, in order of time.
        order: The schedule's labels, in the order in which the host issued.
    """

    intervals: list[Interval] = field(default_factory=list)
    order: list[str] = field(default_factory=list)

    @property
    def compute(self) -> int:
        """The compute stream."""
        streams = {i.stream for i in self.intervals if i.label == MARKER}
        seen = len(self.intervals)
        assert len(streams) == 1, f"the marker ran on streams {streams}; {seen} intervals in all"
        return streams.pop()

    def moves(self, verb: str) -> list[Interval]:
        """List what the collectives of a verb did, apart from what prepares them."""
        here = self.compute
        return [i for i in self.intervals if i.label.startswith(f"fk.{verb}[") and i.stream != here]

    def computations(self) -> list[Interval]:
        """List what the model computed: what no other label of ours launched."""
        mine = [i for i in self.intervals if i.stream == self.compute and "spin" not in i.name]
        return [i for i in mine if not i.label or i.label.startswith("fk.compute[")]


def profiled_step(rank: int, world: int, where: Where) -> Step:
    """Train, and profile one settled step in which the host is ahead of the device."""
    on_cuda = where.device == "cuda"
    dim, batch = (4096, 4096) if on_cuda else (64, 8)
    comm = where.comm(rank, world, LabelledComm)
    model = nn.Sequential(*(Layer(dim, dim, bias=False) for _ in range(4))).to(where.device)
    for place, layer in enumerate(model):
        layer.place = place
    fully_shard(model, units=Layer, comm=comm)
    optimizer = ShardedAdamW(model.parameters(), lr=1e-4)
    x = torch.randn(batch, dim, device=where.device)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    if on_cuda:
        torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as prof:
        with record_function(MARKER):
            torch.ones(1024, device=where.device)
        if on_cuda:
            torch.cuda._sleep(100_000_000)  # everything is queued before the first layer computes
        with record_schedule() as schedule:
            step()
        if on_cuda:
            torch.cuda.synchronize()
    comm.close()
    return Step(intervals(prof, lambda name: name.startswith("fk.")), schedule.labels())


def check_streams(step: Step) -> None:
    """Gathers have one stream, reductions another, and the model a third."""
    used = {verb: {i.stream for i in step.moves(verb)} for verb in ("gather", "reduce")}
    for verb, streams in used.items():
        assert len(streams) == 1, f"{verb} ran on the streams {sorted(streams)}"
    assert used["gather"] != used["reduce"], "gathers and reductions share a stream"


def check_order(step: Step) -> None:
    """The device moved in the order in which the host issued, each before what needs it."""
    for verb in ("gather", "reduce"):
        issued = [label for label in step.order if label.startswith(f"fk.{verb}[")]
        issued = _without_repeats(issued)
        moved = _without_repeats([i.label for i in step.moves(verb)])
        assert moved == issued, f"{verb}: issued {issued}, moved {moved}"
    moves = step.moves("gather")
    for place in range(4):
        gathers = [i for i in moves if i.label == f"fk.gather[{place}/0]"]
        computed = [i for i in step.intervals if i.label == f"fk.compute[{place}]"]
        assert gathers, f"layer {place} was never gathered"
        assert computed, f"layer {place} never computed"
        first, use = gathers[0], computed[0]
        assert first.end <= use.begin, f"layer {place} computed before it was gathered"


def check_overlap(step: Step) -> None:
    """Some gather and some reduction ran while the model computed."""
    computations = step.computations()
    assert computations
    for verb in ("gather", "reduce"):
        beside = [m.label for m in step.moves(verb) if any(m.meets(c) for c in computations)]
        assert beside, f"no {verb} ran beside a computation: {_times(step, verb)}"


def _without_repeats(labels: list[str]) -> list[str]:
    """Merge neighbours: one collective may be several operations of the device."""
    return [label for i, label in enumerate(labels) if i == 0 or labels[i - 1] != label]


def _times(step: Step, verb: str) -> str:
    begin = step.intervals[0].begin
    rows = [*step.moves(verb), *step.computations()]
    rows.sort(key=lambda i: i.begin)
    return "; ".join(f"{i.label or i.name[:20]} {i.begin - begin}-{i.end - begin} ns" for i in rows)

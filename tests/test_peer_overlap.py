# SPDX-License-Identifier: Apache-2.0
"""Steps in backward over `PeerMemory`: the fused kernel reads the ranks' slots, in an order that
the log of recorded schedules shows.

A stand-in for symmetric memory, in processes; what a device would do beside it is not here.
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import peer_side
import pytest
import test_overlap
import test_overlap_failure
import torch
from happens_before import SitedLog, races
from harness import run_ranks
from models import Block, Net
from stream_scenarios import accumulate, overlapped, plain
from stream_stage import Scenario, Stage
from streamed_comm import Cuda
from test_overlap import CASES, Case, compare, watched
from test_overlap_refusals import failures
from torch import Tensor, nn

from fsdp_kernels import ops
from fsdp_kernels.comm import _peer_grads, _peer_log, pick
from fsdp_kernels.trace import Waited, record_schedule
from triton_ops._common import interpreted


class Wide(nn.Linear):
    """Stays in float64 when the model is moved to another dtype."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return super()._apply(lambda tensor: fn(tensor).double(), recurse)  # type: ignore[no-untyped-call]


class TwoDtypes(Block):
    """Two buckets, which are reduced as a group and both stepped by the fused kernel."""

    def __init__(self, dim: int = 7) -> None:
        super().__init__(dim)
        self.wide = Wide(dim, dim, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.wide(x.double()).float()


CASES_HERE: dict[str, Case] = {
    name: CASES[name]
    for name in (
        "reuse",
        "unused",
        "unused on some ranks",
        "bf16 changes",
        "bf16 compute",
    )
}
CASES_HERE["two dtypes"] = Case(partial(Net, block=TwoDtypes), steps=3)


def same_bits(rank: int, world: int, names: list[str], triton: bool = False) -> dict[str, int]:
    """Compare with the step at the end, on one communicator; count what was stepped by fusion.

    Args:
        rank, world: See `run_ranks`.
        names: Of `CASES_HERE`.
        triton: The fused kernel is that of a device, interpreted.
    """
    comm: Any = peer_side.make()
    test_overlap.CASES = CASES_HERE
    fused, reduce_adam = 0, ops.reduce_adam
    if triton:
        from triton_ops.reduce_adam import reduce_adam

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal fused
        fused += 1
        reduce_adam(*args, **kwargs)

    ops.reduce_adam = counted
    found = {}
    for name in names:
        fused = 0
        compare(rank, world, comm, [name])
        found[name] = fused
    return found


def test_the_bits_of_the_step_at_the_end() -> None:
    """Over the model's whole life; two models at a time take turns at the slots."""
    names = [name for name in CASES_HERE if name != "bf16 compute"]
    for counts in run_ranks(same_bits, 2, names):
        assert counts.pop("bf16 changes") == 0, "a sum in bf16 has fewer bits"
        assert counts.pop("unused") == 0, "a unit that is never complete waits for the agreement"
        assert counts["two dtypes"] == 3 * (4 + 3), "of steps and buckets"
        assert all(count > 0 for count in counts.values()), counts
    of_three = run_ranks(same_bits, 3, ["unused on some ranks", "two dtypes"])
    assert all(counts["unused on some ranks"] > 0 for counts in of_three)
    # The last rank has nothing but padding of the second bucket, but is waited for.
    assert [counts["two dtypes"] for counts in of_three] == [21, 21, 12]


@pytest.mark.skipif(not interpreted(), reason="this process compiles Triton kernels")
def test_the_bits_of_a_devices_kernel() -> None:
    """What the runtime hands to it, the Triton kernel takes: here it runs in the interpreter."""
    pytest.importorskip("triton", reason="triton is not installed")
    for counts in run_ranks(same_bits, 2, ["bf16 compute"], True):
        assert counts == {"bf16 compute": 3 * 4}, "steps and units"


def watched_here(rank: int, world: int) -> Any:
    comm: Any = peer_side.make()
    return watched(rank, world, comm)


def test_units_are_stepped_while_backward_runs() -> None:
    """Beside the plain model. Each unit by one kernel, but for a graph that is retained."""
    for early, fused in run_ranks(watched_here, 2):
        assert early[2] == ["blocks.4", "blocks.3", "blocks.2"], early
        assert fused == 18


def fails(rank: int, world: int, folder: Path) -> None:
    pick.CudaSide = peer_side.MappedSide  # type: ignore[assignment,misc]
    pick.choose = lambda kind, world=2: pick.Choice("process_group", "for a test")  # type: ignore[assignment]
    failures(rank, world, "peer", folder)


def test_a_failed_backward_is_not_gone_on_from(tmp_path: Path) -> None:
    """Loaded or accepted, training goes on: what was posted is taken back on every rank."""
    run_ranks(fails, 2, tmp_path)


def fails_apart(rank: int, world: int) -> None:
    comm: Any = peer_side.make()
    test_overlap_failure.fail(rank, world, comm, 0, test_overlap_failure.OF_THREE)


def test_ranks_that_fail_at_different_places_go_on_together() -> None:
    """Beside the plain model. What one has posted and another has not is matched with zeros."""
    run_ranks(fails_apart, 3)


# -- what orders it --------------------------------------------------------------------------------

_HERE = {Path(module.__file__ or "").name for module in (_peer_grads, _peer_log)}


class PeerSites(SitedLog):
    """Notes for each wait of the peers' reductions which functions queued it, innermost first."""

    def __init__(self) -> None:
        super().__init__()
        self.places_of: dict[str, list[int]] = defaultdict(list)

    def append(self, entry: Any, /) -> None:
        if isinstance(entry, Waited):
            frames, frame = [], sys._getframe(1)
            while frame is not None:
                if Path(frame.f_code.co_filename).name in _HERE:
                    frames.append(frame.f_code.co_name)
                frame = frame.f_back  # type: ignore[assignment]
            if frames:
                self.places_of[f"{' < '.join(frames[:2])}, {entry.stream}"].append(len(self))
        super().append(entry)


def two_buckets(stage: Stage) -> None:
    stage.shard(partial(Net, block=TwoDtypes), overlap=True)
    stage.train(3)


SCENARIOS: dict[str, Scenario] = {
    "steps in backward": partial(overlapped, prefetch=1),
    "steps of two buckets": two_buckets,
    "steps at the end": partial(plain, prefetch=1),
    "accumulate": accumulate,
}
NEEDED = {
    "begin, compute": "a rank packs into a slot that others read",
    "_order < post, reduce": "others read what is not packed",
    "_meet < post, peers": "the same",
    "_meet < post, reduce": "this rank reads what others have not packed",
    "lend < lend, compute": "the same, in the fused kernel",
    "finish, compute": "the sum is read before it is there",
    "_order < read, reduce": "others pack into what the fused kernel reads",
    "_meet < give_back, peers": "others pack into what this rank reads",
    "_meet < give_back, reduce": "a rank packs into a slot that others read",
}
"""The waits of the reductions, and what happens without."""


def played(rank: int, world: int) -> tuple[list[str], dict[str, set[str]]]:
    """Return the races of all scenarios, and for each wait those in which its lack is one."""
    found: list[str] = []
    missed = defaultdict(set)
    for name, scenario in SCENARIOS.items():
        cuda = Cuda()
        with record_schedule() as schedule:
            schedule.log = log = PeerSites()
            stage = Stage(rank, world, peer_side.make(), cuda)
            with warnings.catch_warnings(), stage.exits:
                warnings.simplefilter("ignore")
                scenario(stage)
        found += [f"{name}: {race}" for race in races(log)]
        for site, places in log.places_of.items() if rank == 0 else ():
            missed[site].update([name] if races(log, places) else [])
    return found, dict(missed)


def test_every_wait_is_needed_and_enough() -> None:
    """The other ranks are one stream of the log. With all waits nothing races; without any one of
    them something does."""
    (found, missed), (others, _) = run_ranks(played, 2)
    assert found == others == []
    assert missed.keys() == NEEDED.keys()
    assert all(missed.values()), missed
    for site in ("lend < lend, compute", "_order < read, reduce"):
        assert missed[site] == {"steps in backward", "steps of two buckets"}, site

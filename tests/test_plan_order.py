# SPDX-License-Identifier: Apache-2.0
"""The simulator's order of gather, wait, free, reduce and step is the runtime's, recorded."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import Block, Net, Turn, build, mse, sharded_adamw
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdp_kernels import fully_shard, record_schedule
from fsdp_kernels.plan.program import Host, Op, Piece, Policy
from fsdp_kernels.plan.timing import Mesh
from fsdp_kernels.trace_file import verb_of

DEPTH = 4
PIECES = [Piece(0, reads=False), *(Piece(1 + i) for i in range(DEPTH)), Piece(0)]
NAMES = ["root", *(f"blocks.{i}" for i in range(DEPTH))]


class Checkpointed(nn.Module):
    """A block whose activations are computed again in backward."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = Block(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def recorded(rank: int, world: int, options: dict[str, Any]) -> list[list[str]]:
    """What the runtime does in each of four steps, the first of which learn."""
    options = dict(options)
    overlap = options.pop("overlap_backward", False)
    block = Checkpointed if options.pop("checkpointed", False) else Block
    micro_batches = options.pop("micro_batches", 1)
    no_sync = options.pop("no_sync", False)
    if options.pop("hybrid", False):
        options["mesh"] = init_device_mesh("cpu", (2, world // 2))
    model = build(partial(Net, depth=DEPTH, block=block))
    fully_shard(model, units=block, comm="process_group", **options)
    tail_of = {"overlap_backward": True} if overlap else {"max_grad_norm": 1.0}
    optimizer = sharded_adamw(model.parameters(), **tail_of)
    steps = []
    for step in range(4):
        with record_schedule() as schedule:
            for micro in range(micro_batches):
                model.set_requires_gradient_sync(not no_sync or micro == micro_batches - 1)
                mse(model, Turn(rank, world, 10 * micro + step, torch.float32))
            optimizer.step()
            optimizer.zero_grad()
        # The step is no event; its ranges are in the order of the moments.
        ranges = STEPPING if overlap else ("norm", "step")
        tail = [
            moment.label.removeprefix("fk.").replace("[", " ").rstrip("]")
            for moment in schedule.moments
            if moment.kind == "begin" and verb_of(moment.label) in ranges
        ]
        steps.append([*schedule.lines(), *tail])
    return steps


def line(op: Op) -> str:
    whole = op.verb in ("wait", "norm")
    return f"{op.verb} {NAMES[op.unit]}" + ("" if whole else "/0")


SHOWN = ("gather", "wait", "free", "reduce", "norm", "step")
STEPPING = ("gather", "reduce", "step")  # ranges, which show where steps in backward come


def simulated(mesh: Mesh, options: dict[str, Any]) -> list[list[str]]:
    overlap = options.get("overlap_backward", False)
    host = Host(PIECES, replace(mesh.policy(), overlaps=overlap, clips=not overlap))
    steps = []
    for _ in range(4):
        ops = host.step(options.get("micro_batches", 1))
        shown = [line(op) for op in ops if op.verb in SHOWN and not (overlap and op.verb == "step")]
        steps.append(shown + [line(op) for op in ops if overlap and op.verb in STEPPING])
    return steps


OVERLAP = {"overlap_backward": True}
CASES: list[tuple[dict[str, Any], Mesh]] = [
    *(({"prefetch": n}, Mesh(2, 2, prefetch=n)) for n in (0, 1, 2)),
    ({"strategy": "zero2"}, Mesh(2, 2, "zero2")),
    ({"strategy": "zero2", "prefetch": 0, "micro_batches": 2}, Mesh(2, 2, "zero2", prefetch=0)),
    ({"strategy": "zero1", "micro_batches": 2}, Mesh(2, 2, "zero1")),
    ({"strategy": "replicate", "prefetch": 2}, Mesh(2, 1, "replicate", prefetch=2)),
    ({"checkpointed": True}, Mesh(2, 2)),
    *(({"prefetch": n, **OVERLAP}, Mesh(2, 2, prefetch=n)) for n in (0, 1, 2)),
    ({"strategy": "zero2", **OVERLAP}, Mesh(2, 2, "zero2")),
    ({"strategy": "replicate", **OVERLAP}, Mesh(2, 1, "replicate")),
    ({"hybrid": True, **OVERLAP}, Mesh(4, 2)),
    ({"hybrid": True}, Mesh(4, 2)),
    ({"micro_batches": 2}, Mesh(2, 2)),
    ({"micro_batches": 3, "no_sync": True}, Mesh(2, 2, no_sync=True)),
]


def recorded_cases(rank: int, world: int) -> list[list[list[str]]]:
    return [recorded(rank, world, options) for options, mesh in CASES if mesh.world == world]


@pytest.mark.parametrize("world", [2, 4])
def test_the_simulated_order_is_the_recorded_one(world: int) -> None:
    cases = [case for case in CASES if case[1].world == world]
    for rank, found in enumerate(run_ranks(recorded_cases, world)):
        for (options, mesh), steps in zip(cases, found, strict=True):
            wanted = simulated(mesh, options)
            for step, (got, want) in enumerate(zip(steps, wanted, strict=True)):
                assert got == want, f"{options}: step {step} of rank {rank}"


def test_a_single_unit() -> None:
    ops = Host([Piece(0)], Policy()).step()
    assert [op.verb for op in ops] == [
        *("gather", "wait", "forward", "backward", "pack", "reduce", "finish", "free"),
        *("norm", "step"),
    ]

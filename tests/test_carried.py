# SPDX-License-Identifier: Apache-2.0
"""Over shared memory a free frees nothing: units stay full from their forward to their backward."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from harness import run_ranks
from models import Block, Net, Scenario, Sided, Turn, build, check_all, lopsided, mse, schedules
from pairs import Pair
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_kernels import _ext, fully_shard
from fsdp_kernels.flat_shard import FlatShard
from fsdp_kernels.reductions import Reductions

pytestmark = pytest.mark.skipif(_ext.cpu() is None, reason="the C++ kernels are not built")

shared = partial(fully_shard, units=Block, comm="shared_memory")

STEP = [  # each unit is gathered once, and freed when backward has left it
    "gather root/0",
    "wait root",
    "gather blocks.0/0",
    "wait blocks.0",
    "gather blocks.1/0",
    "wait blocks.1",
    "reduce blocks.1/0",  # its last gradient has come
    "free blocks.1/0",
    "reduce blocks.0/0",
    "reduce root/0",
    "free root/0",
    "free blocks.0/0",
]


def test_schedule_of_a_step() -> None:
    first, second = run_ranks(schedules, 2, {"comm": "shared_memory"})
    assert first == second
    assert first[2:] == [STEP, STEP]  # two steps teach when gradients come


def crossed(model: nn.Module, turn: Turn) -> Tensor:
    """Two forwards, then their backwards: the first one frees what the second one needs."""
    losses = [model(turn.rand(4, 3, salt=i)).square().mean() for i in range(2)]
    return turn.backward(losses[0]) + turn.backward(losses[1])


def reused(model: nn.Module, turn: Turn) -> Tensor:
    """Units that run twice in one forward are full already the second time."""
    x = model.inp(turn.rand(4, 3))
    for index in (0, 1, 0, 2, 1):
        x = model.blocks[index](x)
    return turn.backward(model.head(x).square().mean())


def recomputed(model: nn.Module, turn: Turn) -> Tensor:
    x = model.inp(turn.rand(4, 3))
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return turn.backward(model.head(x).square().mean())


def interrupted(model: nn.Module, turn: Turn) -> Tensor:
    """A forward whose backward never comes, and one in between that has no gradients."""
    model(turn.rand(4, 3, salt=2))
    loss = model(turn.rand(4, 3)).square().mean()
    if turn.sharded:
        model.reshard()  # the root alone; its backward gathers it again, the blocks stay
    return turn.backward(loss)


SCENARIOS = [
    *(Scenario(shard=shared, play=play) for play in (crossed, reused, recomputed, interrupted)),
    Scenario(
        partial(Net, block=Sided),
        lopsided,
        shard=partial(fully_shard, units=Sided, comm="shared_memory"),
        steps=4,
    ),
]


@pytest.mark.parametrize("world", [2, 3])
def test_the_numbers_are_those_of_the_unsharded_model(world: int) -> None:
    run_ranks(check_all, world, *SCENARIOS)


class Shift(nn.Module):
    """Saves no weight for its backward, so autograd's own check cannot see an edit."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def edited_between(rank: int, world: int, kind: type[nn.Module], message: str) -> None:
    """Refused, by all ranks as here or by one; the next step is right."""
    pair = Pair(
        rank,
        world,
        partial(Net, depth=2, block=kind),
        partial(fully_shard, units=kind, comm="shared_memory"),
    )
    loss = pair.sharded(Turn(rank, world, 0).rand(4, 3)).square().mean()
    for model in pair.both:
        with torch.no_grad():
            for p in model.blocks[0].parameters():
                p.add_(0.5)
    with pytest.raises(RuntimeError, match=message):
        loss.backward()
    del loss
    for step in range(2):
        pair.zero_grad()
        pair.play(step)
        pair.check_grads(f"step {step}")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Shift, r"unit 'blocks\.0': expected its parameters unchanged .*shared memory they stay"),
        (Block, r"unchanged between forward and backward.*in-place change"),
    ],
)
def test_an_edit_between_forward_and_backward_is_refused(
    kind: type[nn.Module], message: str
) -> None:
    run_ranks(edited_between, 2, kind, message)


class Scale(nn.Module):
    """One element, which one rank has."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def looked_at(rank: int, world: int) -> None:
    """After a look at what a graph saved, units are as they were: hidden, and freed in time."""
    shard = partial(fully_shard, units=Scale, comm="shared_memory")
    pair = Pair(rank, world, partial(Net, depth=2, block=Scale), shard)
    for step in range(3):
        pair.zero_grad()
        loss = pair.sharded(Turn(rank, world, step).rand(4, 3)).sum()
        nodes = [loss.grad_fn]
        for node in nodes:
            nodes += [each for each, _ in node.next_functions if each not in (None, *nodes)]
        found = [node._saved_other for node in nodes if hasattr(node, "_saved_other")]
        want = [pair.plain.blocks[i].weight for i in (1, 0)]
        assert [t.item() for t in found if t is not None] == [w.item() for w in want]
        assert all(type(b.weight) is FlatShard for b in pair.sharded.blocks)
        with torch.no_grad():
            for mine, whole in zip(pair.sharded.blocks, pair.plain.blocks, strict=True):
                whole.weight.mul_(1.5)
                if mine.weight.to_local().numel():  # an edit that the other rank cannot see
                    mine.weight.to_local().mul_(1.5)
        pair.play(step)
        pair.check_grads(f"step {step}")


def test_a_look_at_saved_weights_leaves_no_trace() -> None:
    run_ranks(looked_at, 2)


def clocks(rank: int, world: int) -> list[int]:
    """What reductions are timed by counts a unit's turn as it counts a gather."""
    found: list[int] = []
    real = Reductions.end_backward

    def noted(self: Any) -> None:
        found.append(self.clock)
        real(self)

    with mock.patch.object(Reductions, "end_backward", noted):
        for comm in ("shared_memory", "process_group"):
            model = fully_shard(build(Net), units=Block, comm=comm)
            for step in range(3):
                mse(model, Turn(rank, world, step, torch.float32))
                model.zero_grad()
    return found


def test_a_turn_in_backward_counts_as_a_gather() -> None:
    # At first no order is known and all three blocks are gathered; then the last one stays full.
    for found in run_ranks(clocks, 2):
        assert found == [3, 2, 2] * 2

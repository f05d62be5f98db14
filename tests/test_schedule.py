# SPDX-License-Identifier: Apache-2.0
"""The schedule as a list: what the runtime does in which order; prefetch changes no bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import (
    Block,
    Net,
    Scenario,
    Sided,
    Turn,
    build,
    check,
    full_grads,
    full_params,
    lopsided,
    mse,
    schedules,
    sharded_adamw,
    varied,
)
from torch import Tensor, nn

from fsdp_kernels import fully_shard, record_schedule

FORWARD = ["gather root/0", "wait root", "gather blocks.0/0", "wait blocks.0"]
END = ["wait blocks.0", "reduce blocks.0/0", "reduce root/0", "free root/0", "free blocks.0/0"]

FIRST_STEP = [  # nothing is known yet: the last block is freed, and gathered again for backward
    *FORWARD,
    "free blocks.0/0",
    "gather blocks.1/0",
    "wait blocks.1",
    "free blocks.1/0",
    "gather blocks.1/0",
    "wait blocks.1",
    "free blocks.1/0",
    "reduce blocks.1/0",  # backward has left block 1 for block 0
    "gather blocks.0/0",
    *END,
]

SETTLED: dict[int, list[str]] = {
    0: [
        *FORWARD,
        "free blocks.0/0",
        "gather blocks.1/0",
        "wait blocks.1",
        "reduce blocks.1/0",  # its last gradient has come
        "free blocks.1/0",
        "gather blocks.0/0",
        *END,
    ],
    1: [
        *FORWARD,
        "gather blocks.1/0",  # while block 0 computes
        "free blocks.0/0",
        "wait blocks.1",
        "gather blocks.0/0",  # while block 1 runs backward
        "reduce blocks.1/0",
        "free blocks.1/0",
        *END,
    ],
}
"""By prefetch: a root, which stays gathered, and two blocks, of which the last stays gathered.

Over shared memory all of them do: see `test_carried.py`.
"""


@pytest.mark.parametrize("prefetch", [0, 1])
def test_schedule_of_a_step(prefetch: int) -> None:
    ranks = run_ranks(schedules, 2, {"comm": "process_group", "prefetch": prefetch})
    assert ranks[0] == ranks[1]
    first, _, *settled = ranks[0]  # the second step learns from the first when gradients come
    if prefetch == 0:
        assert first == FIRST_STEP
    for step in settled:
        assert step == SETTLED[prefetch]


def trained_bits(rank: int, world: int, prefetch: int) -> list[Tensor]:
    """Train with changing paths, so that predictions miss; return every number that came out."""
    torch.manual_seed(0)
    model: nn.Module = build(partial(Net, depth=4))
    units = (Block, nn.LayerNorm)
    fully_shard(model, units=units, prefetch=prefetch, comm="process_group")
    optimizer = sharded_adamw(model.parameters(), max_grad_norm=0.1)
    bits = []
    for step in range(6):
        turn = Turn(rank, world, step, torch.float32)
        x = model.inp(turn.rand(4, 3))
        for index in [(0, 1, 2, 3), (3, 1), (0, 1, 0, 2)][step % 3]:
            x = model.blocks[index](x)
        bits.append(turn.backward(model.head(x).square().mean()))
        bits.append(mse(model, turn))
        bits += [grad for grad in full_grads(model).values() if grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        bits += full_params(model).values()
    return bits


def knobs(rank: int, world: int) -> None:
    """Prefetch is a hint: losses, gradients and parameters are the same to the bit."""
    want = trained_bits(rank, world, 0)
    for prefetch in (1, 2, 9):
        got = trained_bits(rank, world, prefetch)
        assert len(got) == len(want)
        for index, (a, b) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(a, b), f"prefetch={prefetch} changed number {index}"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_prefetch_never_changes_a_bit(world: int) -> None:
    run_ranks(knobs, world)


def inference(rank: int, world: int) -> list[str]:
    model = build(partial(Net, depth=2))
    fully_shard(model, units=Block, prefetch=0)
    model.eval()
    with torch.no_grad(), record_schedule() as schedule:
        model(torch.ones(2, 3))
    return [str(event) for event in schedule]


def test_schedule_of_a_forward_without_gradients() -> None:
    events = run_ranks(inference, 2)[0]
    assert not [event for event in events if event.startswith("reduce")]
    for unit in ("root", "blocks.0", "blocks.1"):
        mine = [event.split()[0] for event in events if unit in event]
        assert mine == ["gather", "wait", "free"], events


def reductions(rank: int, world: int) -> None:
    scenario = Scenario(partial(Net, block=Sided), lopsided, steps=4)
    orders: list[list[str]] = []

    def play(model: nn.Module, turn: Turn) -> Tensor:
        if not turn.sharded:
            return lopsided(model, turn)
        with record_schedule() as schedule:
            loss = lopsided(model, turn)
        orders.append([str(event) for event in schedule if event.verb == "reduce"])
        return loss

    check(rank, world, varied(scenario, play=play, shard=partial(fully_shard, units=Sided)))
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, orders)
    assert everyone.count(orders) == world, everyone
    assert all(len(order) == 4 for order in orders), orders


@pytest.mark.parametrize("world", [2, 3])
def test_reductions_run_in_one_order_on_every_rank(world: int) -> None:
    run_ranks(reductions, world)

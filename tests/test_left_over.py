# SPDX-License-Identifier: Apache-2.0
"""Gradients that `no_sync` left to be reduced later, and how often anything is reduced."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import Block, Net, Turn, full, mse
from pairs import Pair, no_sync
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_kernels import fully_shard

# What an assignment, a zeroing or a freeze does to gradients that wait.


def assigned(rank: int, world: int) -> None:
    """Assigning a gradient replaces what waits, as it does without sharding."""
    pair = Pair(rank, world)
    for step in range(0, 6, 2):
        pair.play(step, no_sync)
        for m in pair.both:
            m.head.weight.grad = torch.ones_like(m.head.weight)
            m.blocks[1].up.bias.grad = torch.zeros_like(m.blocks[1].up.bias)
        pair.play(step + 1, no_sync if step == 4 else mse)
        pair.check_grads(f"step {step}")
        pair.zero_grad()


@pytest.mark.parametrize("world", [1, 2])
def test_an_assigned_gradient_replaces_what_waits(world: int) -> None:
    run_ranks(assigned, world, timeout=20)


def zeroed(rank: int, world: int) -> None:
    """Zeroed is not None, whether it has been reduced or not."""
    pair = Pair(rank, world)
    pair.play(0, no_sync)
    pair.zero_grad(set_to_none=False)
    pair.check_grads("zeroed while it waits")
    assert pair.sharded.inp.weight.grad is not None
    pair.play(1)
    pair.play(2, no_sync)
    pair.zero_grad(set_to_none=False)
    pair.play(3)
    pair.check_grads("after a backward")


@pytest.mark.parametrize("world", [1, 2])
def test_zeroing_gradients_that_wait(world: int) -> None:
    run_ranks(zeroed, world, timeout=20)


class Skipped(Block):
    """May leave all its weights unused, though it is called."""

    def __init__(self, dim: int = 7) -> None:
        super().__init__(dim)
        self.use = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.use else x * 1.0


def first_rank_only(model: nn.Module, turn: Turn, delayed: bool) -> Tensor:
    model.blocks[1].use = turn.rank == 0
    return (no_sync if delayed else mse)(model, turn)


def frozen_meanwhile(rank: int, world: int, then: tuple[bool, ...]) -> None:
    """Freeze what waits: no other rank may be left alone with its reduction, nothing is lost."""
    shard = partial(fully_shard, units=Skipped)
    pair = Pair(rank, world, partial(Net, block=Skipped), shard)
    pair.play(0, partial(first_rank_only, delayed=True))
    for m in pair.both:
        m.blocks[1].requires_grad_(False)
        m.head.requires_grad_(False)
    for step, delayed in enumerate(then, 1):
        pair.play(step, partial(first_rank_only, delayed=delayed))
    pair.check_grads(f"then {then}")
    assert pair.sharded.blocks[1].up.weight.grad is not None
    pair.zero_grad()
    pair.play(9, partial(first_rank_only, delayed=False))
    pair.check_grads("the next step")
    assert pair.sharded.blocks[1].up.weight.grad is None


@pytest.mark.parametrize("then", [(), (True,), (False,), (True, False)])
def test_freezing_what_waits(then: tuple[bool, ...]) -> None:
    run_ranks(frozen_meanwhile, 2, then, timeout=20)


# One reduction for each bucket and backward.


def of_an_input(model: nn.Module, turn: Turn) -> None:
    x = turn.rand(4, 3).requires_grad_()
    torch.autograd.grad(model(x).sum(), x)


def of_a_frozen_model(model: nn.Module, turn: Turn) -> None:
    model.requires_grad_(False)
    model(turn.rand(4, 3).requires_grad_()).sum().backward()
    model.requires_grad_(True)


def of_a_left_over(model: nn.Module, turn: Turn) -> None:
    no_sync(model, turn)
    full(model.head.weight.grad)
    model.zero_grad()


def counted(rank: int, world: int, between: Any) -> None:
    """Whatever ran between, the next backward knows when its gradients come."""
    pair = Pair(rank, world)
    usual: list[str] = []
    for step in range(5):
        assert pair.play(step) == 4, f"step {step}: one reduction for each of four units"
        pair.check_grads(f"step {step}")
        pair.zero_grad()
        if step == 2:
            usual = pair.schedule
        if step >= 2:
            assert pair.schedule == usual, f"step {step}"
            between(pair.sharded, Turn(rank, world, step))
            pair.sharded.zero_grad()


@pytest.mark.parametrize("between", [of_an_input, of_a_frozen_model, of_a_left_over])
def test_a_backward_reduces_each_unit_once(between: Any) -> None:
    run_ranks(counted, 2, between)


def penalised(model: nn.Module, turn: Turn) -> Tensor:
    x = turn.rand(4, 3).requires_grad_()
    out = model(x).square().sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    return turn.backward(out + slope.square().sum())


def counted_penalty(rank: int, world: int) -> None:
    pair = Pair(rank, world)
    for step in range(4):
        assert pair.play(step, penalised) == 8, f"step {step}: four units, two backwards"
        pair.check_grads(f"step {step}")
        pair.zero_grad()


def test_a_gradient_penalty_reduces_each_unit_once_a_backward() -> None:
    run_ranks(counted_penalty, 2)


class Output:
    """Not a container that any tree utility knows."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Recomputed(Net):
    """Its checkpoints begin backwards inside the backward; its output is a custom object."""

    def forward(self, x: Tensor) -> Any:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return Output(x)  # without the head: no weight of the root begins the backward


def play_recomputed(model: nn.Module, turn: Turn) -> Tensor:
    return turn.backward(model(turn.rand(4, 3)).value.square().mean())


def counted_recomputed(rank: int, world: int) -> None:
    pair = Pair(rank, world, Recomputed)
    for step in range(3):
        assert pair.play(step, play_recomputed) == 4, f"step {step}: one for each of four units"
        pair.check_grads(f"step {step}")
        pair.zero_grad()


def test_re_entrant_checkpoints_reduce_each_unit_once() -> None:
    run_ranks(counted_recomputed, 2)

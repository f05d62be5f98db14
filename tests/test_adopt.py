# SPDX-License-Identifier: Apache-2.0
"""Sharding an ancestor of a module that is sharded, and in use, already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import (
    Block,
    Net,
    Turn,
    adamw,
    assert_close,
    assert_params,
    build,
    by_block,
    mse,
    sharded_adamw,
    states,
)
from pairs import Pair, no_sync
from torch import Tensor, nn

from fsdp_kernels import fully_shard
from fsdp_kernels.comm import ProcessGroupComm


def inner(model: nn.Module) -> nn.Module:
    return model.blocks[1]


def inner_first(model: nn.Module) -> nn.Module:
    fully_shard(inner(model))
    return model


def on_block(model: nn.Module, turn: Turn) -> Tensor:
    """Train the block alone."""
    return turn.backward(model.blocks[1](turn.rand(4, 7)).square().mean())


def forward_kept(pair: Pair) -> None:
    inner(pair.sharded)(Turn(pair.rank, pair.world, 0).rand(4, 7))
    assert inner(pair.sharded).units[0].state == "FULL"


def unshard(pair: Pair) -> None:
    inner(pair.sharded).unshard()


def backward_done(pair: Pair) -> None:
    pair.play(0, on_block)


def backward_failed(pair: Pair) -> None:
    def fail(_: Any) -> None:
        raise ArithmeticError("told to fail")

    x = Turn(pair.rank, pair.world, 0).rand(4, 7).requires_grad_()
    x.register_hook(fail)
    with pytest.raises(ArithmeticError):
        inner(pair.sharded)(x).sum().backward()


def adopted(rank: int, world: int, prepare: Callable[[Pair], None]) -> None:
    pair = Pair(rank, world, shard=inner_first)
    prepare(pair)
    by_block(pair.sharded)
    assert states(pair.sharded) == {"SHARDED"}
    optimizers = [sharded_adamw(pair.sharded.parameters()), adamw(pair.plain.parameters())]
    for step in range(1, 4):
        pair.play(step)
        pair.check_grads(f"step {step}")
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in pair.both]
        assert_close(norms[0], norms[1], "norm over all units")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_params(pair.sharded, pair.plain, f"step {step}")


@pytest.mark.parametrize("prepare", [forward_kept, unshard, backward_done, backward_failed])
def test_an_inner_module_in_use_is_adopted(prepare: Callable[[Pair], None]) -> None:
    run_ranks(adopted, 2, prepare, timeout=20)


def waiting(rank: int, world: int) -> None:
    """Gradients that wait for the inner root's reduction: refused, and nothing is changed."""
    pair = Pair(rank, world, shard=inner_first)
    pair.play(0, delayed_block)
    with pytest.raises(ValueError, match=r"no gradients left by no_sync.*zero_grad\(\) or step"):
        by_block(pair.sharded)
    assert type(pair.sharded) is Net
    pair.check_grads("after the refusal")
    by_block(pair.sharded)
    pair.play(1)
    pair.check_grads("after sharding")


def delayed_block(model: nn.Module, turn: Turn) -> Tensor:
    with turn.no_sync(inner(model)):
        return on_block(model, turn)


def test_gradients_that_wait_are_refused() -> None:
    run_ranks(waiting, 2, timeout=20)


def optimizer_before(rank: int, world: int) -> None:
    """An optimizer that has stepped before steps on with what the new root reduces."""
    pair = Pair(rank, world, shard=inner_first)
    ours = sharded_adamw(inner(pair.sharded).parameters())
    theirs = adamw(inner(pair.plain).parameters())

    def step(where: str) -> None:
        for optimizer in (ours, theirs):
            optimizer.step()
        assert_params(pair.sharded, pair.plain, where)
        pair.zero_grad()

    pair.play(0, on_block)
    step("before")
    by_block(pair.sharded)
    for number in range(1, 4):
        pair.play(number, no_sync if number == 2 else mse)
        step(f"after, step {number}")


def test_an_optimizer_used_before_steps_on() -> None:
    run_ranks(optimizer_before, 2, timeout=20)


def other_ranks(rank: int, world: int) -> None:
    groups = [dist.new_group([r]) for r in range(world)]
    model = build(Net, torch.float64)
    fully_shard(inner(model), comm=ProcessGroupComm(groups[rank]))
    x = torch.ones(2, 7, dtype=torch.float64)
    before = inner(model)(x)
    with pytest.raises(ValueError, match=r"on the same ranks, got rank 0 of 1 beside \d of 2"):
        fully_shard(model, units=Block)
    assert type(model) is Net
    assert type(model.head.weight) is nn.Parameter
    assert torch.equal(inner(model)(x), before)


def test_other_ranks_are_refused() -> None:
    run_ranks(other_ranks, 2, timeout=20)


def graph_of_before(rank: int, world: int) -> None:
    """A forward before, its backward after: the graph finds the weights where they are now."""
    pair = Pair(rank, world, shard=inner_first)
    losses = []

    def forward(model: nn.Module, turn: Turn) -> Tensor:
        losses.append((turn, inner(model)(turn.rand(4, 7)).square().mean()))
        return losses[-1][1]

    pair.play(0, forward)
    by_block(pair.sharded)
    for turn, loss in losses:
        turn.backward(loss)
    pair.check_grads("backward of an older graph")
    assert states(pair.sharded) == {"SHARDED"}
    pair.zero_grad()
    pair.play(1)
    pair.check_grads("the next step")


def test_a_graph_made_before_runs_backward_after() -> None:
    run_ranks(graph_of_before, 2, timeout=20)

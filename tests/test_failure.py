# SPDX-License-Identifier: Apache-2.0
"""After an exception in forward or backward all units are sharded, and the next step is right."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import (
    Block,
    Net,
    Scenario,
    Sided,
    Turn,
    check,
    check_all,
    lopsided,
    mse,
    states,
    varied,
)
from torch import Tensor, nn

from fsdp_kernels import fully_shard


class Fails(nn.Module):
    """Fails in forward or in backward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.when = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "forward":
            raise ArithmeticError("told to fail in forward")
        return FailsBackward.apply(x, self)


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: Fails) -> Tensor:
        ctx.owner = owner
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.owner.when == "backward":
            raise ArithmeticError("told to fail in backward")
        return grad, None


class Fragile(Block):
    def __init__(self, dim: int = 7) -> None:
        super().__init__(dim)
        self.fails = Fails()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.fails(self.down(self.up(x)))


def failing(model: nn.Module, turn: Turn) -> Tensor:
    """Fail once in the middle of every step, on every rank, and then play the step."""
    for number, when in enumerate(("forward", "backward")):
        fails = model.blocks[(turn.step + number) % 3].fails
        fails.when = when
        with pytest.raises(ArithmeticError, match=f"fail in {when}"):
            mse(model, turn)
        fails.when = ""
        if turn.sharded and when == "forward":
            assert states(model) == {"SHARDED"}, f"after a failed {when}: {states(model)}"
        if when == "backward":
            model.zero_grad()
        if turn.sharded:
            assert states(model) == {"SHARDED"}, f"after a failed {when}: {states(model)}"
    return mse(model, turn)


def failing_oracle_safe(model: nn.Module, turn: Turn) -> Tensor:
    """The oracle plays turns in sequence, so its own gradients must outlive no failure."""
    return failing(model, turn) if turn.sharded else mse(model, turn)


@pytest.mark.parametrize("world", [1, 2])
def test_an_exception_leaves_units_sharded_and_the_next_step_right(world: int) -> None:
    base = Scenario(partial(Net, block=Fragile), failing_oracle_safe, steps=4)
    shard = partial(fully_shard, units=Fragile)
    run_ranks(check_all, world, varied(base, shard=shard), varied(base, shard=fully_shard))


class LopsidedFragile(Sided):
    """Fails in backward after its own gradients have come, all of them on some ranks only."""

    def __init__(self, dim: int = 7) -> None:
        super().__init__(dim)
        self.fails = Fails()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.fails(x))


def failing_unevenly(model: nn.Module, turn: Turn) -> Tensor:
    """Fail when the ranks have issued different numbers of reductions, and then play the step."""
    if turn.sharded:
        fails = model.blocks[turn.step % 3].fails
        fails.when = "backward"
        with pytest.raises(ArithmeticError):
            lopsided(model, turn)
        fails.when = ""
        assert states(model) == {"SHARDED"}
        assert all(p.grad is None for p in model.parameters())
    return lopsided(model, turn)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_backward_that_fails_unevenly(prefetch: int) -> None:
    shard = partial(fully_shard, units=LopsidedFragile, prefetch=prefetch)
    build = partial(Net, block=LopsidedFragile)
    run_ranks(check, 3, Scenario(build, failing_unevenly, steps=6, shard=shard))

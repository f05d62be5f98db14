# SPDX-License-Identifier: Apache-2.0
"""The ways in which real models are called, frozen and composed, against the unsharded model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import (
    Net,
    Scenario,
    Sided,
    Turn,
    adamw,
    assert_close,
    assert_grads,
    assert_params,
    build,
    by_block,
    check,
    check_all,
    mse,
    sharded_adamw,
    states,
    turns,
    varied,
)
from pairs import Pair
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp_kernels import fully_shard


class Recurrent(Net):
    """Calls its blocks several times and in an order of its own, and skips one."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for index in (0, 1, 0, 0, 1):
            x = self.blocks[index](x)
        return self.head(x)


def several_forwards(model: nn.Module, turn: Turn) -> Tensor:
    """Three forwards, then their backwards, oldest first and then newest first."""
    losses = [model(turn.rand(n + 1, 3, salt=n)).square().mean() for n in range(3)]
    return turn.backward(losses[0]) + turn.backward(losses[2]) + turn.backward(losses[1])


def joint_backward(model: nn.Module, turn: Turn) -> Tensor:
    return turn.backward(sum(model(turn.rand(2, 3, salt=n)).square().mean() for n in range(3)))


def retained(model: nn.Module, turn: Turn) -> Tensor:
    loss = model(turn.rand(4, 3)).square().mean()
    return turn.backward(loss, retain_graph=True) + turn.backward(loss)


def evaluated(model: nn.Module, turn: Turn) -> Tensor:
    """Evaluate before, between forward and backward, and after."""
    model.eval()
    with torch.no_grad():
        before = model(turn.rand(2, 3, salt=5))
    model.train()
    loss = F.mse_loss(model(turn.rand(4, 3)), turn.rand(4, 5, salt=1))
    with torch.inference_mode():
        between = model(turn.rand(2, 3, salt=6))
    total = turn.backward(loss)
    with torch.no_grad():
        after = model(turn.rand(2, 3, salt=7))
    return total + (before.sum() + between.sum() + after.sum()).double() * turn.scale


def direct(model: nn.Module, turn: Turn) -> Tensor:
    """Call units, a submodule of a unit and the root's own layers without the root's forward."""
    x = model.blocks[1](model.inp(turn.rand(4, 3)))
    x = x + model.blocks[0].down(torch.relu(model.blocks[0].up(x)))
    return turn.backward(F.mse_loss(model.head(x), turn.rand(4, 5, salt=1)))


def test_order_and_number_of_calls() -> None:
    base = Scenario(steps=3)
    plays = [several_forwards, joint_backward, retained, evaluated, direct]
    run_ranks(
        check_all,
        2,
        varied(base, build=Recurrent),
        varied(base, build=Recurrent, shard=fully_shard),
        *(varied(base, play=play) for play in plays),
        *(varied(base, play=play, build=Recurrent) for play in (several_forwards, joint_backward)),
    )


@pytest.mark.parametrize("world", [1, 3, 4])
def test_several_forwards_before_backwards(world: int) -> None:
    run_ranks(check, world, Scenario(play=several_forwards, steps=3))


def sometimes(model: nn.Module, turn: Turn) -> Tensor:
    """Skip one block in even steps and take another order in odd ones, on every rank."""
    order = [(0, 2), (2, 1, 0), (1,)][turn.step % 3]
    x = model.inp(turn.rand(4, 3))
    for index in order:
        x = model.blocks[index](x)
    return turn.backward(model.head(x).square().mean())


def test_blocks_in_another_order_or_not_at_all() -> None:
    run_ranks(check, 3, Scenario(play=sometimes, steps=7))


# Freezing.


class Lora(nn.Module):
    """A frozen linear layer with a trained low-rank update."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.base = nn.Linear(dim, dim)
        self.base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, dim))
        self.up = nn.Parameter(torch.zeros(dim, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + x @ self.down.t() @ self.up.t())


def frozen_head() -> nn.Module:
    model = Net()
    model.blocks[0].requires_grad_(False)
    model.inp.bias.requires_grad_(False)
    return model


def thaw(model: nn.Module, step: int) -> None:
    """Unfreeze, refreeze and half-freeze: the layout was decided when the model was sharded."""
    model.blocks[0].requires_grad_(step in (1, 2, 4))
    model.blocks[1].up.requires_grad_(step != 2)
    model.inp.bias.requires_grad_(step == 3)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_frozen_unfrozen_refrozen(world: int) -> None:
    lora = Scenario(build=partial(Net, block=Lora), shard=partial(fully_shard, units=Lora), steps=3)
    base = Scenario(build=frozen_head, steps=3)
    run_ranks(
        check_all,
        world,
        lora,
        varied(lora, shard=fully_shard),
        base,
        varied(base, before=thaw, steps=7),
        Scenario(before=thaw, steps=7),
    )


def all_frozen(rank: int, world: int) -> None:
    model = build(Net, torch.float64).requires_grad_(False)
    want = model(torch.ones(2, 3, dtype=torch.float64))
    by_block(model)
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    out = model(x)
    assert_close(out, want, "frozen model")
    out.sum().backward()  # to the input alone
    plain_x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    build(Net, torch.float64)(plain_x).sum().backward()
    assert_close(x.grad, plain_x.grad, "gradient of the input")
    assert all(p.grad is None for p in model.parameters())
    assert states(model) == {"SHARDED"}


def test_frozen_models() -> None:
    run_ranks(all_frozen, 2)


# Parameters of unusual shape and dtype.


class Odd(nn.Module):
    """One unit with several dtypes, 0-dim, empty and non-contiguous parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.empty = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(5, 3, dtype=torch.float64).t())
        self.strided = nn.Parameter(torch.randn(6, 10, dtype=torch.float64)[::2, ::2])
        self.single = nn.Linear(5, 5)
        self.brain = nn.Parameter(torch.randn(5).bfloat16())
        self.steps = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.turned * self.scale + self.empty.sum()
        x = self.single(x.float()).double() * self.brain.float().double()
        return x + (x @ self.strided.t()).sum(1, keepdim=True) + self.steps.sum()


def odd_training(rank: int, world: int) -> None:
    """Compare to float64's tolerance only upstream of nothing that is rounded to bf16."""
    plain = build(Odd)
    model = fully_shard(build(Odd))
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.shape, p.dtype) == (q.shape, q.dtype), name
        assert torch.equal(p.full_tensor(), q), name
    optimizer, oracle = sharded_adamw(model.parameters()), adamw(plain.parameters())
    for step in range(3):
        where = f"step {step}"
        mse(model, Turn(rank, world, step))
        for turn in turns(rank, world, step, torch.float64):
            mse(plain, turn)
        assert_grads(model, plain, where, rtol=3e-2)
        for name in ("scale", "turned", "strided"):
            grad = getattr(plain, name).grad
            assert_close(getattr(model, name).grad.full_tensor(), grad, f"{where}: {name}", 1e-5)
        optimizer.step()
        oracle.step()
        assert_params(model, plain, where, rtol=1e-2)
        plain.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
        optimizer.zero_grad()
        oracle.zero_grad()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_odd_parameters_in_one_unit(world: int) -> None:
    run_ranks(odd_training, world)


class Tiny(nn.Module):
    """A unit with fewer elements than there are ranks."""

    def __init__(self, dim: int = 7) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.gain + self.bias)


@pytest.mark.parametrize("world", [3, 4])
def test_a_unit_smaller_than_the_world(world: int) -> None:
    run_ranks(
        check, world, Scenario(partial(Net, block=Tiny), shard=partial(fully_shard, units=Tiny))
    )


def evaluated_first(rank: int, world: int, mode: Callable[[], Any]) -> None:
    def shard(model: nn.Module) -> nn.Module:
        want = model(torch.ones(2, 3, dtype=torch.float64)).detach()
        by_block(model)
        with mode():
            assert_close(model(torch.ones(2, 3, dtype=torch.float64)), want, "first forward")
        assert states(model) == {"SHARDED"}
        return model

    check(rank, world, Scenario(steps=3, shard=shard))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_forward_without_gradients_before_training(mode: Callable[[], Any]) -> None:
    run_ranks(evaluated_first, 3, mode)


def edit_after_forward(rank: int, world: int) -> None:
    """A forward whose loss is dropped: an edit afterwards is of the parameter, not of a copy."""
    model, plain = by_block(build(Net, torch.float64)), build(Net, torch.float64)
    for step in range(3):
        turn = Turn(rank, world, step)
        for m in (model, plain):
            m(turn.rand(2, 3))
            with torch.no_grad():
                m.head.weight.mul_(1.5)
                m.blocks[2].up.weight.data.clamp_(-0.1, 0.1)
                m.blocks[0].up.bias.add_(1.0)
        assert_params(model, plain, f"step {step}")
        assert_close(model(turn.rand(2, 3)), plain(turn.rand(2, 3)), f"step {step}: output")
        mse(model, turn)
        for other in turns(rank, world, step, torch.float64):
            mse(plain, other)
        assert_grads(model, plain, f"step {step}")
        model.zero_grad()
        plain.zero_grad()


def test_an_edit_after_a_forward_without_backward() -> None:
    run_ranks(edit_after_forward, 2)


class Growing(nn.Module):
    """Uses a weight of the root's own after its blocks, and before them too while it is short."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sided(7) for _ in range(3))
        self.blocks[:2].requires_grad_(False)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 7))
        self.depth = 2

    def forward(self, x: Tensor) -> Tensor:
        if self.depth == 2:
            x = x * self.weight
        for block in self.blocks[: self.depth]:
            x = block(x)
        return x * self.weight


def grown(rank: int, world: int) -> None:
    """A unit that is new to backward is left while the root is due, on one rank complete already.

    With blocks 0 and 1, the root's gradient comes after one gather. With block 2 it comes before,
    so it is issued as soon as that gather is: on rank 0 by the arrival of all that block 2 has.
    """

    def play(model: nn.Module, turn: Turn) -> None:
        for block in model.blocks:
            block.use = turn.rank == 0
        turn.backward(model(turn.rand(4, 7).requires_grad_()).square().mean())

    pair = Pair(rank, world, Growing)
    for step in range(5):
        for model in pair.both:
            model.depth = 2 if step < 2 else 3
        pair.play(step, play)
        pair.check_grads(f"step {step}")
        pair.zero_grad()


def test_a_unit_that_is_new_in_a_backward_where_another_is_due() -> None:
    run_ranks(grown, 2, timeout=20)

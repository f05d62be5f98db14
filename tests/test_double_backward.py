# SPDX-License-Identifier: Apache-2.0
"""Graphs of gradients, gradients inside a forward, and outputs that alias parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import run_ranks
from torch import Tensor, nn

from fsdp_kernels import fully_shard

WORLDS = [1, 2, 3]


class Energy(nn.Module):
    """A layered scalar function; every layer is a unit, so slots are reused all the time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) ** 2
        return x.sum(-1)


class Forces(nn.Module):
    """Calls autograd.grad inside its forward, as models of interatomic forces do."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = Energy()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.energy(x) * self.scale
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return force * self.scale


def _penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    score = model(x)
    (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    with torch.no_grad():
        model(x)  # gathers every unit into another's slot
    return score.mean() + (slope.norm(dim=-1) - 1).pow(2).mean()


def _forces(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1).pow(2).mean()


def _train(rank: int, world: int, make: Any, loss_of: Any) -> None:
    model, reference = make().double(), make().double()
    fully_shard(model, units=nn.Linear)
    ours = torch.optim.SGD(model.parameters(), lr=0.05)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.05)
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        batch = torch.randn(world * 4, 6, dtype=torch.float64, generator=draw)
        loss_of(model, batch[rank * 4 : rank * 4 + 4]).backward()
        loss_of(reference, batch).backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert p.grad is not None, name
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-9, atol=1e-12)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("world", WORLDS)
def test_a_gradient_penalty(world: int) -> None:
    """The graph of a gradient saves weights that no saved-tensor hook sees."""
    run_ranks(_train, world, Energy, _penalty)


@pytest.mark.parametrize("world", WORLDS)
def test_gradients_inside_a_forward(world: int) -> None:
    """The inner backward must not free units whose forward still runs."""
    run_ranks(_train, world, Forces, _forces)


class Table(nn.Module):
    """Returns its weight, or a view of it."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.view = view

    def forward(self) -> Any:
        return {"table": [self.weight.t() if self.view else self.weight]}


class Reads(nn.Module):
    """Uses another unit's weight after that unit was freed."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.table = Table(view)
        self.after = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        table = self.table()["table"][0]
        return self.after(x) @ table


def _refused(rank: int, world: int, view: bool) -> None:
    model = fully_shard(Reads(view), units=(Table, nn.Linear))
    for grad in (True, False):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(ValueError, match=r"unit 'table': expected outputs of their own memory"),
        ):
            model(torch.randn(2, 4))
        assert [unit.state for unit in model.units] == ["SHARDED"] * 3


@pytest.mark.parametrize("view", [False, True])
def test_an_output_that_aliases_freed_parameters_is_refused(view: bool) -> None:
    run_ranks(_refused, 2, view)

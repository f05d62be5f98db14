# SPDX-License-Identifier: Apache-2.0
"""Shared weights stay one parameter, training starts from rank 0's, and padding enters nothing."""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks
from models import (
    Block,
    Net,
    Scenario,
    Turn,
    build,
    by_block,
    full,
    full_params,
    mse,
    sharded_adamw,
    train,
)
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp_kernels import fully_shard

WORLDS = [1, 2, 3, 4]


class Scaled(Block):
    """Reads a weight of its own, without any submodule's call."""

    def __init__(self) -> None:
        super().__init__(7, 7)
        self.gain = nn.Parameter(torch.rand(7) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class Tied(nn.Module):
    """Ties within the root, within a unit, and across two units."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(Scaled() for _ in range(3))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[0].down.weight = self.blocks[0].up.weight
        self.blocks[2].up.weight = self.blocks[1].up.weight
        self.blocks[2].gain = self.blocks[0].gain

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def predict(model: nn.Module, turn: Turn) -> Tensor:
    tokens = (turn.rand(4, 6).abs() * 10).long() % 11
    return turn.backward(F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))


def tied(rank: int, world: int) -> None:
    model = train(rank, world, Scenario(build=Tied, play=predict))
    ties = [
        (model.head, "weight", model.embed),
        (model.blocks[0].down, "weight", model.blocks[0].up),
        (model.blocks[2].up, "weight", model.blocks[1].up),
        (model.blocks[2], "gain", model.blocks[0]),
    ]
    owners = [getattr(module, name).bucket.unit.name for module, name, _ in ties]
    assert owners == ["", "blocks.0", "", ""], "the closest common ancestor's unit"
    whole = {name: full(value) for name, value in model.state_dict().items()}
    assert {"embed.weight", "head.weight", "blocks.2.up.weight"} <= set(whole)
    model.load_state_dict({name: value + 1 for name, value in whole.items()})
    for module, name, other in ties:
        assert getattr(module, name) is getattr(other, name)
        assert module._parameters[name] is other._parameters[name]
    assert torch.equal(full(model.head.weight), whole["embed.weight"] + 1)


@pytest.mark.parametrize("world", WORLDS)
def test_tied_weights_within_and_across_units(world: int) -> None:
    run_ranks(tied, world)


def initial(rank: int, world: int) -> None:
    reference = build(Net)
    torch.manual_seed(1234 + rank)
    model = by_block(Net())
    wanted = full_params(reference)
    for name, value in full_params(model).items():
        assert torch.equal(value, wanted[name]), name
    assert torch.equal(model.offset, reference.offset)
    torch.manual_seed(99 + rank)
    own = Net()
    kept, buffer = full_params(own), own.offset.clone()
    by_own = fully_shard(own, units=Block, sync_module_states=False)
    for name, p in by_own.named_parameters():
        local, fragment = p.to_local(), p.fragment
        assert torch.equal(local, kept[name].flatten()[fragment.start : fragment.stop]), name
    assert torch.equal(by_own.offset, buffer)


@pytest.mark.parametrize("world", WORLDS)
def test_rank_0_gives_the_initial_weights_and_buffers(world: int) -> None:
    run_ranks(initial, world)


def trained_bytes(rank: int, world: int, poison: bool) -> list[Tensor]:
    """Train with every uninitialised byte poisoned, or not; give back bits that must not differ."""
    torch.use_deterministic_algorithms(poison)  # fills fresh memory with NaN
    model = by_block(build(Net, torch.float32))
    optimizer = sharded_adamw(model.parameters(), max_grad_norm=0.1)
    bits = []
    for step in range(5):
        bits.append(mse(model, Turn(rank, world, step, torch.float32)))
        if step % 2:
            bits.append(model.clip_grad_norm_(0.1).clone())
        optimizer.step()
        bits.append(torch.as_tensor(optimizer.grad_norm).clone())
        optimizer.zero_grad()
    return bits + list(full_params(model).values())


def poisoned(rank: int, world: int) -> None:
    clean, dirty = (trained_bytes(rank, world, poison) for poison in (False, True))
    for a, b in zip(clean, dirty, strict=True):
        assert torch.isfinite(b).all()
        assert torch.equal(a, b)


@pytest.mark.parametrize("world", [1, 3])
def test_padding_never_enters_a_result(world: int) -> None:
    run_ranks(poisoned, world)

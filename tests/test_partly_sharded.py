# SPDX-License-Identifier: Apache-2.0
"""Models that are sharded in part, and modules that cannot be: handled, or refused by name."""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks
from models import Net, Turn, assert_close, assert_grads, build, by_block, full, mse, turns
from pairs import Pair
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp_kernels import fully_shard

ALIKE = r"expected parameters sharded by one root, got \d+ sharded ones of \d+, over \d roots"


def first_block(model: nn.Module) -> nn.Module:
    fully_shard(model.blocks[0])
    return model


def each_block(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return model


def clipped_in_part(rank: int, world: int) -> None:
    for shard in (first_block, each_block):
        model = shard(build(Net, torch.float32))
        mse(model, Turn(rank, world, 0, torch.float32))
        for listed in (list(model.parameters()), list(reversed(list(model.parameters())))):
            with pytest.raises(ValueError, match=ALIKE):
                nn.utils.clip_grad_norm_(listed, 1.0)
            optimizer = torch.optim.SGD(listed, lr=0.1)
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(torch.ones(()))
            with pytest.raises(ValueError, match=ALIKE):
                scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.blocks[0].parameters(), 1.0)
        assert torch.isfinite(norm)


def test_lists_that_are_sharded_in_part_are_refused() -> None:
    run_ranks(clipped_in_part, 2)


def cleared(rank: int, world: int) -> None:
    """A module added after sharding keeps plain parameters: they are the model's, too."""
    model = by_block(build(Net, torch.float64))
    model.late = nn.Linear(5, 2).double()
    for set_to_none in (False, True):
        x = Turn(rank, world, 0).rand(2, 3)
        model.late(model(x)).sum().backward()
        assert model.late.weight.grad.abs().sum() > 0
        model.zero_grad(set_to_none=set_to_none)
        for p in (model.late.weight, model.head.weight):
            assert (p.grad is None) == set_to_none
            assert p.grad is None or float(full(p.grad).abs().sum()) == 0.0


def test_zero_grad_reaches_plain_parameters() -> None:
    run_ranks(cleared, 2)


class Lookup(nn.Module):
    """A table whose gradient is sparse when it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 5))
        self.sparse = False

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.table, sparse=self.sparse)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lookup = Lookup()
        self.head = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lookup(x))


def words(model: nn.Module, turn: Turn) -> Tensor:
    x = torch.tensor([turn.rank, 3, 4])
    return turn.backward(model(x).square().mean())


def sparse(rank: int, world: int) -> None:
    for make in (nn.Embedding, nn.EmbeddingBag):
        model = nn.Sequential(make(9, 5, sparse=True), nn.Linear(5, 5))
        with pytest.raises(ValueError, match=r"parameter '0\.weight': expected dense gradients"):
            fully_shard(model)
        assert type(model) is nn.Sequential
        assert type(model[1].weight) is nn.Parameter

    pair = Pair(rank, world, Words, lambda m: fully_shard(m, units=Lookup))
    pair.sharded.lookup.sparse = True
    with pytest.raises(ValueError, match=r"parameter 'lookup\.table': expected a dense gradient"):
        words(pair.sharded, Turn(rank, world, 0))
    pair.sharded.zero_grad()
    pair.sharded.lookup.sparse = False
    for step in range(2):
        pair.play(step, words)
        pair.check_grads(f"step {step}, after the refusal")
        pair.zero_grad()


def test_sparse_gradients_are_refused_by_name() -> None:
    run_ranks(sparse, 2, timeout=20)


def attention(rank: int, world: int) -> None:
    """Attention reads its projection's weight without a call: that cannot be a unit."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()

    for units in (nn.Linear, lambda m: isinstance(m, nn.Linear)):
        model, plain = fully_shard(make(), units=units), make()
        assert [unit.name for unit in model.units] == ["", "linear1", "linear2"]
        for step in range(2):
            x = Turn(rank, world, step).rand(2, 3, 8)
            assert_close(model(x), plain(x), "output")
            model(x).square().mean().backward()
            for turn in turns(rank, world, step, torch.float64):
                turn.backward(plain(turn.rand(2, 3, 8)).square().mean())
            assert_grads(model, plain, f"step {step}")
            model.zero_grad()
            plain.zero_grad()


def test_layers_of_attention_are_not_units() -> None:
    run_ranks(attention, 2, timeout=20)

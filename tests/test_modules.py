# SPDX-License-Identifier: Apache-2.0
"""Modules of torch.nn that handle their parameters in ways of their own."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from harness import run_ranks
from models import Scenario, Turn, check_all
from torch import Tensor, nn

from fsdp_kernels import fully_shard

DIM = 6


class Wrapped(nn.Module):
    """A first layer, the module under test as a unit of its own, and a head."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inp = nn.Linear(3, DIM)
        self.inner = inner
        self.head = nn.Linear(DIM, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.inp(x)))


class Adapter(nn.Module):
    """Base of the modules under test: [batch, time, dim] in and out."""


class Recurrence(Adapter):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(DIM, DIM, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class Cells(Adapter):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        assert state is not None
        return x + state[0].unsqueeze(1)


class Attention(Adapter):
    def __init__(self, **kwargs: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        keys = x[..., : self.attention.kdim]
        return x + self.attention(x, keys, keys, need_weights=False)[0]


class Lists(Adapter):
    """Parameters in lists and dicts, by index and by iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(DIM, DIM) / DIM for _ in range(3))
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(DIM)), "b": torch.randn(1)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + torch.tanh(x @ weight)
        return x @ self.weights[-1] * self.named["a"] + sum(v.sum() for v in self.named.values())


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Normed(Adapter):
    """Parametrisations: the weight is computed from sharded parameters at every access."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.utils.parametrizations.weight_norm(nn.Linear(DIM, DIM))
        self.symmetric = nn.Linear(DIM, DIM)
        nn.utils.parametrize.register_parametrization(self.symmetric, "weight", Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.symmetric(torch.tanh(self.weight(x)))


class Convolutions(Adapter):
    """Buffers that forward updates, and parameters that no operation of ours sees as matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm1d(DIM)
        self.prelu = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        # The oracle plays all ranks through one module, so statistics must not reach the output.
        y = self.prelu(self.conv(x.transpose(1, 2)))
        return x + self.norm(y).transpose(1, 2)


class Encoder(Adapter):
    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            DIM, 2, 11, dropout=0.0, batch_first=True, norm_first=norm_first
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


MODULES = {
    "rnn": partial(Recurrence, nn.RNN),
    "lstm": partial(Recurrence, nn.LSTM),
    "gru": partial(Recurrence, nn.GRU),
    "cell": Cells,
    "attention": Attention,
    "attention-kdim": partial(Attention, kdim=4, vdim=4),
    "encoder-post": partial(Encoder, False),
    "encoder-pre": partial(Encoder, True),
    "lists": Lists,
    "parametrised": Normed,
    "convolutions": Convolutions,
}


def train_and_evaluate(model: nn.Module, turn: Turn) -> Tensor:
    """Train on sequences, and evaluate: some modules take a fused path without gradients."""
    x = turn.rand(3, 4, 3)
    loss = turn.backward(model(x).square().mean())
    if any(isinstance(m, nn.BatchNorm1d) for m in model.modules()):
        return loss  # its statistics differ: the oracle's have seen every rank's data
    model.eval()
    with torch.no_grad():
        value = model(x).double().sum()
    model.train()
    return loss + value * turn.scale


def seeded(factory: partial[nn.Module] | type[nn.Module]) -> nn.Module:
    return Wrapped(factory())


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, world: int) -> None:
    base = Scenario(partial(seeded, MODULES[name]), train_and_evaluate, steps=3)
    adapters = partial(fully_shard, units=Adapter)
    leaves = partial(fully_shard, units=lambda m: m is not None and type(m) in LEAVES)
    scenarios = [
        Scenario(base.build, base.play, 3, shard=adapters),
        Scenario(base.build, base.play, 2, shard=fully_shard),
    ]
    if name in ("rnn", "lstm", "attention", "encoder-pre"):
        scenarios.append(Scenario(base.build, base.play, 2, shard=leaves))
    run_ranks(check_all, world, *scenarios)


LEAVES = (nn.RNN, nn.LSTM, nn.MultiheadAttention, nn.TransformerEncoderLayer)


def refused_weight_norm(rank: int, world: int) -> None:
    """The old weight norm holds a graph of its parameters at all times."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        layer = nn.utils.weight_norm(nn.Linear(DIM, DIM))
    with pytest.raises(ValueError, match="weight_g"):
        fully_shard(layer)


def test_the_hook_based_weight_norm_is_refused_by_name() -> None:
    run_ranks(refused_weight_norm, 1)

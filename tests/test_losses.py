# SPDX-License-Identifier: Apache-2.0
"""Ten steps of a small transformer in fp32: every mode has the losses of one process."""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks
from models import adamw, build, sharded_adamw
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp_kernels import _ext, fully_shard

pytestmark = pytest.mark.skipif(_ext.cpu() is None, reason="the C++ kernels are not built")

STEPS, WORLD, VOCABULARY, CONTEXT, WIDTH = 10, 2, 32, 8, 16
MODES = [
    {"comm": "process_group"},
    {"comm": "shared_memory"},
    {"comm": "shared_memory", "strategy": "zero1"},
    {"comm": "process_group", "strategy": "replicate"},
]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, 2, WIDTH // 2)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind()
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer())
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight
        return F.linear(self.norm(self.layers(x)), self.tokens.weight)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(VOCABULARY, (2, CONTEXT + 1), generator=generator)
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def unsharded() -> Tensor:
    """Return each rank's losses, float64 [WORLD, STEPS]."""
    model = build(GPT)
    optimizer = adamw(model.parameters())
    losses = torch.zeros(WORLD, STEPS, dtype=torch.float64)
    for step in range(STEPS):
        for rank in range(WORLD):
            loss = loss_of(model, rank, step)
            (loss / WORLD).backward()
            losses[rank, step] = loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def sharded(rank: int, world: int) -> list[list[float]]:
    """Return this rank's losses in every mode, the second one run once more at the end."""
    found = []
    for mode in (*MODES, MODES[1]):
        model = fully_shard(build(GPT), units=Layer, **mode)
        optimizer = sharded_adamw(model.parameters(), max_grad_norm=1.0)
        losses = []
        for step in range(STEPS):
            loss = loss_of(model, rank, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    return found


def test_losses_agree_over_modes_and_are_identical_from_run_to_run() -> None:
    want = unsharded()
    found = torch.tensor(run_ranks(sharded, WORLD), dtype=torch.float64)
    for number, mode in enumerate(MODES):
        torch.testing.assert_close(found[:, number], want, rtol=1e-4, atol=0, msg=str(mode))
    assert torch.equal(found[:, 1], found[:, -1])
    assert (want[:, -1] != want[:, 0]).all()

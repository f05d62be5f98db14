# SPDX-License-Identifier: Apache-2.0
"""What `step.py` trains: a small transformer, and every way to train it as one side each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn import functional as F

import fsdp_kernels
from fsdp_kernels import _ext

VOCABULARY = 256
ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
MAX_NORM = 1.0


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, of one rank's batch, the dtype of computation, and where it happens.

    Attributes:
        max_norm: What gradients are clipped to; None: they are not.
    """

    dim: int
    layers: int
    batch: int
    sequence: int
    dtype: torch.dtype
    device: str = "cpu"
    max_norm: float | None = MAX_NORM


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.heads = max(dim // 64, 1)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class Transformer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.dim)
        self.places = nn.Parameter(0.02 * torch.randn(shape.sequence, shape.dim))
        self.blocks = nn.ModuleList(Block(shape.dim) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of guessing each token, [batch, sequence + 1], from those before it."""
        x = self.tokens(tokens[:, :-1]) + self.places
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return loss


def build(shape: Shape) -> Transformer:
    """Build the same model every time and on every rank."""
    torch.manual_seed(0)
    return Transformer(shape).to(shape.device)


def batch(shape: Shape, step: int, ranks: Iterable[int]) -> Tensor:
    """Make the tokens, [batch, sequence + 1], that some ranks see in one step."""
    parts = []
    for rank in ranks:
        generator = torch.Generator().manual_seed(1009 * step + rank)
        size = (shape.batch, shape.sequence + 1)
        parts.append(torch.randint(VOCABULARY, size, generator=generator))
    return torch.cat(parts).to(shape.device)


@dataclass
class Side:
    """One way to train: a model, its optimizer, and how gradients are clipped.

    Attributes:
        ranks: The ranks whose data this process feeds it, for the comparison of losses.
        autocast: Whether low precision comes from autocast, and not from a policy of the sharding.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable[[], Any] | None
    ranks: list[int]
    autocast: torch.dtype | None = None

    def step(self, tokens: Tensor) -> Tensor:
        """Take one training step and return the loss."""
        with torch.autocast(tokens.device.type, self.autocast, enabled=self.autocast is not None):
            loss = self.model(tokens)
        loss.backward()
        if self.clip is not None:
            self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        taken: Tensor = loss.detach()
        return taken


SHARED = "ours, shared memory"
OVERLAPPED = "ours, shared memory, overlapped"


def sides(
    shape: Shape, rank: int, world: int, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, Side]:
    """Make the sides that are wanted, all from the same initial weights."""
    low = None if shape.dtype == torch.float32 else shape.dtype
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low and torch.float32)
    every = list(range(world))
    name = "process_group" if shape.device == "cpu" else None
    ours = partial(_ours, shape, policy, rank)
    fsdp2 = partial(_fsdp2, shape, policy, rank, world)

    def ddp() -> nn.Module:
        return nn.parallel.DistributedDataParallel(build(shape))

    made: dict[str, Callable[[], Side]] = {
        "ours": lambda: ours(name, fused=True),
        "ours, torch AdamW": lambda: ours(name, fused=False),
        "FSDP2": lambda: fsdp2(foreach=True),
        "FSDP2, fused AdamW": lambda: fsdp2(fused=True),
        "DDP": lambda: _plain(shape, ddp(), [rank], low, foreach=True),
        "DDP, fused AdamW": lambda: _plain(shape, ddp(), [rank], low, fused=True),
        "unsharded": lambda: _plain(shape, build(shape), every, low, foreach=True),
        "unsharded, fused AdamW": lambda: _plain(shape, build(shape), every, low, fused=True),
    }
    if shape.device == "cpu" and _ext.cpu() is not None:
        made[SHARED] = lambda: ours("shared_memory", fused=True)
        if shape.max_norm is None:  # the norm is known after the last gradient only
            made[OVERLAPPED] = lambda: ours("shared_memory", fused=True, overlap=True)
    return {name: make() for name, make in made.items() if wanted(name)}


def _ours(
    shape: Shape,
    policy: MixedPrecisionPolicy,
    rank: int,
    comm: str | None,
    *,
    fused: bool,
    overlap: bool = False,
) -> Side:
    model: Any = fsdp_kernels.fully_shard(build(shape), units=Block, mp_policy=policy, comm=comm)
    if fused:
        options = {"max_grad_norm": shape.max_norm, "overlap_backward": overlap}
        ours = fsdp_kernels.ShardedAdamW(model.parameters(), **options, **ADAMW)
        return Side(model, ours, None, [rank])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True, **ADAMW)
    clip = None if shape.max_norm is None else partial(model.clip_grad_norm_, shape.max_norm)
    return Side(model, optimizer, clip, [rank])


def _fsdp2(shape: Shape, policy: MixedPrecisionPolicy, rank: int, world: int, **form: Any) -> Side:
    model = build(shape)
    mesh = init_device_mesh(shape.device, (world,))
    for block in model.blocks:
        torch_fully_shard(block, mesh=mesh, mp_policy=policy)
    torch_fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), **form, **ADAMW)
    return Side(model, optimizer, _clip(shape, model), [rank])


def _plain(
    shape: Shape, model: nn.Module, ranks: list[int], low: torch.dtype | None, **form: Any
) -> Side:
    optimizer = torch.optim.AdamW(model.parameters(), **form, **ADAMW)
    return Side(model, optimizer, _clip(shape, model), ranks, low)


def _clip(shape: Shape, model: nn.Module) -> Callable[[], Any] | None:
    norm = shape.max_norm
    return None if norm is None else lambda: nn.utils.clip_grad_norm_(model.parameters(), norm)


def mean(value: Tensor) -> float:
    """Average a number over the ranks."""
    total = value.double().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()

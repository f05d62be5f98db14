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
STRATEGIES = ("zero3", "zero2", "zero1", "replicate")


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, of one rank's batch, the dtype of computation, and where it happens.

    Attributes:
        max_norm: What gradients are clipped to; None: they are not.
        strategies: Those of ours that take part.
    """

    dim: int
    layers: int
    batch: int
    sequence: int
    dtype: torch.dtype
    device: str = "cpu"
    max_norm: float | None = MAX_NORM
    strategies: tuple[str, ...] = ("zero3",)


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
        loss = self.accumulate(tokens)
        self.finish()
        self.optimizer.zero_grad()
        return loss

    def accumulate(self, tokens: Tensor) -> Tensor:
        """Do the forward and the backward; return the loss."""
        with torch.autocast(tokens.device.type, self.autocast, enabled=self.autocast is not None):
            loss = self.model(tokens)
        loss.backward()
        taken: Tensor = loss.detach()
        return taken

    def finish(self) -> None:
        """Clip and step."""
        if self.clip is not None:
            self.clip()
        self.optimizer.step()


SHARED = "ours, shared memory"
OVERLAPPED = "ours, shared memory, overlapped"


def makers(shape: Shape, rank: int, world: int) -> dict[str, Callable[[], Side]]:
    """Return what makes each side, all from the same initial weights; ranks make them together."""
    low = None if shape.dtype == torch.float32 else shape.dtype
    every = list(range(world))
    fsdp2 = partial(_fsdp2, shape, _policy(shape), rank, world)

    def plain(*, fused: bool, ddp: bool) -> Side:
        model: nn.Module = build(shape)
        model = nn.parallel.DistributedDataParallel(model) if ddp else model
        form = {"fused": True} if fused else {"foreach": True}
        return _plain(shape, model, [rank] if ddp else every, low, **form)

    made: dict[str, Callable[[], Side]] = {}
    for strategy in shape.strategies:
        name = "ours" if strategy == "zero3" else f"ours, {strategy}"
        for words, comm in _backends(shape.device).items():
            made[name + words] = partial(_ours, shape, rank, comm, strategy)
    if SHARED in made and shape.max_norm is None:  # the norm is known after the last gradient only
        made[OVERLAPPED] = partial(_ours, shape, rank, "shared_memory", "zero3", overlap=True)
    default = next(iter(_backends(shape.device).values()))
    made |= {
        "ours, torch AdamW": partial(_ours, shape, rank, default, "zero3", fused=False),
        "FSDP2": partial(fsdp2, foreach=True),
        "FSDP2, fused AdamW": partial(fsdp2, fused=True),
        "DDP": partial(plain, fused=False, ddp=True),
        "DDP, fused AdamW": partial(plain, fused=True, ddp=True),
        "unsharded": partial(plain, fused=False, ddp=False),
        "unsharded, fused AdamW": partial(plain, fused=True, ddp=False),
    }
    return made


def sides(
    shape: Shape, rank: int, world: int, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, Side]:
    """Make the sides that are wanted."""
    return {name: make() for name, make in makers(shape, rank, world).items() if wanted(name)}


def _backends(device: str) -> dict[str, str | None]:
    """Name our backends, by what a side's name says of them; the first is the peers' own."""
    if device == "cuda":
        return {"": None, ", process group": "process_group"}
    shared = {", shared memory": "shared_memory"} if _ext.cpu() is not None else {}
    return {"": "process_group", **shared}


def _policy(shape: Shape) -> MixedPrecisionPolicy:
    low = None if shape.dtype == torch.float32 else shape.dtype
    return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low and torch.float32)


def _ours(
    shape: Shape,
    rank: int,
    comm: str | None,
    strategy: str,
    *,
    fused: bool = True,
    overlap: bool = False,
) -> Side:
    options: dict[str, Any] = {"mp_policy": _policy(shape), "comm": comm, "strategy": strategy}
    model: Any = fsdp_kernels.fully_shard(build(shape), units=Block, **options)
    if fused:
        tail = {"max_grad_norm": shape.max_norm, "overlap_backward": overlap}
        ours = fsdp_kernels.ShardedAdamW(model.parameters(), **tail, **ADAMW)
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

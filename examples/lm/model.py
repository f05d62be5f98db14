# SPDX-License-Identifier: Apache-2.0
"""Define the language model: a plain GPT over bytes, in plain PyTorch.

Nothing in this file knows that the model will be sharded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 256  # a token is a byte


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model. The default has 10.7 million parameters."""

    layers: int = 6
    heads: int = 6
    width: int = 384
    context: int = 128
    dropout: float = 0.0
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"model: expected a width that 2 x {self.heads} heads divide, got {self.width}. "
                "Change --width or --heads."
            )


class Attention(nn.Module):
    """Let every byte look at the bytes before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Attend.

        Args:
            x: [batch, time, width].
            rotation: [2, time, width / heads], the cosines and sines of the positions.

        Returns:
            [batch, time, width].
        """
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(
            rotate(q, rotation), rotate(k, rotation), v, dropout_p=dropout, is_causal=True
        )
        return cast(Tensor, self.out(y.transpose(1, 2).reshape(batch, time, width)))


class Block(nn.Module):
    """Mix over time, then over channels. The unit of sharding: gathered and freed together."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * config.width, config.width),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Map [batch, time, width] to the same shape."""
        x = x + self.dropout(self.attention(self.attention_norm(x), rotation))
        return cast(Tensor, x + self.dropout(self.mlp(self.mlp_norm(x))))


class GPT(nn.Module):
    """Predict the next byte. The output layer shares its weight with the embedding."""

    rotation: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer(
            "rotation", rotations(config.context, config.width // config.heads), persistent=False
        )
        self.initialise()

    def initialise(self) -> None:
        """Draw matrices that keep the variance, smaller ones where blocks add to the stream."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                into_residual = name.endswith(("out.weight", "mlp.2.weight"))
                depth = 2 * self.config.layers if into_residual else 1
                nn.init.normal_(parameter, std=1 / math.sqrt(self.config.width * depth))
        # Small: with a shared weight, each byte would else start out sure that it comes again.
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Compute the logits, or the loss where targets are given.

        Args:
            tokens: [batch, time] integers.
            targets: [batch, time] integers, the byte that follows each token.

        Returns:
            Without targets the logits [batch, time, 256]; with them the mean loss in nats, in fp32.
        """
        # The shared weight is as small as the output layer needs it.
        x = self.embedding(tokens) * math.sqrt(self.config.width)
        rotation = self.rotation[:, : tokens.shape[1]].to(x.dtype)
        for block in self.blocks:
            if self.config.activation_checkpointing and self.training:
                x = checkpoint(block, x, rotation, use_reentrant=False)
            else:
                x = block(x, rotation)
        logits = self.head(self.norm(x))
        if targets is None:
            return cast(Tensor, logits)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def rotations(context: int, head_width: int) -> Tensor:
    """Tabulate rotary position embeddings (arXiv:2104.09864): [2, context, head_width]."""
    frequency = 10000.0 ** (-torch.arange(0, head_width, 2) / head_width)
    angle = torch.outer(torch.arange(context), frequency).repeat(1, 2)
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn each pair of channels by its position's angle. x: [batch, heads, time, head_width]."""
    cos, sin = rotation.unbind()
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin

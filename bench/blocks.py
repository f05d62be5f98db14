# SPDX-License-Identifier: Apache-2.0
"""What `pack.py` and `norm.py` work on: gradients of a transformer's block, and their bucket."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SHARES = (3, 1, 4, 4)  # of a block's elements: qkv, out, up, down; vectors of a row between them
ALIGN = 64


@dataclass(frozen=True)
class Block:
    """A block's gradients, and where each goes in the bucket.

    Attributes:
        grads: Matrices, vectors, and one that backward did not reach.
        starts: The first element of each in the bucket.
        numel: The bucket's elements.
    """

    grads: list[Tensor | None]
    starts: list[int]
    numel: int

    @property
    def present(self) -> list[Tensor]:
        """The gradients that are there."""
        return [grad for grad in self.grads if grad is not None]

    def views(self, bucket: Tensor) -> list[Tensor]:
        """Show the places in a bucket of the gradients that are there."""
        return [
            bucket[start : start + grad.numel()].view(grad.shape)
            for grad, start in zip(self.grads, self.starts, strict=True)
            if grad is not None
        ]


def draw(numel: int, dtype: torch.dtype, device: str) -> Block:
    """Draw a block's gradients, of about so many elements."""
    dim = max(math.isqrt(numel // sum(SHARES)) // 8 * 8, 8)
    grads: list[Tensor | None] = []
    for share in SHARES:
        grads.append(torch.randn(dim, share * dim, device=device).to(dtype))
        grads.append(torch.randn(share * dim, device=device).to(dtype))
    grads.append(None)
    starts, end = [], 0
    for grad in grads:
        starts.append(end)
        end += -(-(dim if grad is None else grad.numel()) // ALIGN) * ALIGN
    return Block(grads, starts, end)

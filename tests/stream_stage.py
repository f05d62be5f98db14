# SPDX-License-Identifier: Apache-2.0
"""One rank of a training program on recorded streams, and its usual moves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from models import Block, Net, Turn, build, sharded_adamw
from streamed_comm import Cuda, backward
from torch import Tensor, nn
from torch.nn import functional as F
from watched_ops import WatchedOps

from fsdp_kernels import fully_shard
from fsdp_kernels.comm.base import Comm

Scenario = Callable[["Stage"], None]


class Stage:
    """One rank's streams and communicator, and the usual moves."""

    def __init__(self, rank: int, world: int, comm: Comm, cuda: Cuda) -> None:
        self.rank, self.world, self.comm, self.cuda = rank, world, comm, cuda
        self.exits = ExitStack()
        self.steps = 0
        self.model: Any = None
        self.optimizer: Any = None

    def shard(self, factory: Callable[[], nn.Module] = Net, **kwargs: Any) -> None:
        """Build, shard and get an optimizer that clips, or one that steps in backward."""
        overlap = kwargs.pop("overlap", False)
        self.model = build(factory, kwargs.pop("dtype", None))
        fully_shard(self.model, **{"units": Block, "comm": self.comm, **kwargs})
        runtime = self.model.units[0].runtime
        self.watched = WatchedOps(runtime, runtime.resources.streams.name)
        self.exits.enter_context(self.watched)
        for leaf in [leaf for bucket in runtime.buckets for leaf in bucket.leaves]:
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(self.cuda.note_leaf)
        options = {"overlap_backward": True} if overlap else {"max_grad_norm": 1.0}
        self.optimizer = sharded_adamw(self.model.parameters(), **options)

    def loss(self, *args: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        """Run a forward."""
        turn = Turn(self.rank, self.world, self.steps, dtype)
        output = self.model(turn.rand(4, 3), *args)
        return F.mse_loss(output, turn.rand(4, 5, salt=1))

    def forward_backward(self, *args: Any, **kwargs: Any) -> None:
        """Run a forward and a backward."""
        backward(self.loss(*args, **kwargs), self.cuda)

    def step(self) -> None:
        """Step and clear."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def train(self, steps: int = 3, **kwargs: Any) -> None:
        """Run some whole steps."""
        for _ in range(steps):
            self.forward_backward(**kwargs)
            self.step()

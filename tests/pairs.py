# SPDX-License-Identifier: Apache-2.0
"""A sharded model beside the unsharded one, for tests that drive both by hand, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import Net, Play, Turn, assert_grads, build, by_block, mse, turns
from torch import Tensor, nn

from fsdp_kernels import record_schedule


class Pair:
    """The two models on one rank.

    Attributes:
        both: The sharded model and the unsharded one.
        schedule: What the sharded model did in the last step played.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        factory: Callable[[], nn.Module] = Net,
        shard: Callable[[nn.Module], nn.Module] = by_block,
    ) -> None:
        self.rank, self.world = rank, world
        self.plain = build(factory, torch.float64)
        self.sharded = shard(build(factory, torch.float64))
        self.both = (self.sharded, self.plain)
        self.schedule: list[str] = []

    def play(self, step: int, play: Play = mse) -> int:
        """Play a rank's turn sharded and every rank's unsharded; return the reductions issued."""
        with record_schedule() as schedule:
            play(self.sharded, Turn(self.rank, self.world, step))
        self.schedule = [str(event) for event in schedule]
        self.play_plain(step, play)
        return sum(event.verb == "reduce" for event in schedule)

    def play_plain(self, step: int, play: Play = mse) -> None:
        for turn in turns(self.rank, self.world, step, torch.float64):
            play(self.plain, turn)

    def zero_grad(self, **kwargs: Any) -> None:
        for model in self.both:
            model.zero_grad(**kwargs)

    def check_grads(self, where: str) -> None:
        assert_grads(self.sharded, self.plain, where)


def no_sync(model: nn.Module, turn: Turn) -> Tensor:
    """Play a step whose gradients are not reduced yet."""
    with turn.no_sync(model):
        return mse(model, turn)

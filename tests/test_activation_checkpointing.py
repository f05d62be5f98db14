# SPDX-License-Identifier: Apache-2.0
"""Both kinds of `torch.utils.checkpoint` around and inside units: recomputed, and equal."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from harness import run_ranks
from models import (
    Block,
    Net,
    Scenario,
    Sided,
    Turn,
    assert_close,
    assert_grads,
    build,
    check,
    check_all,
    lopsided,
    mean_loss,
    mse,
    states,
    turns,
    varied,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdp_kernels import fully_shard


class Counted(Block):
    """Counts how often its inside runs, and checkpoints it when told to."""

    def __init__(self, dim: int = 7) -> None:
        super().__init__(dim)
        self.runs = 0
        self.inside: bool | None = None

    def body(self, x: Tensor) -> Tensor:
        self.runs += 1
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.inside is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.inside)


class Checkpointed(Net):
    """Checkpoints each block from outside (`around`), or has each do it within."""

    def __init__(self, around: bool, reentrant: bool, sequence: bool = False) -> None:
        super().__init__(block=Counted)
        self.around, self.reentrant, self.sequence = around, reentrant, sequence
        for block in self.blocks:
            block.inside = None if around else reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        if self.sequence:  # several units under one checkpoint
            x = checkpoint(nn.Sequential(*self.blocks), x, use_reentrant=self.reentrant)
        else:
            for block in self.blocks:
                if self.around:
                    x = checkpoint(block, x, use_reentrant=self.reentrant)
                else:
                    x = block(x)
        return self.head(x) + self.offset


def counted(model: nn.Module, turn: Turn) -> Tensor:
    """Play a step in which every block must run exactly twice."""
    for block in model.blocks:
        block.runs = 0
    loss = mse(model, turn)
    assert [block.runs for block in model.blocks] == [2, 2, 2], "nothing was recomputed"
    return loss


def checkpointed_equals_plain(rank: int, world: int, prefetch: int) -> None:
    """Checkpointed and sharded equals plain without either."""
    for kind in [(True, False), (False, False), (True, True), (False, True), (True, False, True)]:
        model = build(partial(Checkpointed, *kind), torch.float64)
        fully_shard(model, units=Counted, prefetch=prefetch)
        plain = build(Net, torch.float64)
        for step in range(3):
            loss = counted(model, Turn(rank, world, step))
            want = sum(mse(plain, turn) for turn in turns(rank, world, step, torch.float64))
            assert_close(mean_loss(loss), torch.as_tensor(want), f"{kind}: loss")
            assert_grads(model, plain, f"{kind}, step {step}")
            assert states(model) == {"SHARDED"}, kind
            model.zero_grad()
            plain.zero_grad()


@pytest.mark.parametrize("prefetch", [0, 1])
def test_checkpoint_around_and_inside_units(prefetch: int) -> None:
    run_ranks(checkpointed_equals_plain, 2, prefetch)


def whole_model_checkpointed(rank: int, world: int) -> None:
    """A checkpoint around the root, with training over several steps."""

    def play(model: nn.Module, turn: Turn) -> Tensor:
        x = turn.rand(4, 3).requires_grad_()
        out = checkpoint(model, x, use_reentrant=turn.step % 2 == 1)
        return turn.backward(F.mse_loss(out, turn.rand(4, 5, salt=1)))

    check(rank, world, Scenario(play=play, steps=4))


def test_checkpoint_around_the_root() -> None:
    run_ranks(whole_model_checkpointed, 2)


class Revisited(Net):
    """Visits blocks twice, each visit with a backward of its own: gradients come in two parts."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for index in (0, 1, 0, 2, 1):
            x = checkpoint(self.blocks[index], x, use_reentrant=True)
        return self.head(x)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_gradients_that_come_after_the_reduction(prefetch: int) -> None:
    shard = partial(fully_shard, units=Sided, prefetch=prefetch)
    base = Scenario(partial(Revisited, block=Sided), lopsided, steps=5, shard=shard)
    run_ranks(check_all, 3, base, varied(base, play=mse, steps=3))

# SPDX-License-Identifier: Apache-2.0
"""Seeded stress: random sequences of legal actions, compared with the unsharded model.

Long ones over one backend with real layers, to rounding; and a thousand short ones over all
backends, strategies and worlds, bit for bit (`exact_schedules.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from exact_schedules import play
from harness import run_ranks
from models import (
    Block,
    Net,
    Turn,
    adamw,
    assert_close,
    assert_grads,
    assert_params,
    build,
    sharded_adamw,
    states,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_kernels import _ext, fully_shard

ACTIONS = 40


class Session:
    """A sharded and an unsharded model that take the same actions, drawn alike on every rank.

    A loss that waits for its backward is kept on both sides; whatever would make plain torch refuse
    that backward (an edit, a step) drops the waiting ones first.
    """

    def __init__(self, rank: int, world: int, seed: int) -> None:
        self.rank, self.world = rank, world
        self.draw = random.Random(seed)
        self.where = "start"
        units: Any = self.draw.choice([Block, (Block, nn.Linear), nn.Linear, None])
        prefetch = self.draw.choice([0, 1, 2])
        self.sharded = fully_shard(self.make(), units=units, prefetch=prefetch)
        self.plain = self.make()
        clip = self.draw.choice([None, 0.5])
        self.ours = sharded_adamw(self.sharded.parameters(), max_grad_norm=clip)
        self.oracle = adamw(self.plain.parameters())
        self.clip = clip
        self.waiting: list[tuple[Tensor, list[Tensor]]] = []
        self.models: tuple[nn.Module, nn.Module] = (self.sharded, self.plain)

    @staticmethod
    def make() -> nn.Module:
        return build(partial(Net, depth=4), torch.float64)

    def run(self) -> None:
        weighted = {
            self.forward: 6, self.backward: 6, self.evaluate: 2, self.edit: 1, self.read: 2,
            self.step: 3, self.clear: 2, self.freeze: 1, self.by_hand: 1, self.drop: 1,
        }  # fmt: skip
        actions: list[Callable[[], None]] = list(weighted)
        for number in range(ACTIONS):
            (action,) = self.draw.choices(actions, list(weighted.values()))
            self.where += f"\n{number}: {action.__name__}"
            action()
        self.drop()
        self.read()
        assert_params(self.sharded, self.plain, self.where)

    def passes(self, number: int) -> tuple[Tensor, list[Tensor]]:
        """Run one forward on both sides: this rank's loss, and every rank's."""
        order = self.draw.choice([[0, 1, 2, 3], [3, 1], [0, 2, 0], [2]])
        kind = self.draw.choice(["plain", "plain", "checkpoint", "reentrant"])
        self.where += f" {order} {kind}"

        def loss(model: nn.Module, turn: Turn) -> Tensor:
            x = model.inp(turn.rand(3, 3))
            for index in order:
                if kind == "plain":
                    x = model.blocks[index](x)
                else:
                    x = checkpoint(model.blocks[index], x, use_reentrant=kind == "reentrant")
            return model.head(x).square().mean()

        mine = loss(self.sharded, Turn(self.rank, self.world, number))
        return mine, [loss(self.plain, Turn(r, self.world, number)) for r in range(self.world)]

    def forward(self) -> None:
        if len(self.waiting) < 3:
            self.waiting.append(self.passes(self.draw.randrange(1000)))

    def backward(self) -> None:
        if not self.waiting:
            self.forward()
        mine, theirs = self.waiting.pop(self.draw.randrange(len(self.waiting)))
        if not mine.requires_grad:
            return
        if self.draw.random() < 0.3:
            self.where += " no_sync"
            with self.sharded.no_sync():
                mine.backward()
        else:
            mine.backward()
        for loss in theirs:
            (loss / self.world).backward()
        assert states(self.sharded) == {"SHARDED"}, self.where

    def evaluate(self) -> None:
        mode = self.draw.choice([torch.no_grad, torch.inference_mode])
        x = Turn(0, self.world, self.draw.randrange(1000)).rand(2, 3)
        with mode():
            assert_close(self.sharded(x), self.plain(x), f"{self.where}: output")

    def edit(self) -> None:
        self.drop()
        name = self.draw.choice([name for name, _ in self.plain.named_parameters()])
        self.where += f" {name}"
        with torch.no_grad():
            for model in self.models:
                dict(model.named_parameters())[name].mul_(0.9).add_(0.01)

    def read(self) -> None:
        assert_grads(self.sharded, self.plain, self.where)

    def step(self) -> None:
        self.drop()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.plain.parameters(), self.clip)
        self.ours.step()
        self.oracle.step()
        assert_params(self.sharded, self.plain, self.where)
        self.clear()

    def clear(self) -> None:
        how = self.draw.choice(["optimizer", "model", "zeros"])
        self.where += f" {how}"
        if how == "optimizer":
            self.ours.zero_grad()
            self.oracle.zero_grad()
        else:
            for model in self.models:
                model.zero_grad(set_to_none=how == "model")

    def freeze(self) -> None:
        self.drop()
        name = self.draw.choice([name for name, _ in self.plain.named_parameters()])
        self.where += f" {name}"
        for model in self.models:
            p = dict(model.named_parameters())[name]
            p.requires_grad_(not p.requires_grad)

    def by_hand(self) -> None:
        self.sharded.unshard()
        if self.draw.random() < 0.5:
            self.sharded.reshard()

    def drop(self) -> None:
        self.waiting.clear()


def stress(rank: int, world: int, seeds: range) -> None:
    for seed in seeds:
        session = Session(rank, world, seed)
        try:
            session.run()
        except Exception as error:
            error.add_note(f"rank {rank}, seed {seed}, after\n{session.where}")
            raise


@pytest.mark.parametrize("world", [2, 3])
def test_random_sequences(world: int) -> None:
    run_ranks(stress, world, range(6 * world, 6 * world + 6))


@pytest.mark.skipif(_ext.cpu() is None, reason="the C++ kernels are not built")
@pytest.mark.parametrize(
    ("world", "rows", "schedules"), [(1, 1, 200), (2, 1, 550), (3, 1, 200), (4, 2, 50)]
)
def test_a_thousand_schedules_have_the_bits_of_the_oracle(
    world: int, rows: int, schedules: int
) -> None:
    run_ranks(play, world, rows, range(schedules), timeout=240)

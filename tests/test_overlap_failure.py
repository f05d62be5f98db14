# SPDX-License-Identifier: Apache-2.0
"""Steps in backward: ranks whose backwards fail at different places, or that step other buckets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import Net, Turn, adamw, assert_moments, assert_params, build, by_block, mse, turns
from torch import Tensor

from fsdp_kernels import ShardedAdamW, full_state_dict

Places = Sequence[int | None]
"""Where each rank's backward fails: before block so-and-so; None: nowhere by itself."""

FIRST, LAST = 4, -1
"""After the head, and when all gradients but the input layer's have come."""

ANYWHERE: list[Places] = [
    pair[:: (-1) ** number]
    for number, pair in enumerate(itertools.combinations([*range(FIRST, LAST - 1, -1), None], 2))
]
SOME: list[Places] = [(FIRST, None), (3, FIRST), (1, LAST), (None, 0), (None, LAST)]
OF_THREE: list[Places] = [(None, 3, None), (FIRST, 1, 3), (0, None, LAST), (2, 2, 1), (3, LAST, 3)]


class Fragile(Net):
    """One of its blocks is frozen: gathered in backward, and never reduced."""

    fails_at: int | None = None

    def __init__(self) -> None:
        super().__init__(depth=5)
        self.blocks[2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self._mark(self.inp(x), LAST)
        for number, block in enumerate(self.blocks):
            x = self._mark(block(x), number)
        return self.head(x)

    def _mark(self, x: Tensor, place: int) -> Tensor:
        if place == self.fails_at:
            x = x * 1.0
            x.register_hook(_fail)
        return x


def _fail(_: Tensor) -> None:
    raise ArithmeticError("told to fail")


class Training:
    """A model whose backward steps, beside the plain one."""

    def __init__(self, rank: int, world: int, comm: str, **shard: Any) -> None:
        self.turn = Turn(rank, world, 0)
        self.number = 0
        self.plain = build(Fragile, torch.float64)
        self.sharded = by_block(build(Fragile, torch.float64), comm=comm, **shard)
        self.optimizer: ShardedAdamW | None = None
        self.start()

    def start(self, *, overlap: bool = True, part: bool = False) -> None:
        """Let the old optimizer go, and start with another, of all parameters or of one block's."""
        self.optimizer = None
        params = (self.sharded.blocks[0] if part else self.sharded).parameters()
        self.optimizer = ShardedAdamW(params, lr=1e-2, weight_decay=0.1, overlap_backward=overlap)
        self.oracle = adamw(self.plain.parameters())

    def step(self, where: str) -> None:
        mse(self.sharded, self.turn)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.follow("", where)

    def fail(self, places: Places) -> None:
        """Fail, find the same units stepped on all ranks, and go on from there."""
        where = f"failed at {places}"
        own = self.sharded.fails_at = places[self.turn.rank]
        with pytest.raises((ArithmeticError, RuntimeError)) as raised:
            mse(self.sharded, self.turn)
        self.sharded.fails_at = None
        heard = r"expected every rank to go on .* on rank \d, at unit '.*'\. That rank's error says"
        if own is None:
            raised.match(heard)
        elif own == max(place for place in places if place is not None):
            raised.match("told to fail")  # the first of all
        else:
            raised.match(f"told to fail|{heard}")
        runtime = self.sharded.units[0].runtime
        runtime.recover()
        stepped = list(runtime.stepping.failed)
        self.number += 1
        self.come_together(self.number % 3, bool(stepped))
        if stepped:
            with pytest.raises(RuntimeError, match=f"had stepped {', '.join(stepped)}, and no"):
                mse(self.sharded, self.turn)
            self.optimizer.accept_failed_backward()
            self.follow(stepped, where)
        self.step(f"the step after one that {where}")

    def come_together(self, number: int, torn: bool) -> None:
        """Do something collective, the first thing after the failure."""
        model = self.sharded
        if number == 0:
            with pytest.raises(RuntimeError, match="whole steps") if torn else nullcontext():
                full_state_dict(model)
        elif number == 1:
            with model.full_params():
                pass
        else:
            model.unshard()
            model.reshard()

    def follow(self, stepped: Sequence[str], where: str) -> None:
        """Step these units of the plain model; "" is all of them."""
        for turn in turns(self.turn.rank, self.turn.world, 0, torch.float64):
            mse(self.plain, turn)
        for name, p in self.plain.named_parameters():
            if stepped and not any(name.startswith(f"{unit}.") for unit in stepped):
                p.grad = None
        self.oracle.step()
        self.oracle.zero_grad()
        assert_params(self.sharded, self.plain, where)
        assert_moments((self.sharded, self.optimizer), (self.plain, self.oracle), where)


def fail(rank: int, world: int, comm: str, prefetch: int, cases: Sequence[Places]) -> None:
    training = Training(rank, world, comm, prefetch=prefetch)
    training.step("first")
    training.step("second")
    for places in cases:
        training.fail(places)


def fail_first(rank: int, world: int, comm: str, prefetch: int, cases: Sequence[Places]) -> None:
    """Fail in the first backward, in which no order of reductions is known."""
    for places in cases:
        Training(rank, world, comm, prefetch=prefetch).fail(places)


@pytest.mark.parametrize(
    ("comm", "world", "prefetch", "cases"),
    [
        ("process_group", 2, 1, ANYWHERE),
        ("shared_memory", 2, 1, ANYWHERE),
        ("process_group", 3, 0, OF_THREE),
        ("shared_memory", 3, 2, OF_THREE),
    ],
)
def test_ranks_that_fail_at_different_places_go_on_together(
    comm: str, world: int, prefetch: int, cases: Sequence[Places]
) -> None:
    run_ranks(fail, world, comm, prefetch, cases)


@pytest.mark.parametrize("comm", ["process_group", "shared_memory"])
def test_they_do_so_in_the_first_backward(comm: str) -> None:
    run_ranks(fail_first, 2, comm, 1, SOME)


# -- ranks that step other buckets -----------------------------------------------------------------


def differ(rank: int, world: int, comm: str) -> None:
    training = Training(rank, world, comm)
    model, runtime = training.sharded, training.sharded.units[0].runtime

    def refused(here: str) -> None:
        with pytest.raises(RuntimeError, match=rf"step the same .* here: {here}\. Make") as raised:
            mse(model, training.turn)
        assert f"backward on rank {rank}" in str(raised.value)
        runtime.finish_failed()
        assert not runtime.stepping.failed

    everything = "root/0, blocks.0/0, .*"
    for number in range(2):  # in the first backward, and after others
        training.start(overlap=rank == 0)
        refused("none" if rank else everything)
        training.start(part=rank == 1)
        refused("blocks.0/0" if rank else everything)
        training.start()
        training.step(f"all step in backward {number}")
    # Where nobody has stepped in backward before, the ranks say so at the end of one.
    training.start(overlap=False)
    training.step("nobody steps in backward")
    training.start(overlap=rank == 1)
    refused(everything if rank else "none")
    training.start()
    for backward in ("does not", "does"):
        mse(model, training.turn)
        taken = any(bucket.grads.taken for unit in model.units for bucket in unit.buckets)
        assert taken == (backward == "does")
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.follow("", f"a backward that {backward} step")


@pytest.mark.parametrize("comm", ["process_group", "shared_memory"])
def test_ranks_that_step_other_buckets_in_backward_are_told(comm: str) -> None:
    run_ranks(differ, 2, comm)

# SPDX-License-Identifier: Apache-2.0
"""What becomes of gradients around a backward that raises."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from harness import run_ranks
from models import Net, Play, Turn, full_grads, mse, states
from pairs import Pair, no_sync
from torch import Tensor, nn


class Fragile(Net):
    """Fails in the backward of a block's input when told to; blocks after it are reduced."""

    fail_at = -1

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for number, block in enumerate(self.blocks):
            if number == self.fail_at:
                x = x * 1.0
                x.register_hook(raise_error)
            x = block(x)
        return self.head(x)


def raise_error(_: Tensor) -> None:
    raise ArithmeticError("told to fail")


@contextmanager
def told(expected: int) -> Iterator[None]:
    """Expect so many warnings about gradients that a failed backward dropped."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(w.message) for w in caught if "were dropped" in str(w.message)]
    assert len(messages) == expected, messages


def fail(model: nn.Module, turn: Turn, at: int = 0) -> None:
    """Fail with some reductions done and one under way, or (at 2) before the first."""
    model.fail_at = at
    with pytest.raises(ArithmeticError):
        mse(model, turn)
    model.fail_at = -1


def failed(rank: int, world: int) -> Pair:
    """Return a pair whose sharded model has just failed, with reductions under way."""
    pair = Pair(rank, world, Fragile)
    for step in range(2):
        mse(pair.sharded, Turn(rank, world, step))
        pair.sharded.zero_grad()
    fail(pair.sharded, Turn(rank, world, 2))
    return pair


def assigned(rank: int, world: int) -> None:
    """A gradient assigned next is not overwritten by what is still under way."""
    pair = failed(rank, world)
    for p in pair.sharded.parameters():
        p.grad = torch.ones_like(p)
    for name, grad in full_grads(pair.sharded).items():
        assert grad is not None, name
        assert torch.equal(grad, torch.ones_like(grad)), name
    for p in pair.plain.parameters():
        p.grad = torch.ones_like(p)
    pair.play(3)
    pair.check_grads("assigned, and a backward")


def test_a_gradient_assigned_after_a_failed_backward_stays() -> None:
    run_ranks(assigned, 2, timeout=20)


def micro_batches(rank: int, world: int, play: Play, at: int) -> None:
    """Units reduced so far differ by rank: earlier micro-batches are dropped, not in silence."""
    pair = failed(rank, world)
    with told(0):
        pair.sharded.zero_grad()  # nothing was there to lose but the backward's own
    for step in range(2):
        play(pair.sharded, Turn(rank, world, step))
        with told(1):
            fail(pair.sharded, Turn(rank, world, 2), at)
            assert all(p.grad is None for p in pair.sharded.parameters())
            assert states(pair.sharded) == {"SHARDED"}
        with told(0):
            fail(pair.sharded, Turn(rank, world, 3), at)
            pair.sharded.zero_grad()
            pair.play(4)
            pair.check_grads("the next step")
            pair.zero_grad()


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("play", [mse, no_sync])
def test_a_failed_backward_drops_earlier_micro_batches_and_says_so(play: Play, at: int) -> None:
    run_ranks(micro_batches, 2, play, at, timeout=20)


def told_as_an_error(rank: int, world: int) -> None:
    """The warning as an error is raised once, and the model is as usable as after a warning."""
    pair = Pair(rank, world, Fragile)
    mse(pair.sharded, Turn(rank, world, 0))
    fail(pair.sharded, Turn(rank, world, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="were dropped"):
            pair.sharded.zero_grad()
        pair.sharded.zero_grad()
        assert states(pair.sharded) == {"SHARDED"}
        pair.play(2)
        pair.check_grads("the next step")


def test_the_warning_as_an_error_is_raised_once() -> None:
    run_ranks(told_as_an_error, 2, timeout=20)


def two_graphs(rank: int, world: int) -> None:
    """A backward right after a failed one, of a graph made before: its gradients all count."""
    pair = Pair(rank, world, Fragile)
    turn = Turn(rank, world, 0)
    pair.sharded.fail_at = 1
    bad = pair.sharded(turn.rand(4, 3, salt=2)).sum()
    pair.sharded.fail_at = -1
    good = pair.sharded(turn.rand(4, 3)).square().mean()
    with pytest.raises(ArithmeticError):
        bad.backward()
    good.backward()
    pair.play_plain(0, lambda m, t: t.backward(m(t.rand(4, 3)).square().mean()))
    pair.check_grads("the second backward")
    assert states(pair.sharded) == {"SHARDED"}


def test_a_backward_that_follows_a_failed_one_counts() -> None:
    run_ranks(two_graphs, 2, timeout=20)

# SPDX-License-Identifier: Apache-2.0
"""The norm that a reduction over shared memory takes on its way: when it counts, and when not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from harness import run_ranks
from models import Block, Net, Turn, build, full_params, mse
from torch import nn

from fsdp_kernels import ShardedAdamW, _ext, fully_shard, ops

pytestmark = pytest.mark.skipif(_ext.cpu() is None, reason="the C++ kernels are not built")

UNITS = 4  # of Net: three blocks and the root


def plain(model: nn.Module, turn: Turn) -> None:
    mse(model, turn)


def accumulated(model: nn.Module, turn: Turn) -> None:
    mse(model, turn)
    mse(model, turn)


def left_over(model: nn.Module, turn: Turn) -> None:
    with turn.no_sync(model):
        mse(model, turn)
    mse(model, turn)


def shown(model: nn.Module, turn: Turn) -> None:
    """NumPy's writes count no version."""
    mse(model, turn)
    for p in model.parameters():
        p.grad.to_local().numpy()[...] *= 3.0


def edited(model: nn.Module, turn: Turn) -> None:
    mse(model, turn)
    for p in model.parameters():
        p.grad.mul_(2.0)


def dropped(model: nn.Module, turn: Turn) -> None:
    mse(model, turn)
    for unit in model.units:
        unit.buckets[0].params[0].grad = None


def onto_zeros(model: nn.Module, turn: Turn) -> None:
    mse(model, turn)
    model.zero_grad(set_to_none=False)
    mse(model, turn)


def twice_stepped(model: nn.Module, turn: Turn) -> None:
    """What was measured of gradients that nobody stepped with is of no other ones."""
    mse(model, turn)
    model.zero_grad()
    plain(model, turn)


PLAYS: list[tuple[Callable[[nn.Module, Turn], None], int]] = [
    (plain, UNITS),  # the first step: nobody has asked yet
    (plain, 0),
    (left_over, 0),
    (accumulated, UNITS),
    (plain, 0),
    (shown, UNITS),
    (plain, 0),
    (edited, UNITS),
    (dropped, UNITS),
    (onto_zeros, UNITS),
    (twice_stepped, UNITS),
    (plain, 0),
]
"""What is done to the gradients before a step, and how many norms the step then has to take."""


def compared(rank: int, world: int, dtype: torch.dtype) -> list[int]:
    """Beside the process group, whose sums of two ranks have the same bits, and are measured."""
    models = [
        fully_shard(build(Net, dtype), units=Block, comm=comm)
        for comm in ("shared_memory", "process_group")
    ]
    ours, theirs = (ShardedAdamW(m.parameters(), lr=1e-2, max_grad_norm=0.1) for m in models)
    counts = []
    for step, (play, _) in enumerate(PLAYS):
        turn = Turn(rank, world, step, dtype)
        for model in models:
            play(model, turn)
        with mock.patch.object(ops, "norm", wraps=ops.norm) as norm:
            ours.step()
        counts.append(norm.call_count)
        theirs.step()
        assert ours.grad_norm == theirs.grad_norm, step
        for model in models:
            model.zero_grad()
    for (name, got), want in zip(
        full_params(models[0]).items(), full_params(models[1]).values(), strict=True
    ):
        assert torch.equal(got, want), name
    return counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_measured_norm_is_that_of_the_gradients_that_are_stepped_with(dtype: torch.dtype) -> None:
    for counts in run_ranks(compared, 2, dtype):
        assert counts == [count for _, count in PLAYS]


def two_optimizers(rank: int, world: int) -> list[int]:
    """Each asks for fragments of its own: what was measured for one is not the other's."""
    model = fully_shard(build(Net), units=Block, comm="shared_memory")
    params = list(model.parameters())
    optimizers = [ShardedAdamW(params[i::2], lr=1e-2, max_grad_norm=0.1) for i in range(2)]
    other = fully_shard(build(Net), units=Block, comm="process_group")
    params = list(other.parameters())
    theirs: list[Any] = [ShardedAdamW(params[i::2], lr=1e-2, max_grad_norm=0.1) for i in range(2)]
    for step in range(3):
        for each in (model, other):
            mse(each, Turn(rank, world, step, torch.float32))
        for ours, reference in zip(optimizers, theirs, strict=True):
            ours.step()
            reference.step()
            assert ours.grad_norm == reference.grad_norm, step
        model.zero_grad()
        other.zero_grad()
    return []


def test_a_norm_is_of_one_optimizers_fragments() -> None:
    run_ranks(two_optimizers, 2)

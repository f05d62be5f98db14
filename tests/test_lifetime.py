# SPDX-License-Identifier: Apache-2.0
"""A model that nobody holds goes away, and an error on the way in leaves nothing behind."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from harness import run_ranks
from models import Net, Turn, assert_close, build, by_block, mse, sharded_adamw, states
from pairs import Pair, no_sync
from torch import nn


def only_sharded(model: nn.Module, turn: Turn) -> None:
    pass


def evaluated(model: nn.Module, turn: Turn) -> None:
    with torch.no_grad():
        model(turn.rand(2, 3))


def trained(model: nn.Module, turn: Turn) -> None:
    for make in (sharded_adamw, torch.optim.AdamW):
        optimizer = make(model.parameters())
        for _ in range(2):
            mse(model, turn)
            optimizer.step()
            optimizer.zero_grad()


def delayed(model: nn.Module, turn: Turn) -> None:
    no_sync(model, turn)


def dropped(model: nn.Module, turn: Turn) -> None:
    model(turn.rand(2, 3))


def failed(model: nn.Module, turn: Turn) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError("told to fail")

    x = turn.rand(2, 3).requires_grad_()
    x.register_hook(fail)
    with pytest.raises(ArithmeticError):
        model(x).sum().backward()


def collected(rank: int, world: int) -> None:
    for use in (only_sharded, evaluated, trained, delayed, dropped, failed):
        assert left(use, Turn(rank, world, 0)) == [], use.__name__


def left(use: Callable[[nn.Module, Turn], None], turn: Turn) -> list[str]:
    """Use a model, let go of it, and return what is still alive."""
    model = by_block(build(Net, torch.float64))
    use(model, turn)
    bucket = model.units[1].buckets[0]
    references = {
        "model": weakref.ref(model),
        "runtime": weakref.ref(bucket.runtime),
        "bucket": weakref.ref(bucket),
        "shard": weakref.ref(bucket.shard_master),
        "leaf": weakref.ref(bucket.leaves[0]),
    }
    del model, bucket
    gc.collect()
    return [name for name, reference in references.items() if reference() is not None]


def test_a_model_that_nobody_holds_is_collected() -> None:
    run_ranks(collected, 2)


def warned_on_entry(rank: int, world: int) -> None:
    """Warnings may be errors, as in many test suites: the forward has not begun then."""
    pair = Pair(rank, world)
    x = Turn(rank, world, 0).rand(2, 3)
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="expected no autocast"):
            pair.sharded(x)
    assert states(pair.sharded) == {"SHARDED"}
    with torch.no_grad():
        assert_close(pair.sharded(x), pair.plain(x), "output")
    assert states(pair.sharded) == {"SHARDED"}
    for step in range(2):
        pair.play(step)
        pair.check_grads(f"step {step}")
        assert states(pair.sharded) == {"SHARDED"}
        pair.zero_grad()


def test_a_warning_as_an_error_leaves_no_forward_open() -> None:
    run_ranks(warned_on_entry, 2, timeout=20)

# SPDX-License-Identifier: Apache-2.0
"""Ranks that call `fully_shard` with different arguments or models are told, at once and alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from harness import run_ranks
from models import Block, Net, Turn, build, mse
from pairs import Pair
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_kernels import MixedPrecisionPolicy, ProcessGroupComm, _ext, fully_shard
from fsdp_kernels.comm import pick

BACKENDS = [
    "process_group",
    pytest.param(
        "shared_memory",
        marks=pytest.mark.skipif(_ext.cpu() is None, reason="the C++ kernels are not built"),
    ),
]


def bf16(rank: int) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(**({"param_dtype": torch.bfloat16} if rank else {}))


ARGUMENTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "strategy": lambda rank: {"strategy": ("zero3", "zero1")[rank]},
    "mp_policy": lambda rank: {"mp_policy": bf16(rank)},
    "prefetch": lambda rank: {"prefetch": 1 + rank},
    "sync_module_states": lambda rank: {"sync_module_states": bool(rank)},
    "parameter .*, in unit": lambda rank: {"units": (Block, nn.Linear)[rank]},
    "mesh": lambda rank: {"mesh": init_device_mesh("cpu", (2,)) if rank else None},
}
MODELS: dict[str, Callable[[int], nn.Module]] = {
    "number of parameters": lambda rank: build(partial(Net, depth=2 + rank)),
    r"parameter 'inp\.weight' \(\d+, 3\)": lambda rank: build(partial(Net, dim=7 + rank)),
    r"parameter 'head\.weight' .*torch\.float": lambda rank: head(rank, dtype=True),
    r"parameter 'head\.weight' .*requires_grad=": lambda rank: head(rank, dtype=False),
}


def head(rank: int, *, dtype: bool) -> nn.Module:
    model = build(Net)
    if rank and dtype:
        model.head.to(torch.float64)
    elif rank:
        model.head.requires_grad_(False)
    return model


def told(rank: int, world: int, comm: str, kind: str) -> None:
    """Nothing has changed: what is called alike afterwards trains."""
    model = MODELS[kind](rank) if kind in MODELS else build(Net)
    arguments = ARGUMENTS[kind](rank) if kind in ARGUMENTS else {"units": Block}
    with pytest.raises(ValueError, match=f"expected the same call on every rank.*: {kind}"):
        fully_shard(model, comm=comm, **arguments)
    assert not hasattr(model, "units")
    pair = Pair(rank, world, shard=partial(fully_shard, units=Block, comm=comm))
    pair.play(0)
    pair.check_grads("after it")


@pytest.mark.parametrize("kind", [*ARGUMENTS, *MODELS])
@pytest.mark.parametrize("comm", BACKENDS)
def test_what_differs_is_named_on_every_rank(comm: str, kind: str) -> None:
    run_ranks(told, 2, comm, kind)


def different_backends(rank: int, world: int) -> None:
    model = build(Net)
    with pytest.raises(ValueError, match="expected the same comm on every rank, got 'process_grou"):
        fully_shard(model, units=Block, comm=("process_group", "shared_memory")[rank])
    with pytest.raises(ValueError, match="expected the same comm on every rank, got None on rank"):
        fully_shard(model, units=Block, comm=(None, "process_group")[rank])
    with pytest.raises(ValueError, match="expected the same mesh and strategy on every rank, got"):
        fully_shard(model, units=Block, strategy=("zero3", "replicate")[rank])
    fully_shard(model, units=Block)
    mse(model, Turn(rank, world, 0, torch.float32))


def test_different_backends_are_refused() -> None:
    run_ranks(different_backends, 2)


def other_picks(rank: int, world: int) -> str:
    """One host lacks what the others have, so all take what every host has."""
    lacking = pick.Choice("process_group", "the C++ module is not built", lacking=True)
    real = pick.choose
    with mock.patch.object(pick, "choose", (lambda *_: lacking) if rank else real):
        pair = Pair(rank, world, shard=partial(fully_shard, units=Block))
    pair.play(0)
    pair.check_grads("picked")
    return str(pair.sharded.units[0].buckets[0].comm.name)


def test_ranks_that_pick_differently_take_the_process_group() -> None:
    assert run_ranks(other_picks, 2) == ["process_group"] * 2


def of_their_own(rank: int, world: int) -> None:
    """A `Comm` that is passed has all ranks compared, too."""
    with pytest.raises(ValueError, match=r"expected the same call on every rank.*strategy 'zero"):
        fully_shard(build(Net), comm=ProcessGroupComm(), strategy=("zero3", "zero2")[rank])


def test_ranks_of_a_given_communicator_are_compared() -> None:
    run_ranks(of_their_own, 2)

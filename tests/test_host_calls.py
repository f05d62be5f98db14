# SPDX-License-Identifier: Apache-2.0
"""What the host does for each unit, counted in calls: no clock, so no noise."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks
from torch import nn

from fsdp_kernels import ShardedAdamW, fully_shard

PER_UNIT = {"forward": 190, "backward": 360, "step": 80, "torch step": 220, "zero_grad": 50}
PER_LAYER = {"forward": 44, "backward": 56}
"""At most: what it is now over two ranks, and some more."""


def count(work: Callable[[], Any]) -> int:
    """Count the Python and C functions that are called from Python."""
    calls = 0

    def note(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def counted(rank: int, world: int, units: int) -> dict[str, int]:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(units)])
    fully_shard(model, units=nn.Linear)
    ours = ShardedAdamW(model.parameters(), max_grad_norm=1.0)
    theirs = torch.optim.AdamW(model.parameters(), foreach=True)
    x = torch.randn(2, 4)
    found: dict[str, int] = {}
    for _ in range(3):
        losses: list[torch.Tensor] = []
        found["forward"] = count(lambda: losses.append(model(x).sum()))  # noqa: B023
        found["backward"] = count(losses[0].backward)
        found["step"] = count(ours.step)
        found["torch step"] = count(theirs.step)
        found["zero_grad"] = count(model.zero_grad)
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_calls_grow_with_units_and_no_faster(world: int) -> None:
    few, many = (run_ranks(counted, world, units)[0] for units in (8, 32))
    for part, calls in many.items():
        each = (calls - few[part]) / 24
        assert calls <= 4.5 * few[part], f"{part}: {few[part]} calls for 8 units, {calls} for 32"
        assert each <= PER_UNIT[part], f"{part}: {each} calls for each unit"


def counted_inside(rank: int, world: int, layers: int) -> dict[str, int]:
    """Count for one unit of several layers."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
    fully_shard(model)
    x = torch.randn(2, 4)
    found: dict[str, int] = {}
    for _ in range(3):
        losses: list[torch.Tensor] = []
        found["forward"] = count(lambda: losses.append(model(x).sum()))  # noqa: B023
        found["backward"] = count(losses[0].backward)
    return found


def test_a_layer_inside_a_unit_costs_little() -> None:
    few, many = (run_ranks(counted_inside, 2, layers)[0] for layers in (8, 32))
    for part, most in PER_LAYER.items():
        each = (many[part] - few[part]) / 24
        assert each <= most, f"{part}: {each} calls for each layer"

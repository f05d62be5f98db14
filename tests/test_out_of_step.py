# SPDX-License-Identifier: Apache-2.0
"""Ranks that fall out of step are told, instead of mixing each other's numbers."""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks
from models import Net, Turn, build, by_block


def disagree(rank: int, world: int) -> None:
    """Equal units in another order: without a check, ranks would mix their weights silently."""
    model = by_block(build(Net, torch.float64))

    def step() -> None:
        x = model.inp(Turn(rank, world, 0).rand(2, 3))
        for index in (0, 1, 2) if rank == 0 else (1, 0, 2):
            x = model.blocks[index](x)
        model.head(x).sum().backward()

    with pytest.raises(RuntimeError, match="rank"):
        step()


def test_ranks_that_call_units_in_another_order_are_told() -> None:
    run_ranks(disagree, 2)

# SPDX-License-Identifier: Apache-2.0
"""What each strategy keeps whole on every rank, beyond what it shards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Strategy:
    """One value of `fully_shard(strategy=...)`.

    Attributes:
        name: What the user writes.
        keeps_params: Whether full parameters stay from their gather until a step or an edit makes
            them stale, so that a step gathers once whatever the number of forwards.
        defers_grads: Whether backwards accumulate on each rank alone, as under `no_sync`, and the
            step reduces.
        replicates: Whether nothing is sharded: every rank is a shard group of its own.
    """

    name: str
    keeps_params: bool = False
    defers_grads: bool = False
    replicates: bool = False


ZERO3 = Strategy("zero3")

STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        ZERO3,
        Strategy("zero2", keeps_params=True),
        Strategy("zero1", keeps_params=True, defers_grads=True),
        Strategy("replicate", keeps_params=True, replicates=True),
    )
}

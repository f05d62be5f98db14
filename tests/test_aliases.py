# SPDX-License-Identifier: Apache-2.0
"""Memory that somebody still holds when its unit is freed is left to him, and not reused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import Block, Net, Scenario, Turn, build, by_block, check, mse, sharded_adamw
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp_kernels import fully_shard
from fsdp_kernels.pool import Pool, Slot
from fsdp_kernels.streams import HostStreams


def warned(run: Callable[[], Any]) -> list[str]:
    """Run, and return the warnings about views that outlive their unit."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if "expected nobody to hold" in str(w.message)]


class HooksInside(Block):
    """Saves its tensors under hooks of its own, so that ours never see the weights."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            # Not by calling the layers: their own calls put our hooks innermost again.
            hidden = F.gelu(F.linear(self.norm(x), self.up.weight, self.up.bias))
            return x + F.linear(hidden, self.down.weight, self.down.bias)


def hooks_inside(rank: int, world: int, prefetch: int, comm: str | None) -> None:
    shard = partial(fully_shard, units=HooksInside, prefetch=prefetch, comm=comm)
    scenario = Scenario(partial(Net, block=HooksInside), shard=shard, steps=3)
    told = warned(lambda: check(rank, world, scenario))
    if comm is None and shard(scenario.build()).units[0].is_placed():
        assert not told, "units stay full, at one place, until backward has used the views"
        return
    assert len(told) == 1, told
    assert "bucket 'blocks." in told[0]


@pytest.mark.parametrize("comm", ["process_group", None])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_identity_hooks_inside_a_unit(prefetch: int, comm: str | None) -> None:
    run_ranks(hooks_inside, 2, prefetch, comm)


class Stashing(Block):
    """Keeps a view of a weight beyond its forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.stash = self.up.weight[1:3].detach()
        return super().forward(x)


def stashed(rank: int, world: int) -> None:
    model, plain = (build(partial(Net, block=Stashing), torch.float64) for _ in range(2))
    fully_shard(model, units=Stashing)
    x = torch.ones(2, 3, dtype=torch.float64)

    def look() -> None:
        for grad in (False, True, False) * 2:
            with torch.set_grad_enabled(grad):
                model(x)
                plain(x)
            for number, (ours, theirs) in enumerate(zip(model.blocks, plain.blocks, strict=True)):
                assert torch.equal(ours.stash, theirs.stash), f"block {number}, grad {grad}"

    told = warned(look)
    assert len(told) == 1, told
    shard = partial(fully_shard, units=Stashing)
    scenario = Scenario(partial(Net, block=Stashing), shard=shard, steps=2)
    warned(lambda: check(rank, world, scenario))


def test_a_view_that_a_module_keeps_stays_valid() -> None:
    run_ranks(stashed, 2)


class Exposing(nn.Module):
    """Returns a view of the root's own weight, as large as the units' weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x @ self.weight
        for layer in self.layers:
            x = layer(x)
        return x, self.weight.t()


def exposed(rank: int, world: int) -> None:
    model, plain = build(Exposing), build(Exposing)
    fully_shard(model, units=nn.Linear)
    x = torch.ones(2, 8)

    kept = []
    for _ in range(3):
        out, weight = model(x)
        kept.append(weight)
        out.sum().backward()
        with torch.no_grad():
            for layer in model.layers:
                layer(x)
        for weight in kept:
            assert torch.equal(weight, plain.weight.t())


def test_an_output_that_aliases_the_roots_weight_stays_valid() -> None:
    run_ranks(exposed, 2)


def evaluate(model: nn.Module, times: int) -> None:
    with torch.no_grad():
        for _ in range(times):
            model(torch.ones(2, 3, dtype=torch.float64))


def told_as_errors(rank: int, world: int) -> None:
    """The warning raised as an error leaves nothing behind: the next steps are right."""

    def shard(model: nn.Module) -> nn.Module:
        fully_shard(model, units=Stashing)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="expected nobody to hold"):
                evaluate(model, times=20)
        assert {unit.state for unit in model.units} == {"SHARDED"}
        return model

    check(rank, world, Scenario(partial(Net, block=Stashing), shard=shard, steps=2))


def test_the_warning_as_an_error_leaves_units_sharded() -> None:
    run_ranks(told_as_errors, 2)


def accumulated(model: nn.Module, turn: Turn) -> Tensor:
    with turn.no_sync(model):
        first = mse(model, turn)
    return first + mse(model, turn)


def quiet(rank: int, world: int) -> None:
    """No collective counts as a holder once it was waited for: no warning, and no further slot."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for prefetch in (0, 2):
            model = by_block(build(Net, torch.float64), prefetch=prefetch, comm="process_group")
            optimizer = sharded_adamw(model.parameters())
            resources = model.units[0].buckets[0].resources
            held: list[tuple[int, int]] = []
            for step in range(12):
                (accumulated if step % 3 else mse)(model, Turn(rank, world, step))
                optimizer.step()
                optimizer.zero_grad()
                held.append((resources.params.allocated_bytes, resources.grads.allocated_bytes))
            assert held[2:] == held[2:3] * 10, f"slots are not taken back: {held}"


@pytest.mark.parametrize("world", [2, 3])
def test_normal_training_never_warns(world: int) -> None:
    run_ranks(quiet, world)


def _allocate(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def aliased(pool: Pool, owner: str) -> tuple[Slot, Tensor]:
    """Take a slot, keep a view of it, and give it back."""
    slot = pool.take(owner, 64)
    alias = slot.view(16, torch.float32)[2:4].fill_(7.0)
    pool.give_back(slot)
    return slot, alias


def test_a_slot_is_reused_as_soon_as_nobody_holds_it() -> None:
    pool = Pool(_allocate, HostStreams())
    slot, alias = aliased(pool, "a")
    other = pool.take("b", 64)
    assert other is not slot
    del alias
    assert pool.take("c", 64) is slot
    assert pool.allocated_bytes == 128


def test_a_slot_that_is_held_for_long_is_let_go() -> None:
    pool = Pool(_allocate, HostStreams())
    slot, alias = aliased(pool, "a")
    with pytest.warns(UserWarning, match="bucket 'a': expected nobody to hold"):
        taken = [pool.take("b", 64) for _ in range(40)]
    assert slot not in taken
    for other in taken:
        other.view(16, torch.float32).fill_(1.0)
    assert alias.tolist() == [7.0, 7.0]
    assert pool.allocated_bytes == 40 * 64
    del alias
    assert pool.take("c", 64) is not slot


def test_a_held_slot_is_an_error_where_all_ranks_must_use_the_same() -> None:
    reasons: list[str] = []
    pool = Pool(_allocate, HostStreams(), symmetric=True, abort=reasons.append)
    message = r"bucket 'a': expected nobody to hold .* keep a copy instead, or use NcclOptions"
    with pytest.raises(RuntimeError, match=message) as info:
        aliased(pool, "a")
    assert reasons == [str(info.value)]
    assert pool.allocated_bytes == 0
    slot = pool.take("b", 64)  # and the pool still works
    pool.give_back(slot)
    assert pool.take("c", 64) is slot

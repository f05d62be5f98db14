# SPDX-License-Identifier: Apache-2.0
"""Same losses, gradients, parameters and moments as the unsharded model, at every step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import (
    Net,
    Routed,
    Scenario,
    Turn,
    adamw,
    assert_close,
    assert_params,
    build,
    by_block,
    check,
    check_all,
    full,
    full_params,
    mse,
    sharded_adamw,
    turns,
    varied,
)
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp_kernels import ShardedAdam, ShardedAdamW, fully_shard

WORLDS = [1, 2, 3, 4]


@pytest.mark.parametrize("world", WORLDS)
def test_training_equals_the_unsharded_model(world: int) -> None:
    float64 = Scenario()
    float32 = Scenario(dtype=torch.float32, fed=True)
    run_ranks(check_all, world, float64, float32, varied(float64, shard=fully_shard, steps=3))


# 1. The divisor and no_sync.


def accumulate(delayed: tuple[bool, ...], model: nn.Module, turn: Turn) -> Tensor:
    """Play several micro-batches, those marked under no_sync."""
    losses = []
    for number, delay in enumerate(delayed):
        x, y = turn.rand(4, 3, salt=2 * number), turn.rand(4, 5, salt=2 * number + 1)
        if delay:
            with turn.no_sync(model):
                losses.append(turn.backward(F.mse_loss(model(x), y)))
        else:
            losses.append(turn.backward(F.mse_loss(model(x), y)))
    return torch.stack(losses).sum()


@pytest.mark.parametrize("world", WORLDS)
def test_no_sync_on_any_subset_of_micro_batches(world: int) -> None:
    subsets = [(*(bool(bits >> i & 1) for i in range(2)), False) for bits in range(4)]
    scenarios = [Scenario(play=partial(accumulate, subset), steps=2) for subset in subsets]
    run_ranks(check_all, world, *scenarios, varied(scenarios[3], steps=5))


def left_over(rank: int, world: int) -> None:
    """Delay the last micro-batch too: a step takes what is there, and nothing is lost."""
    for delayed in ((False, True), (True, True)):
        model, plain = by_block(build(Net, torch.float64)), build(Net, torch.float64)
        ours, oracle = sharded_adamw(model.parameters()), adamw(plain.parameters())
        for step in range(3):
            accumulate(delayed, model, Turn(rank, world, step))
            for turn in turns(rank, world, step, torch.float64):
                accumulate(delayed, plain, turn)
            for optimizer in (ours, oracle):
                optimizer.step()
                optimizer.zero_grad()
            assert_params(model, plain, f"delayed {delayed}, step {step}")


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_takes_what_no_sync_left(world: int) -> None:
    run_ranks(left_over, world)


def flagged(model: nn.Module, turn: Turn) -> Tensor:
    """Play two micro-batches with the switch form of no_sync."""
    if turn.sharded:
        model.set_requires_gradient_sync(False)
    first = mse(model, turn)
    if turn.sharded:
        model.set_requires_gradient_sync(True)
    return first + turn.backward(model(turn.rand(3, 3, salt=7)).square().mean())


def read_between(model: nn.Module, turn: Turn) -> Tensor:
    """Read a gradient between two backwards: the divisor is applied there, and only once."""
    first = mse(model, turn)
    assert model.inp.weight.grad is not None
    return first + turn.backward(model(turn.rand(3, 3, salt=7)).square().mean())


def test_reading_a_gradient_between_backwards() -> None:
    run_ranks(check, 3, Scenario(play=read_between))


def test_set_requires_gradient_sync() -> None:
    run_ranks(check, 3, Scenario(play=flagged))


def drop_pending(rank: int, world: int) -> None:
    model = by_block(build(Net, torch.float64))
    optimizer = sharded_adamw(model.parameters())
    turn = Turn(rank, world, 0)
    for clear in (optimizer.zero_grad, model.zero_grad, lambda: clear_by_hand(model)):
        mse(model, turn)
        expected = full(model.inp.weight.grad)
        clear()
        assert model.inp.weight.grad is None
        with model.no_sync():
            mse(model, Turn(rank, world, 1))
        clear()
        mse(model, turn)
        assert torch.equal(full(model.inp.weight.grad), expected)
        clear()


def clear_by_hand(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


def test_every_way_of_clearing_gradients_drops_what_no_sync_delayed() -> None:
    run_ranks(drop_pending, 2)


# 2. None stays None.


def routed(model: nn.Module, turn: Turn) -> Tensor:
    """Take route 0 in step 0; later rank 0 alone takes another; nobody ever takes the last."""
    route = [0, 1, 1, 0, 1, 0][turn.step] if turn.rank == 0 else 0
    loss = F.mse_loss(model(turn.rand(4, 3), route), turn.rand(4, 5, salt=1))
    return turn.backward(loss)


def unused_keeps_its_bytes(rank: int, world: int) -> None:
    model = fully_shard(build(Routed, torch.float64))
    optimizer = sharded_adamw(model.parameters())
    before = full_params(model)
    for step in range(3):
        route = 0 if step < 2 else 1
        turn = Turn(rank, world, step)
        turn.backward(model(turn.rand(4, 3), route).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    after = full_params(model)
    for name in ("branches.2.weight", "branches.2.bias"):
        assert torch.equal(before[name], after[name])
    state = {name: optimizer.state.get(p, {}) for name, p in model.named_parameters()}
    counts = {name: float(s.get("step", 0)) for name, s in state.items() if "branches" in name}
    assert counts == {
        "branches.0.weight": 2,
        "branches.0.bias": 2,
        "branches.1.weight": 1,
        "branches.1.bias": 1,
        "branches.2.weight": 0,
        "branches.2.bias": 0,
    }
    kept = {name: bytes_of(model, optimizer, name) for name in counts if ".0." not in name}
    turn = Turn(rank, world, 3)
    turn.backward(model(turn.rand(4, 3), 0).square().mean())
    optimizer.step()
    assert {name: bytes_of(model, optimizer, name) for name in kept} == kept


def bytes_of(model: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> list[list[float]]:
    """Give a parameter's and its moments' elements on this rank."""
    p = model.get_parameter(name)
    state = optimizer.state.get(p, {})
    tensors = [p, *(state[key] for key in ("exp_avg", "exp_avg_sq") if key in state)]
    return [tensor.to_local().tolist() for tensor in tensors]


@pytest.mark.parametrize("world", WORLDS)
def test_unused_parameters_stay_none_and_partly_used_ones_get_zeros(world: int) -> None:
    scenario = Scenario(build=Routed, play=routed, shard=fully_shard, steps=6)
    fed = varied(scenario, dtype=torch.float32, fed=True)
    run_ranks(check_all, world, scenario, fed)


def test_a_never_used_parameter_keeps_bytes_moments_and_step_count() -> None:
    run_ranks(unused_keeps_its_bytes, 2)


def dropped(model: nn.Module, turn: Turn) -> Tensor:
    """Drop single gradients by hand: they must count for nothing, the norm included."""
    loss = mse(model, turn)
    if turn.rank == turn.world - 1 or turn.sharded:  # the oracle's last turn
        model.blocks[0].up.weight.grad = None
        model.head.weight.grad = None
    return loss


def clipping(params: Any) -> torch.optim.Optimizer:
    """Make AdamW that clips as `max_grad_norm` does."""
    optimizer = adamw(params)

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.05)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def clipped_by_hand(rank: int, world: int) -> None:
    """Compare parameters only: our clipping leaves the gradients that the user sees alone."""
    model, plain = by_block(build(Net, torch.float64)), build(Net, torch.float64)
    ours, oracle = (
        sharded_adamw(model.parameters(), max_grad_norm=0.05),
        clipping(plain.parameters()),
    )
    for step in range(4):
        for turn in turns(rank, world, step, torch.float64):
            dropped(plain, turn)
        dropped(model, Turn(rank, world, step))
        for optimizer in (ours, oracle):
            optimizer.step()
            optimizer.zero_grad()
        assert_params(model, plain, f"step {step}")


def test_a_gradient_that_the_user_drops_counts_for_nothing() -> None:
    run_ranks(check, 2, Scenario(play=dropped))
    run_ranks(clipped_by_hand, 2)


# 3. Adam is torch's Adam, per parameter.


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Split parameters into groups that share units and differ in every hyperparameter."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if n.endswith("bias")], "lr": 3e-2, "weight_decay": 0.0},
        {"params": [p for n, p in named if "up.weight" in n], "betas": (0.7, 0.9), "eps": 1e-3},
        {"params": [p for n, p in named if n.endswith("weight") and "up" not in n]},
    ]


ADAMS = {
    "adamw": (ShardedAdamW, torch.optim.AdamW, {"weight_decay": 0.2}),
    "adam": (ShardedAdam, torch.optim.Adam, {"weight_decay": 0.05}),
    "amsgrad": (ShardedAdamW, torch.optim.AdamW, {"amsgrad": True, "betas": (0.5, 0.6)}),
    "maximize": (ShardedAdamW, torch.optim.AdamW, {"maximize": True}),
    "adam-amsgrad-maximize": (ShardedAdam, torch.optim.Adam, {"amsgrad": True, "maximize": True}),
}


@pytest.mark.parametrize("world", WORLDS)
def test_adam_with_several_groups(world: int) -> None:
    scenarios = []
    for ours, torchs, options in ADAMS.values():
        base = Scenario(
            optimizer=partial(ours, lr=1e-2, **options),
            oracle=partial(torchs, lr=1e-2, **options),
            params=groups,
            steps=5 if ours is ShardedAdamW and not scenarios else 3,
        )
        scenarios.append(base)
    run_ranks(check_all, world, *scenarios, varied(scenarios[0], dtype=torch.float32, fed=True))


def only_step_counts(rank: int, world: int) -> None:
    model = by_block(build(Net, torch.float64))
    optimizer = sharded_adamw(model.parameters())
    p = model.blocks[0].up.weight
    for step in range(3):
        mse(model, Turn(rank, world, step))
        with torch.no_grad():
            model(torch.ones(2, 3, dtype=torch.float64))
        optimizer.zero_grad()
        optimizer.zero_grad(set_to_none=False)
    assert float(optimizer.state.get(p, {}).get("step", 0)) == 0
    mse(model, Turn(rank, world, 3))
    optimizer.step()
    assert float(optimizer.state[p]["step"]) == 1
    _ = optimizer.state[p]["exp_avg"], optimizer.state_dict()
    assert float(optimizer.state[p]["step"]) == 1


def test_nothing_but_step_advances_a_step() -> None:
    run_ranks(only_step_counts, 2)


def scheduled(rank: int, world: int) -> None:
    """Train with a scheduler, clipping inside the step and a closure."""
    model, plain = by_block(build(Net, torch.float64)), build(Net, torch.float64)
    ours = sharded_adamw(model.parameters(), max_grad_norm=0.05)
    oracle = adamw(plain.parameters())
    curves = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (ours, oracle)]
    for step in range(5):
        ours.zero_grad()
        oracle.zero_grad()
        for other in range(world):
            mse(plain, Turn(other, world, step, scale=1 / world, sharded=False))
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        ours.step(lambda step=step: mse(model, Turn(rank, world, step)))
        oracle.step()
        assert_close(torch.as_tensor(ours.grad_norm), norm, "grad_norm")
        want = full_params(plain)
        for name, value in full_params(model).items():
            assert_close(value, want[name], f"step {step}: {name}")
        for curve in curves:
            curve.step()


def test_scheduler_clipping_and_closure() -> None:
    run_ranks(scheduled, 3)

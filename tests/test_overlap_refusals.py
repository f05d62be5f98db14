# SPDX-License-Identifier: Apache-2.0
"""Steps in backward: what is refused, what a failed backward leaves, what a rank holds."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import Block, Net, Turn, build, full_params, mse
from test_overlap import Recomputing
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from fsdp_kernels import ShardedAdamW, checkpoint, full_state_dict, fully_shard
from fsdp_kernels.trace import record_schedule


def start(
    factory: Callable[[], nn.Module] = Net, comm: str = "process_group", **options: Any
) -> tuple[Any, ShardedAdamW]:
    model = fully_shard(build(factory, torch.float32), units=Block, comm=comm)
    optimizer = ShardedAdamW(model.parameters(), lr=1e-2, overlap_backward=True, **options)
    return model, optimizer


def play(model: nn.Module, step: int = 0) -> None:
    mse(model, Turn(0, 1, step, torch.float32))


def raises(error: type[Exception], match: str, call: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(error, match=match):
        call(*args)


def refusals(rank: int, world: int) -> None:
    model, optimizer = start()
    play(model)
    weight = model.blocks[1].up.weight
    taken = r"bucket 'blocks.1/0': expected step\(\) after backward, got a look"
    raises(RuntimeError, taken, lambda: weight.grad)
    raises(RuntimeError, r"expected step\(\) after", model.clip_grad_norm_, 1.0)
    for drop in (optimizer.zero_grad, model.zero_grad):
        raises(RuntimeError, r"expected step\(\) after", drop)
    raises(RuntimeError, taken, setattr, weight, "grad", None)
    raises(RuntimeError, r"expected optimizer.step\(\) after the last", play, model)
    want = full_params(model)
    raises(ValueError, "expected no closure", optimizer.step, lambda: 0.0)
    optimizer.step()
    assert weight.grad is None
    model.zero_grad()
    optimizer.zero_grad()
    optimizer.step()  # nothing to do
    for name, value in full_params(model).items():
        assert torch.equal(value, want[name]), f"{name}: step() stepped once more"
    assert optimizer.state[weight]["step"] == 1

    loss = model(torch.ones(2, 3)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    raises(RuntimeError, "expected it unchanged between forward and backward", loss.backward)
    with model.no_sync():
        raises(
            RuntimeError, r"expected a backward that reduces.*got one under no_sync", play, model
        )
    optimizer.max_grad_norm = 1.0
    raises(ValueError, "expected no clipping", play, model)
    raises(ValueError, "expected no clipping", optimizer.step)
    optimizer.max_grad_norm = None

    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    raises(RuntimeError, r"expected step\(\) after backward", scaler.step, optimizer)
    optimizer.grad_scale = torch.tensor(4.0)
    raises(RuntimeError, "expected no GradScaler", optimizer.step)


def test_what_needs_all_gradients_is_refused() -> None:
    run_ranks(refusals, 2)


class Twice(Recomputing):
    """Block 1's first gradient comes from the outer backward, another from an inner one."""

    def __init__(self) -> None:
        super().__init__(reentrant=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.inp(x))
        x = recompute(self.blocks[1], x, use_reentrant=True)
        for index in (2, 0, 1):
            x = self.blocks[index](x)
        return self.head(self.blocks[2](x))


def late(rank: int, world: int) -> None:
    model, optimizer = start(Twice)
    for _ in range(3):
        raises(RuntimeError, "unit 'blocks.1': expected no .* after its step", play, model)
        raises(RuntimeError, "had stepped blocks.1, and no other unit", play, model)
        optimizer.accept_failed_backward()


def test_a_gradient_after_the_step_is_an_error() -> None:
    run_ranks(late, 2)


# -- whose optimizer it is -------------------------------------------------------------------------


def dropped(rank: int, world: int) -> None:
    """A dropped optimizer steps no more; one made before sharding steps, too."""
    model = build(Net, torch.float32)
    optimizer = ShardedAdamW(model.parameters(), overlap_backward=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    fully_shard(model, units=Block, comm="process_group")
    before = full_params(model)
    play(model)
    after = full_params(model)
    assert not any(torch.equal(after[name], before[name]) for name in before)
    optimizer.step()
    scheduler.step()
    gc.collect()
    gc.disable()  # whose help must not be needed
    del optimizer, scheduler
    play(model, 1)
    for name, value in full_params(model).items():
        assert torch.equal(value, after[name]), f"{name} was stepped by a dropped optimizer"
    assert model.head.weight.grad is not None


def test_a_dropped_optimizer_steps_no_more() -> None:
    run_ranks(dropped, 2)


# -- a backward that fails half-way ----------------------------------------------------------------


class Failing(Net):
    fail = False

    def __init__(self) -> None:
        super().__init__(depth=5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for number, block in enumerate(self.blocks):
            if number == 1 and self.fail:
                x = x * 1.0
                x.register_hook(_fail)
            x = block(x)
        return self.head(x)


def _fail(_: Tensor) -> None:
    raise ArithmeticError("told to fail")


def fail(model: Any, optimizer: ShardedAdamW) -> None:
    model.fail = True
    raises(ArithmeticError, "told to fail", play, model)
    model.fail = False


def failures(rank: int, world: int, comm: str, folder: Path) -> None:
    model, optimizer = start(Failing, comm)
    for step in range(2):
        play(model, step)
        optimizer.step()
    checkpoint.save(folder / comm, model, optimizer)
    play(model, 2)
    optimizer.step()
    want = full_params(model)
    half = "had stepped blocks.4, blocks.3, and no other unit, when it failed. Load a checkpoint"
    for recovery in ("load", "accept", "load"):
        fail(model, optimizer)
        raises(RuntimeError, f"forward: expected whole steps.*{half}", play, model)
        raises(RuntimeError, f"step: expected whole steps.*{half}", optimizer.step)
        optimizer.zero_grad()  # of what is not there
        if recovery == "accept":
            optimizer.accept_failed_backward()
            counts = [float(optimizer.state[b.up.bias]["step"]) for b in model.blocks]
            assert counts == [3, 3, 3, 4, 4]
        else:
            checkpoint.load(folder / comm, model, optimizer)
            assert optimizer.state[model.head.weight]["step"] == 2
        play(model, 2)
        optimizer.step()
        if recovery == "load":
            for name, value in full_params(model).items():
                assert torch.equal(value, want[name]), name
    # Before anything was stepped, a failed backward is what it always was.
    loss = model(torch.ones(2, 3)).sum()
    loss.register_hook(_fail)
    raises(ArithmeticError, "told to fail", loss.backward)
    play(model)
    optimizer.step()


def loaded(rank: int, world: int) -> None:
    """The load is the first thing that happens after the failure, and the optimizer's comes first.

    Its present state stands for a loaded one: what counts is that the failure is forgotten.
    """
    model, optimizer = start(Failing)
    for step in range(2):
        play(model, step)
        optimizer.step()
    state = optimizer.state_dict()
    fail(model, optimizer)
    optimizer.load_state_dict(state)
    play(model, 2)
    optimizer.step()
    assert optimizer.state[model.head.weight]["step"] == 3


def saved(rank: int, world: int, folder: Path) -> None:
    """Saving from an `except:`, or before `step()`, must not keep parameters of two steps."""
    model, optimizer = start(Failing)
    for step in range(2):
        play(model, step)
        early = r"expected step\(\) after backward, got a save before it: unit '.*' has taken its"
        raises(RuntimeError, early, checkpoint.save, folder / "torn", model, optimizer)
        raises(RuntimeError, f"full_state_dict: {early}", full_state_dict, model)
        raises(RuntimeError, f"ShardedAdamW.state_dict: {early}", optimizer.state_dict)
        optimizer.step()
    checkpoint.save(folder / "whole", model, optimizer)
    fail(model, optimizer)
    torn = "checkpoint.save: expected whole steps, got parameters of two"
    raises(RuntimeError, torn, checkpoint.save, folder / "torn", model, optimizer)
    assert not (folder / "torn").exists()
    raises(RuntimeError, "full_state_dict: expected whole steps", full_state_dict, model)
    raises(RuntimeError, "state_dict: expected whole steps", optimizer.state_dict)
    checkpoint.load(folder / "whole", model, optimizer)
    checkpoint.save(folder / "again", model, optimizer)


def test_parameters_of_two_steps_are_not_saved(tmp_path: Path) -> None:
    run_ranks(saved, 2, tmp_path)


def test_a_load_right_after_the_failure_counts() -> None:
    run_ranks(loaded, 2)


@pytest.mark.parametrize("comm", ["process_group", "shared_memory"])
def test_a_failed_backward_is_not_gone_on_from(comm: str, tmp_path: Path) -> None:
    run_ranks(failures, 2, comm, tmp_path)


def apart(rank: int, world: int) -> None:
    """Ranks that say they have stepped different units."""
    model, optimizer = start(Failing)
    for step in range(2):
        play(model, step)
        optimizer.step()
    fail(model, optimizer)
    stepping = model.units[0].runtime.stepping
    model.units[0].runtime.recover()
    if rank == 1:
        stepping.failed.clear()
    uneven = "2 units stepped on rank 0, and none on 1"
    raises(RuntimeError, f"same units .* got {uneven}", optimizer.accept_failed_backward)
    for call in (lambda: play(model), optimizer.step, optimizer.state_dict):
        raises(RuntimeError, rf"whole steps.*stepped .* here \({uneven}\) when it failed", call)


def test_ranks_that_stepped_different_units_do_not_go_on() -> None:
    run_ranks(apart, 2)


# -- memory ----------------------------------------------------------------------------------------


def held(rank: int, world: int, comm: str, depth: int) -> tuple[int, int]:
    """Return the most bytes of gradients that were held at once, and those of one bucket."""
    model = fully_shard(
        nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(depth))),
        units=nn.Linear,
        comm=comm,
    )
    optimizer = ShardedAdamW(model.parameters(), overlap_backward=True)
    now = peak = 0
    with record_schedule() as schedule:
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for moment in schedule.moments:
        if "grads[" in moment.label or "reduced[" in moment.label:
            now += {"hold": 1, "drop": -1}[moment.kind] * moment.nbytes
            peak = max(peak, now)
    assert now == 0, f"{now} bytes of gradients stay after a step"
    return peak, 64 * 64 * 4


@pytest.mark.parametrize("comm", ["process_group", "shared_memory"])
def test_gradients_of_few_units_are_held_at_once(comm: str) -> None:
    """However many units there are: no shards of gradients pile up."""
    few, many = (run_ranks(held, 2, comm, depth)[0] for depth in (6, 12))
    assert few == many
    # The last three units' as autograd leaves them, and one full bucket with its shard.
    peak, bucket = many
    assert peak <= 3 * bucket + bucket + bucket // 2, (peak, bucket)

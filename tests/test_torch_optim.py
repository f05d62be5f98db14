# SPDX-License-Identifier: Apache-2.0
"""Torch's own optimizers, gradient clipping and GradScaler, as they are, on sharded parameters."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import (
    Net,
    Routed,
    Scenario,
    Turn,
    adamw,
    assert_close,
    assert_moments,
    assert_params,
    build,
    by_block,
    check_all,
    full_grads,
    mse,
    sharded_adamw,
    turns,
    varied,
)
from test_numbers import groups, routed
from torch import Tensor, nn

from fsdp_kernels import ProcessGroupComm, fully_shard

WORLDS = [1, 2, 3, 4]
FORMS: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "default": {},
}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1, "lr": 1e-2}),
    "Adam-amsgrad": (torch.optim.Adam, {"amsgrad": True, "lr": 1e-2}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "lr": 1e-2}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True, "lr": 1e-3}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_in_every_form(name: str) -> None:
    make, options = OPTIMIZERS[name]
    base = Scenario(params=groups if "Adam" in name else Scenario.params, steps=4)
    scenarios = []
    for form in FORMS.values():
        if form.get("fused") and name == "RMSprop":
            continue  # torch has no fused RMSprop
        scenarios.append(
            varied(
                base,
                optimizer=partial(make, **options, **form),
                oracle=partial(make, **options, foreach=False),
            )
        )
    run_ranks(check_all, 3, *scenarios)


@pytest.mark.parametrize("name", ["NAdam", "RAdam", "Adamax", "ASGD", "Adadelta"])
def test_every_other_elementwise_optimizer(name: str) -> None:
    make = partial(getattr(torch.optim, name), lr=1e-2)
    base = Scenario(optimizer=make, oracle=partial(make, foreach=False), steps=3)
    run_ranks(check_all, 2, base, varied(base, optimizer=partial(make, foreach=False)))


def refused_optimizers(rank: int, world: int) -> None:
    """Optimizers that look at whole matrices or vectors say so instead of using a fragment."""
    for name in ("Adafactor", "LBFGS"):
        model = by_block(build(Net, torch.float64))
        optimizer = getattr(torch.optim, name)(model.parameters())
        mse(model, Turn(rank, world, 0))
        with pytest.raises((ValueError, RuntimeError), match="full_params"):
            optimizer.step(lambda: 1.0)


def test_optimizers_that_are_not_elementwise_are_refused() -> None:
    run_ranks(refused_optimizers, 1)


@pytest.mark.parametrize("world", WORLDS)
def test_optimizers_skip_unused_parameters(world: int) -> None:
    base = Scenario(build=Routed, play=routed, shard=fully_shard, oracle=adamw)
    forms = [varied(base, optimizer=partial(adamw, **form)) for form in FORMS.values()]
    run_ranks(check_all, world, *forms)


def built_early(rank: int, world: int) -> None:
    """Build the optimizer before sharding: it must hold the right objects afterwards."""
    for make in (adamw, sharded_adamw):
        plain, model = build(Net, torch.float64), build(Net, torch.float64)
        optimizer, oracle = make(model.parameters()), adamw(plain.parameters())
        held = [p for group in optimizer.param_groups for p in group["params"]]
        by_block(model)
        assert [id(p) for p in model.parameters()] == [id(p) for p in held]
        for step in range(3):
            mse(model, Turn(rank, world, step))
            for turn in turns(rank, world, step, torch.float64):
                mse(plain, turn)
            optimizer.step()
            oracle.step()
            assert_params(model, plain, f"{make}, step {step}")
            optimizer.zero_grad()
            oracle.zero_grad()


def built_late(rank: int, world: int) -> None:
    """Build the optimizer between the first forward and backward."""
    model, plain = by_block(build(Net, torch.float64)), build(Net, torch.float64)
    loss = model(Turn(rank, world, 0).rand(4, 3)).square().mean()
    optimizer, oracle = sharded_adamw(model.parameters()), adamw(plain.parameters())
    loss.backward()
    for turn in turns(rank, world, 0, torch.float64):
        turn.backward(plain(turn.rand(4, 3)).square().mean())
    optimizer.step()
    oracle.step()
    assert_params(model, plain, "built after a forward")


def test_an_optimizer_built_before_sharding_or_after_a_forward() -> None:
    run_ranks(built_early, 2)
    run_ranks(built_late, 2)


def cleared(rank: int, world: int) -> None:
    """Clearing every gradient forgets the bucket's, in whatever order they are looked at."""
    model = build(Net)
    by_block(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mse(model, Turn(rank, world, 0, torch.float32))
    optimizer.step()
    buckets = [bucket for unit in model.units for bucket in unit.buckets]
    assert all(bucket.shard_grads is not None for bucket in buckets)
    optimizer.zero_grad()  # looks at each gradient before it sets it to None
    assert all(bucket.shard_grads is None for bucket in buckets)


def test_clearing_every_gradient_forgets_the_buckets() -> None:
    run_ranks(cleared, 2)


class CountingComm(ProcessGroupComm):
    """Remembers the labels of its all-reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.reduced: list[str] = []

    def all_reduce(self, tensor: Tensor, op: Any = "sum", *, label: str) -> Any:
        self.reduced.append(label)
        return super().all_reduce(tensor, op, label=label)


NORMS = [2.0, 1.0, math.inf, 3.0]


def clipped(rank: int, world: int) -> None:
    comm = CountingComm()
    model = fully_shard(build(Net, torch.float64), units=nn.Linear, comm=comm)
    plain = build(Net, torch.float64)
    clippers = {
        "torch": lambda p: nn.utils.clip_grad_norm_(model.parameters(), 0.01, p),
        "for-loop": lambda p: nn.utils.clip_grad_norm_(
            model.parameters(), 0.01, norm_type=p, foreach=False
        ),
        "method": lambda p: model.clip_grad_norm_(0.01, p),
    }
    for step, (name, p) in enumerate((n, p) for p in NORMS for n in clippers):
        mse(model, Turn(rank, world, step))
        for turn in turns(rank, world, step, torch.float64):
            mse(plain, turn)
        want = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type=p)
        _ = full_grads(
            model
        )  # settles what is outstanding, so that the clip is all that is counted
        comm.reduced.clear()
        norm = clippers[name](p)
        count = len(comm.reduced)
        assert_close(torch.as_tensor(norm), want, f"{name}, norm {p}")
        assert norm.ndim == 0
        everyone = [None] * world
        dist.all_gather_object(everyone, float(norm))
        assert set(everyone) == {float(norm)}, "ranks got different floats"
        if name != "for-loop":
            assert count == 1, f"{name}, norm {p}: {comm.reduced}"
        expected = {n: q.grad for n, q in plain.named_parameters()}
        for key, grad in full_grads(model).items():
            assert_close(grad, expected[key], f"{name}, norm {p}: {key}")
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("world", WORLDS)
def test_clipping_is_global_with_one_all_reduce(world: int) -> None:
    run_ranks(clipped, world)


def refused_norm(rank: int, world: int) -> None:
    model = by_block(build(Net, torch.float64))
    loss = model(Turn(rank, world, 0).rand(4, 3)).sum()
    (loss * (math.inf if rank == world - 1 else 1.0)).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert not math.isfinite(model.clip_grad_norm_(1.0))


def test_one_ranks_infinity_is_every_ranks() -> None:
    run_ranks(refused_norm, 2)


sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SCALED: list[tuple[Any, Any, bool]] = [  # ours, the oracle's, whether to unscale and clip first
    (sharded_adamw, adamw, False),
    (sharded_adamw, adamw, True),
    (sgd, sgd, True),
    (partial(adamw, fused=True), adamw, False),
    (partial(adamw, foreach=True), adamw, False),
]


def poison_last_element(grad: Tensor) -> None:
    """Make the last element infinite; on the one rank that owns it, if the gradient is sharded."""
    if not hasattr(grad, "to_local"):
        grad.view(-1)[-1] = math.inf
    elif grad.fragment.numel and grad.fragment.stop == grad.numel():
        grad.to_local()[-1] = math.inf


def scaled_backward(model: nn.Module, turn: Turn, scaler: torch.amp.GradScaler) -> None:
    """Play a scaled step; in step 4 the last rank's loss overflows."""
    loss = model_loss(model, turn) * turn.scale
    if turn.step == 4 and turn.rank == turn.world - 1:
        loss = loss * math.inf
    scaler.scale(loss).backward()


def scaled(rank: int, world: int) -> None:
    """Train with GradScaler; in step 2 a single element of a single rank overflows."""
    for number, (make, reference, unscale) in enumerate(SCALED):
        model, plain = by_block(build(Net, torch.float64)), build(Net, torch.float64)
        optimizer, oracle = make(model.parameters()), reference(plain.parameters())
        ours, theirs = (torch.amp.GradScaler("cpu", 1024.0, growth_interval=2) for _ in "ab")
        for step in range(6):
            where = f"optimizer {number}, step {step}"
            scaled_backward(model, Turn(rank, world, step), ours)
            for turn in turns(rank, world, step, torch.float64):
                scaled_backward(plain, turn, theirs)
            if step == 2:
                poison_last_element(model.blocks[1].up.weight.grad)
                poison_last_element(plain.blocks[1].up.weight.grad)
            if unscale:
                ours.unscale_(optimizer)
                theirs.unscale_(oracle)
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                want = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
                if step not in (2, 4):
                    assert_close(norm, want, f"{where}: norm")
            for scaler, stepped in ((ours, optimizer), (theirs, oracle)):
                scaler.step(stepped)
                scaler.update()
                stepped.zero_grad()
            assert ours.get_scale() == theirs.get_scale(), where
            assert_params(model, plain, where)
            assert_moments((model, optimizer), (plain, oracle), where)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_grad_scaler(world: int) -> None:
    run_ranks(scaled, world)


def clip_in_step(rank: int, world: int) -> None:
    """`max_grad_norm` under GradScaler clips the unscaled gradient."""
    model, plain = by_block(build(Net, torch.float64)), build(Net, torch.float64)
    optimizer, oracle = (
        sharded_adamw(model.parameters(), max_grad_norm=0.05),
        adamw(plain.parameters()),
    )
    scaler = torch.amp.GradScaler("cpu", 256.0)
    for step in range(5):
        for turn in turns(rank, world, step, torch.float64):
            mse(plain, turn)
        want = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        scaler.scale(model_loss(model, Turn(rank, world, step))).backward()
        scaler.step(optimizer)
        scaler.update()
        oracle.step()
        assert_close(torch.as_tensor(optimizer.grad_norm), want, f"step {step}: grad_norm")
        assert_params(model, plain, f"step {step}")
        optimizer.zero_grad()
        oracle.zero_grad()


def model_loss(model: nn.Module, turn: Turn) -> Tensor:
    return nn.functional.mse_loss(model(turn.rand(4, 3)), turn.rand(4, 5, salt=1))


def test_grad_scaler_with_max_grad_norm() -> None:
    run_ranks(clip_in_step, 2)

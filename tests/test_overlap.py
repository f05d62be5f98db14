# SPDX-License-Identifier: Apache-2.0
"""Steps in backward: the bits of the step at the end, over every backend, strategy and graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import (
    Block,
    Net,
    Routed,
    Sided,
    Turn,
    adamw,
    assert_params,
    build,
    lopsided,
    mse,
    turns,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdp_kernels import ShardedAdam, ShardedAdamW, fully_shard, ops
from fsdp_kernels.stepping import Stepping


class Reusing(Net):
    """Calls its blocks several times, and one of them once more without a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for index in (0, 1, 0, 2, 0):
            x = self.blocks[index](x)
        with torch.no_grad():
            aside = self.blocks[1](x)
        return self.head(x + aside)


class Recomputing(Net):
    def __init__(self, reentrant: bool, order: Sequence[int] = (0, 1, 2, 1)) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for index in self.order:
            x = checkpoint(self.blocks[index], x, use_reentrant=self.reentrant)
        return self.head(x)


class Aside(Block):
    """Its weight is read once more by an operation that gives it no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(
            F.linear(F.gelu(F.linear(x, self.up.weight)), self.up.weight.t().detach())
        )


class Parent(nn.Module):
    """A unit whose own gradients are complete long before backward leaves it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(Block(dim), Block(dim), Block(dim))
        self.last = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.inner(x))
        return y


class Tied(Net):
    """Two blocks share a weight, and the head is the input layer's."""

    def __init__(self) -> None:
        super().__init__(dim=5)
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.inp = nn.Linear(3, 5)
        self.back = nn.Linear(5, 3)
        self.again = nn.Linear(3, 5)
        self.again.weight = self.inp.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.again(self.back(self.head(x)))


def freeze(model: nn.Module) -> nn.Module:
    """Leave some layers of a unit, and a whole one, without gradients."""
    model.blocks[0].norm.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    return model


@dataclass(frozen=True)
class Case:
    """One training program, for a step at the end and for one in backward.

    Attributes:
        before: Done before each step: `before(model, optimizers, step)`.
        tolerance: Relative and absolute; 0 for the same bits.
        optimizers: Makes the optimizers from the model, given `overlap_backward`.
    """

    build: Callable[[], nn.Module] = Net
    play: Callable[[nn.Module, Turn], Tensor] = mse
    dtype: torch.dtype = torch.float32
    shard: dict[str, Any] = field(default_factory=dict)
    optimizers: Callable[..., list[Any]] = lambda model, **kw: [
        ShardedAdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **kw)
    ]
    before: Callable[..., None] = lambda *_: None
    steps: int = 3
    tolerance: float = 0.0


def grouped(model: nn.Module, **kw: Any) -> list[Any]:
    """Groups that part each unit's parameters, with other flags and rates."""
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if "bias" in n], "lr": 3e-3, "amsgrad": True},
        {"params": [p for n, p in named if "bias" not in n], "maximize": True},
    ]
    return [ShardedAdam(groups, lr=torch.tensor(1e-2), weight_decay=0.1, **kw)]


def two(model: nn.Module, **kw: Any) -> list[Any]:
    """Two optimizers that part the units, and share one of them."""
    params = list(model.parameters())
    blocks = list(model.blocks[0].parameters()) + list(model.blocks[1].up.parameters())
    rest = [p for p in params if all(p is not q for q in blocks)]
    return [ShardedAdamW(blocks, lr=1e-2, **kw), ShardedAdamW(rest, lr=3e-3, **kw)]


def vary(model: nn.Module, optimizers: list[Any], step: int) -> None:
    """Change the rate, edit a parameter, freeze and unfreeze one between steps."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    weight = model.blocks[step % 3].up.weight
    with torch.no_grad():
        weight.clamp_(-0.2, 0.2)
    model.blocks[2].down.weight.requires_grad_(step % 2 == 0)


def routed(model: nn.Module, turn: Turn) -> Tensor:
    route = (turn.rank + turn.step) % 2  # the third branch is never used
    return turn.backward(F.mse_loss(model(turn.rand(4, 3), route), turn.rand(4, 5, salt=1)))


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

CASES: dict[str, Case] = {
    "no prefetch": Case(shard={"prefetch": 0}),
    "prefetch 2": Case(shard={"prefetch": 2}),
    "reuse": Case(Reusing),
    "checkpoint": Case(partial(Recomputing, False)),
    "reentrant checkpoint": Case(partial(Recomputing, True, (0, 1, 2))),
    # A gradient of two parts, which are added before or after the reduction, as it comes.
    "reentrant, reused": Case(partial(Recomputing, True), tolerance=1e-5),
    "parents": Case(partial(Net, block=Parent, depth=2), shard={"units": (Parent, Block)}),
    "tied": Case(Tied),
    "aside": Case(partial(Net, block=Aside)),
    "frozen": Case(lambda: freeze(Net())),
    "unused": Case(Routed, routed, shard={"units": lambda module: False}),
    "unused on some ranks": Case(partial(Net, block=Sided), lopsided, steps=5),
    "bf16 compute": Case(shard={"mp_policy": BF16}),
    "groups": Case(optimizers=grouped),
    "two optimizers": Case(optimizers=two),
    "changes": Case(before=vary, steps=5),
    "bf16 changes": Case(dtype=torch.bfloat16, before=vary),
}


def trained(case: Case, rank: int, world: int, comm: str, overlap: bool, **kw: Any) -> Any:
    """Train, yielding the model and its optimizers after each step."""
    model = build(case.build, case.dtype)
    fully_shard(model, **{"units": Block, "comm": comm, **case.shard, **kw})
    optimizers = case.optimizers(model, overlap_backward=overlap)
    for step in range(case.steps):
        case.before(model, optimizers, step)
        case.play(model, Turn(rank, world, step, case.dtype))
        for optimizer in optimizers:
            optimizer.step()
        yield model, optimizers
        for optimizer in optimizers:
            optimizer.zero_grad()


def bits(model: nn.Module, optimizers: list[Any]) -> dict[str, Tensor]:
    """List everything that a step changes, on this rank."""
    found = {}
    for name, p in model.named_parameters():
        found[name] = p.to_local().clone()
        for number, optimizer in enumerate(optimizers):
            for key, value in optimizer.state.get(p, {}).items():
                local = value.to_local() if hasattr(value, "to_local") else value
                found[f"{name}, {key} of {number}"] = local.clone()
    return found


def compare(rank: int, world: int, comm: str, names: Sequence[str], **kw: Any) -> None:
    for name in names:
        case = CASES[name]
        runs = [trained(case, rank, world, comm, overlap, **kw) for overlap in (False, True)]
        for step, (at_end, in_backward) in enumerate(zip(*runs, strict=True)):
            want, got = bits(*at_end), bits(*in_backward)
            assert want.keys() == got.keys(), f"{name}, step {step}"
            for key in want:
                same = torch.equal(want[key], got[key]) or torch.allclose(
                    want[key], got[key], rtol=case.tolerance, atol=case.tolerance
                )
                assert same, f"{name}, step {step} on rank {rank}: {key} differs"


@pytest.mark.parametrize(
    ("comm", "world"),
    [("process_group", 1), ("process_group", 2), ("shared_memory", 2), ("shared_memory", 3)],
)
def test_the_bits_of_the_step_at_the_end(comm: str, world: int) -> None:
    few = ["no prefetch", "prefetch 2", "reuse", "unused on some ranks", "bf16 compute"]
    if world == 2:  # graphs and optimizers are the same to every backend: one plays them all
        few = [*few, "reentrant, reused", "two optimizers", "changes"]
        few = list(CASES) if comm == "shared_memory" else few
    run_ranks(compare, world, comm, few)


def strategies(rank: int, world: int) -> None:
    names = ["reuse", "unused on some ranks"]
    for strategy, comm in (
        ("zero2", "process_group"),
        ("zero2", "shared_memory"),
        ("zero1", "process_group"),
        ("replicate", "process_group"),
    ):
        compare(rank, world, comm, names, strategy=strategy)


def test_every_strategy() -> None:
    run_ranks(strategies, 2)


def hybrid(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    compare(rank, world, "shared_memory", ["reuse"], mesh=mesh)
    compare(rank, world, "process_group", ["unused on some ranks"], mesh=mesh, strategy="zero2")


def test_two_levels_of_ranks() -> None:
    run_ranks(hybrid, 4)


# -- when ------------------------------------------------------------------------------------------


def watched(rank: int, world: int, comm: str) -> tuple[list[list[str]], int]:
    """Train beside the plain model; list what each backward stepped before its end."""
    early: list[list[str]] = []
    fused = 0
    step, reduce_adam = Stepping._step, ops.reduce_adam

    def noted(self: Stepping, unit: Any) -> None:
        if not unit.runtime.backward._ending:
            early[-1].append(unit.label)
        step(self, unit)

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal fused
        fused += 1
        reduce_adam(*args, **kwargs)

    Stepping._step, ops.reduce_adam = noted, counted  # type: ignore[method-assign]
    plain = build(partial(Net, depth=5), torch.float64)
    sharded = fully_shard(build(partial(Net, depth=5), torch.float64), units=Block, comm=comm)
    optimizer = ShardedAdamW(sharded.parameters(), lr=1e-2, weight_decay=0.1, overlap_backward=True)
    oracle = adamw(plain.parameters())
    for number in range(3):
        early.append([])
        mse(sharded, Turn(rank, world, number))
        for turn in turns(rank, world, number, torch.float64):
            mse(plain, turn)
        optimizer.step()
        oracle.step()
        assert_params(sharded, plain, f"rank {rank}, step {number}")
        optimizer.zero_grad()
        oracle.zero_grad()
    early.append([])
    sharded(Turn(rank, world, 3).rand(4, 3)).sum().backward(retain_graph=True)
    assert early.pop() == [], "a unit was stepped whose weights a graph still holds"
    optimizer.step()
    return early, fused


@pytest.mark.parametrize("comm", ["process_group", "shared_memory"])
def test_units_are_stepped_while_backward_runs(comm: str) -> None:
    """All but those whose gradients come after the last gather; fused where memory is shared.

    Nothing of a graph that is retained, whose last step is made of sums at the end.
    """
    for early, fused in run_ranks(watched, 2, comm):
        assert early[2] == ["blocks.4", "blocks.3", "blocks.2"], early
        assert fused == (18 if comm == "shared_memory" else 0)

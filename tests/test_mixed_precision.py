# SPDX-License-Identifier: Apache-2.0
"""Low-precision compute over fp32 masters: what a step starts from, and what an edit changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import (
    Block,
    Net,
    Turn,
    adamw,
    assert_close,
    assert_grads,
    assert_moments,
    assert_params,
    build,
    by_block,
    feed,
    full,
    full_params,
    mean_loss,
    mse,
    sharded_adamw,
)
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp_kernels import MixedPrecisionPolicy, fully_shard

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Edit = Callable[[nn.Module], None]


def lowered(plain: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy whose parameters, not buffers, are cast: what the policy computes with."""
    low = copy.deepcopy(plain)
    for p in low.parameters():
        p.data = p.data.to(dtype)
    return low


def regress(model: nn.Module, turn: Turn, dtype: torch.dtype) -> Tensor:
    """Play one forward and backward on data that the compute dtype holds exactly."""
    x, y = turn.rand(4, 3).to(dtype), turn.rand(4, 5, salt=1)
    # A sharded model gets fp32 inputs: its policy casts them.
    out = model(x.float() if turn.sharded else x)
    return turn.backward(F.mse_loss(out.float(), y))


def low_precision_grads(plain: nn.Module, world: int, step: int, dtype: torch.dtype) -> Tensor:
    """Fill the fp32 model's gradients from low-precision copies, one a rank; return the loss."""
    total = torch.zeros((), dtype=torch.float64)
    for other in range(world):
        low = lowered(plain, dtype)
        total += regress(low, Turn(other, world, step, torch.float32, sharded=False), dtype) / world
        for p, q in zip(plain.parameters(), low.parameters(), strict=True):
            share = q.grad.float() / world
            p.grad = share if p.grad is None else p.grad + share
    return total


def clamp(model: nn.Module) -> None:
    model.blocks[0].up.weight.data.clamp_(-0.01, 0.01)


def copy_in(model: nn.Module) -> None:
    p = model.blocks[1].down.weight
    value = torch.linspace(-1, 1, 91, dtype=p.dtype).reshape(7, 13)
    with torch.no_grad():
        p.copy_(value)


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model.head.weight.mul_(0.5).add_(1e-3)
        torch._foreach_mul_([model.inp.weight, model.inp.bias], 1.001)


def reload(model: nn.Module) -> None:
    state = {k: full(v) * 1.01 for k, v in model.state_dict().items()}
    model.load_state_dict(state)


EDITS: list[Edit | None] = [None, clamp, copy_in, in_place, reload, None]


def fp32_master(rank: int, world: int, make: Any) -> None:
    """Train fp32 parameters that compute in bf16, with an edit before most steps."""
    plain = build(Net, torch.float32)
    model = fully_shard(build(Net, torch.float32), units=Block, mp_policy=BF16)
    optimizer, oracle = make(model.parameters()), adamw(plain.parameters())
    for step, edit in enumerate(EDITS):
        where = f"step {step}, after {edit}"
        if edit is not None:
            edit(model)
            edit(plain)
            assert_params(model, plain, where)
        loss = regress(model, Turn(rank, world, step, torch.float32), torch.bfloat16)
        want = low_precision_grads(plain, world, step, torch.bfloat16)
        assert_close(mean_loss(loss), want, f"{where}: loss")
        assert_grads(model, plain, where)
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
        feed(model, plain)
        optimizer.step()
        oracle.step()
        assert_params(model, plain, where)
        assert_moments((model, optimizer), (plain, oracle), where)
        optimizer.zero_grad()
        oracle.zero_grad()


@pytest.mark.parametrize(
    "make", [sharded_adamw, partial(adamw, foreach=True)], ids=["ours", "torch"]
)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_bf16_compute_over_fp32_parameters(world: int, make: Any) -> None:
    run_ranks(fp32_master, world, make)


class Masters:
    """Fp32 copies of bf16 parameters, stepped by torch's AdamW: what masters must be."""

    def __init__(self, model: nn.Module) -> None:
        self.names = [name for name, _ in model.named_parameters()]
        self.values = [nn.Parameter(v.float()) for v in full_params(model).values()]
        self.optimizer = adamw(self.values)

    def edited(self, model: nn.Module) -> None:
        """Start over from every element that no longer is its master's cast."""
        for master, value in zip(self.values, full_params(model).values(), strict=True):
            kept = master.detach().bfloat16() == value
            master.data.copy_(torch.where(kept, master.detach(), value.float()))

    def step(self, model: nn.Module) -> None:
        for master, p in zip(self.values, model.parameters(), strict=True):
            master.grad = full(p.grad).float()
        self.optimizer.step()


def bf16_parameters(rank: int, world: int) -> None:
    """Train bf16 parameters over fp32 masters: small steps must not be lost, nor edits."""
    model = fully_shard(build(Net, torch.bfloat16), units=Block)
    optimizer = sharded_adamw(model.parameters(), lr=1e-4)
    masters = Masters(model)
    for group in masters.optimizer.param_groups:
        group["lr"] = 1e-4
    for step in range(12):
        edit = (None, None, clamp, copy_in)[step % 4] if step > 2 else None
        if edit is not None:
            edit(model)
            masters.edited(model)
        mse(model, Turn(rank, world, step, torch.bfloat16))
        masters.step(model)
        optimizer.step()
        after = full_params(model)
        for name, master in zip(masters.names, masters.values, strict=True):
            assert after[name].dtype == torch.bfloat16
            # One rounding of values that agree to fp32 may fall on either side of a bf16 step.
            assert_close(after[name], master.detach().bfloat16(), f"step {step}: {name}", 1e-3)
        optimizer.zero_grad()


@pytest.mark.parametrize("world", [1, 3])
def test_bf16_parameters_over_fp32_masters(world: int) -> None:
    run_ranks(bf16_parameters, world)


def unedited_masters(rank: int, world: int) -> None:
    """An edit of one parameter must not round its neighbours' masters."""
    models = [fully_shard(build(Net, torch.bfloat16), units=Block) for _ in range(2)]
    optimizers = [sharded_adamw(m.parameters(), lr=1e-4) for m in models]
    for step in range(20):
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            mse_of(model, Turn(rank, world, step, torch.bfloat16))
            optimizer.step()
            optimizer.zero_grad()
            if number == 1 and step == 10:
                with torch.no_grad():  # the same values again: an edit that changes nothing
                    model.blocks[0].up.bias.copy_(full(model.blocks[0].up.bias))
    a, b = (full_params(model) for model in models)
    for name in a:
        if name != "blocks.0.up.bias":
            assert torch.equal(b[name], a[name]), name


def mse_of(model: nn.Module, turn: Turn) -> None:
    """Give every parameter the gradient one, whatever its value."""
    with torch.enable_grad():
        model(turn.rand(2, 3)).sum().backward()
    for p in model.parameters():
        p.grad.fill_(1.0)


def test_an_edit_touches_only_its_own_master() -> None:
    run_ranks(unedited_masters, 2)


def compute_copy(rank: int, world: int) -> None:
    """Every kind of edit is what the very next forward computes with."""
    model = fully_shard(build(Net, torch.float32), units=Block, mp_policy=BF16)
    plain = build(Net, torch.float32)
    x = torch.linspace(-1, 1, 12).reshape(4, 3)
    edits: list[Edit] = [clamp, copy_in, in_place, reload, by_full_params]
    with torch.no_grad():
        for edit in edits:
            edit(model)
            edit(plain)
            want = lowered(plain, torch.bfloat16)(x.bfloat16())
            assert_close(model(x), want, f"after {edit.__name__}")


def by_full_params(model: nn.Module) -> None:
    with model.full_params() if hasattr(model, "full_params") else torch.no_grad():
        model.inp.weight.data[0] = 3.0


def test_an_edit_is_what_the_next_forward_computes_with() -> None:
    run_ranks(compute_copy, 2)


def policies(rank: int, world: int) -> None:
    """Nested units keep their own policy; outputs and gradients have the promised dtypes."""
    model = build(Net, torch.float32)
    model.offset = model.offset.bfloat16()  # or the sum would be fp32 in any case
    fully_shard(model.blocks[1], mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    seen: list[torch.dtype] = []
    model.blocks[1].up.register_forward_pre_hook(lambda m, a: seen.append(m.weight.dtype))
    model.blocks[2].up.register_forward_pre_hook(lambda m, a: seen.append(m.weight.dtype))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    fully_shard(model, units=Block, mp_policy=policy)
    out = model(torch.ones(2, 3))
    assert out.dtype == torch.float32
    assert seen == [torch.float32, torch.bfloat16]
    out.sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_nested_policies() -> None:
    run_ranks(policies, 2)


def test_reduce_dtype_and_half() -> None:
    run_ranks(half_reduce, 2)


def half_reduce(rank: int, world: int) -> None:
    """A bf16 reduction is off by bf16 rounding only; fp16 compute trains too."""
    for compute, reduce, rtol in (
        (torch.bfloat16, torch.bfloat16, 2e-2),
        (torch.float16, torch.float32, 5e-3),
        (torch.float32, torch.float32, 1e-6),
    ):
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
        model = by_block(build(Net, torch.float32), mp_policy=policy)
        plain = build(Net, torch.float32)
        low_precision_grads(plain, world, 0, compute)
        regress(model, Turn(rank, world, 0, torch.float32), compute)
        assert_grads(model, plain, f"{compute} reduced in {reduce}", rtol)

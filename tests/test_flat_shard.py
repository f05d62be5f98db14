# SPDX-License-Identifier: Apache-2.0
"""What a sharded parameter is, what it can do, and what it refuses by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import (
    Net,
    Turn,
    adamw,
    assert_close,
    build,
    by_block,
    full,
    full_params,
    mse,
)
from torch import Tensor, nn

from fsdp_kernels import fully_shard


def identity(rank: int, world: int) -> None:
    model = build(Net)
    before = [(name, p, p.shape, p.clone().detach()) for name, p in model.named_parameters()]
    optimizer = adamw(model.parameters())
    assert by_block(model) is model
    after = list(model.named_parameters())
    assert [name for name, _ in after] == [name for name, *_ in before]
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for (name, old, shape, value), (_, new), mine in zip(before, after, held, strict=True):
        assert new is old, name
        assert mine is old, name
        assert isinstance(new, nn.Parameter)
        assert new.requires_grad
        assert new.is_leaf
        assert (new.shape, new.ndim, new.numel()) == (shape, len(shape), shape.numel())
        assert new.to_local().ndim == 1
        assert torch.equal(new.full_tensor(), value), name
        fragment = value.flatten()[new.fragment.start : new.fragment.stop]
        assert torch.equal(new.to_local(), fragment), name
        assert name in repr(new)
    assert list(model.state_dict()) == list(build(Net).state_dict())
    names = [name for name, _ in after]
    mse(model, Turn(rank, world, 0, torch.float32))
    assert [name for name, _ in model.named_parameters()] == names
    assert all(p is q for (_, p), (_, q) in zip(after, model.named_parameters(), strict=True))
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    total = sum(p.to_local().numel() for p in model.parameters())
    assert total < sum(p.numel() for p in model.parameters()) or world == 1


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_same_objects_under_the_same_names(world: int) -> None:
    run_ranks(identity, world)


def seen_in_forward(rank: int, world: int) -> None:
    """Inside forward a parameter is whole and still an nn.Parameter; lists of them never change."""
    model = by_block(build(Net))
    seen: dict[str, Any] = {}

    def look(module: nn.Module, args: Any) -> None:
        seen["type"] = isinstance(module.weight, nn.Parameter)
        seen["shape"], seen["numel"] = module.weight.shape, module.weight.sum().item()
        seen["listed"] = dict(module.named_parameters())["weight"]

    model.blocks[0].up.register_forward_pre_hook(look)
    registered = model.blocks[0].up.weight
    model(torch.ones(2, 3))
    assert seen.pop("listed") is registered
    whole = full(registered)
    assert seen == {"type": True, "shape": whole.shape, "numel": whole.sum().item()}
    assert model.blocks[0].up.weight is registered


def test_inside_forward_the_parameter_is_whole() -> None:
    run_ranks(seen_in_forward, 2)


# Element-wise operations.

OPERATIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul_ scalar": lambda p, full: p.mul_(0.5),
    "add_ full": lambda p, full: p.add_(full, alpha=0.1),
    "broadcast row": lambda p, full: p.mul_(full[0]),
    "broadcast column": lambda p, full: p.add_(full[:, :1]),
    "0-dim": lambda p, full: p.sub_(torch.tensor(0.25)),
    "transposed operand": lambda p, full: p.add_(full.t().contiguous().t()),
    "lerp_": lambda p, full: p.lerp_(full, 0.3),
    "addcmul_": lambda p, full: p.addcmul_(full, full[:1], value=0.1),
    "addcdiv_": lambda p, full: p.addcdiv_(p.clone(), full.abs() + 1),
    "clamp_": lambda p, full: p.clamp_(-0.1, 0.1),
    "data.clamp_": lambda p, full: p.data.clamp_(-0.2, 0.05),
    "copy_ full": lambda p, full: p.copy_(full),
    "copy_ row": lambda p, full: p.copy_(full[1]),
    "masked_fill_": lambda p, full: p.masked_fill_(full > 0, 0.5),
    "masked_fill_ broadcast": lambda p, full: p.masked_fill_(full[:, :1] > 0, -0.5),
    "where": lambda p, full: p.copy_(torch.where(full > 0, p, -p)),
    "comparison": lambda p, full: p.mul_((p > 0).to(p.dtype)),
    "chain": lambda p, full: p.copy_(torch.sqrt(p.abs() + 1e-3) * torch.sign(p)),
    "zeros_like": lambda p, full: p.add_(torch.ones_like(p)).add_(torch.zeros_like(p)),
    "foreach": lambda p, full: torch._foreach_addcmul_([p], [p.clone()], [p.clone()], 0.5),
    "fill_": lambda p, full: p.fill_(0.125),
    "erfinv_": lambda p, full: p.erfinv_(),
    "zero_": lambda p, full: p.zero_(),
}


def elementwise(rank: int, world: int) -> None:
    """Every operation on a fragment is the same operation on the whole tensor."""
    for name, operation in OPERATIONS.items():
        model, plain = by_block(build(Net)), build(Net)
        p, q = model.blocks[1].up.weight, plain.blocks[1].up.weight
        other = torch.linspace(-1, 1, q.numel()).reshape(q.shape).roll(5)
        with torch.no_grad():
            operation(p, other)
            operation(q, other)
        assert torch.equal(p.full_tensor(), q.detach()), name
        for (other_name, a), (_, b) in zip(
            model.named_parameters(), plain.named_parameters(), strict=True
        ):
            assert torch.equal(full(a), b.detach()), f"{name} touched {other_name}"


@pytest.mark.parametrize("world", [2, 3])
def test_elementwise_operations(world: int) -> None:
    run_ranks(elementwise, world)


def norms(rank: int, world: int) -> None:
    model, plain = by_block(build(Net)), build(Net)
    p, q = model.blocks[1].up.weight, plain.blocks[1].up.weight
    for order in (2, 1, float("inf"), 3):
        assert_close(
            torch.linalg.vector_norm(p.detach(), order),
            torch.linalg.vector_norm(q.detach(), order),
            f"norm {order}",
        )
        assert_close(p.detach().norm(order), q.detach().norm(order), f"norm {order}")
    ours = torch._foreach_norm([p.detach() for p in model.parameters()])
    theirs = torch._foreach_norm([q.detach() for q in plain.parameters()])
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, "_foreach_norm")


def test_norms_are_global() -> None:
    run_ranks(norms, 3)


FILLS: dict[str, Callable[[Tensor], Any]] = {
    "normal_": lambda p: p.normal_(0.5, 2.0),
    "uniform_": lambda p: p.uniform_(-1, 1),
    "exponential_": lambda p: p.exponential_(),
    "bernoulli_": lambda p: p.bernoulli_(0.3),
    "init.xavier_uniform_": nn.init.xavier_uniform_,
    "init.kaiming_normal_": nn.init.kaiming_normal_,
    "init.ones_": nn.init.ones_,
    "rand_like": lambda p: p.copy_(torch.rand_like(p)),
    "randn_like": lambda p: p.add_(torch.randn_like(p)),
}


def random_fills(rank: int, world: int) -> None:
    """The same seed gives this rank's part of what it gives the whole tensor."""
    model, plain = by_block(build(Net)), build(Net)
    p, q = model.blocks[1].up.weight, plain.blocks[1].up.weight
    for name, fill in FILLS.items():
        states = []
        for tensor in (p, q):
            torch.manual_seed(7)
            with torch.no_grad():
                fill(tensor)
            states.append(torch.get_rng_state())
        assert torch.equal(full(p), q.detach()), name
        assert torch.equal(*states), f"{name} left another generator state"


@pytest.mark.parametrize("world", [1, 3])
def test_random_fills_are_slices_of_the_whole(world: int) -> None:
    run_ranks(random_fills, world)


def aliases(rank: int, world: int) -> None:
    """`to_local()` aliases parameters and gradients."""
    model = by_block(build(Net, torch.float64))
    p = model.blocks[0].up.weight
    p.to_local().fill_(0.5)
    assert torch.equal(full(p), torch.full_like(full(p), 0.5))
    assert p.grad is None
    mse(model, Turn(rank, world, 0))
    assert p.grad.shape == p.shape
    assert p.grad.dtype == p.dtype
    assert not p.grad.requires_grad
    p.grad.to_local().fill_(2.0)
    assert full(p.grad).unique().tolist() == [2.0]
    p.grad = p.grad * 2
    p.grad.add_(1.0)
    assert full(p.grad).unique().tolist() == [5.0]
    with pytest.raises(TypeError, match=r"up\.weight"):
        p.grad = torch.ones(p.shape, dtype=p.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad(set_to_none=False)
    assert full(p.grad).unique().tolist() == [0.0]
    optimizer.zero_grad()
    assert all(q.grad is None for q in model.parameters())


def test_local_views_alias() -> None:
    run_ranks(aliases, 2)


def edits(rank: int, world: int) -> None:
    """`full_params()` gathers, lets edit by any operation, and writes back."""
    model, plain = by_block(build(Net)), build(Net)
    registered = dict(model.named_parameters())
    with model.full_params(), torch.no_grad():
        for m in (model, plain):
            m.blocks[0].up.weight[3] = 7.0
            m.head.weight.copy_(m.head.weight.flip(0))
            m.inp.bias.data[1:].zero_()
            torch.manual_seed(3)
            nn.init.orthogonal_(m.blocks[2].down.weight)
        assert model.blocks[0].up.weight.sum().isfinite()
        assert type(model.head.weight) is not type(registered["head.weight"])
    assert all(dict(model.named_parameters())[name] is p for name, p in registered.items())
    for name, value in full_params(model).items():
        assert torch.equal(value, plain.get_parameter(name).detach()), name
    x = torch.ones(2, 3)
    assert_close(model(x), plain(x), "forward after an edit")
    with pytest.raises(ZeroDivisionError), model.full_params():
        _ = 1 / 0
    assert {unit.state for unit in model.units} == {"SHARDED"}
    assert_close(model(x), plain(x), "forward after a failed edit")


@pytest.mark.parametrize("world", [1, 3])
def test_full_params_edits_and_writes_back(world: int) -> None:
    run_ranks(edits, world)


def loading(rank: int, world: int) -> None:
    """`load_state_dict` takes full tensors and FlatShards, and refuses what does not fit."""
    model, source = by_block(build(Net)), fully_shard(Net())
    torch.manual_seed(5)
    wanted = Net().state_dict()
    registered = dict(model.named_parameters())
    model.load_state_dict(wanted)
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), wanted[name]), name
    assert all(dict(model.named_parameters())[name] is p for name, p in registered.items())
    model.load_state_dict(model.state_dict())
    assert_close(model(torch.ones(2, 3)), build_from(wanted)(torch.ones(2, 3)), "loaded")
    with pytest.raises(RuntimeError, match=r"head\.weight"):
        model.load_state_dict({**wanted, "head.weight": torch.ones(2, 2)})
    missing = {name: value for name, value in wanted.items() if name != "head.weight"}
    with pytest.raises(RuntimeError, match=r"head\.weight"):
        model.load_state_dict(missing)
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        model.load_state_dict(wanted, assign=True)
    for name, value in full_params(model).items():
        assert torch.equal(value, wanted[name]), f"{name} after refusals"
    assert source is not None


def build_from(state: dict[str, Tensor]) -> nn.Module:
    model = Net()
    model.load_state_dict(state)
    return model


def test_state_dict_and_load_state_dict() -> None:
    run_ranks(loading, 2)

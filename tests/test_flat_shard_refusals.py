# SPDX-License-Identifier: Apache-2.0
"""What would be silently wrong on a fragment is refused, by name, and changes nothing."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import Net, Turn, assert_close, build, by_block, full, full_params, mse
from torch import nn

REFUSED: dict[str, Callable[[nn.Module, nn.Parameter], Any]] = {
    "data =": lambda m, p: setattr(p, "data", torch.zeros(p.shape)),
    "data = fragment": lambda m, p: setattr(p, "data", torch.zeros_like(p.to_local())),
    "half()": lambda m, p: m.half(),
    "p.half()": lambda m, p: p.half(),
    "to(dtype)": lambda m, p: m.to(torch.float64),
    "p.to(dtype)": lambda m, p: p.to(torch.float64),
    "autograd": lambda m, p: (p * 2).to_local().sum().backward(),
    "p.sum()": lambda m, p: p.sum(),
    "detach().sum()": lambda m, p: p.detach().sum(),
    "mean": lambda m, p: p.detach().mean(),
    "max": lambda m, p: p.detach().max(),
    "p @ x": lambda m, p: p.detach() @ torch.ones(p.shape[1]),
    "x @ p": lambda m, p: torch.ones(p.shape[0]) @ p.detach(),
    "index": lambda m, p: p.detach()[0],
    "mask": lambda m, p: p.detach()[p.detach() > 0],
    "slice": lambda m, p: p.detach()[:1],
    "index assignment": lambda m, p: p.data.__setitem__(0, 1.0),
    "t()": lambda m, p: p.detach().t(),
    "view": lambda m, p: p.detach().view(-1),
    "reshape": lambda m, p: p.detach().reshape(-1),
    "cat": lambda m, p: torch.cat([p.detach(), p.detach()]),
    "stack": lambda m, p: torch.stack([p.detach()]),
    "sort": lambda m, p: p.detach().sort(),
    "item": lambda m, p: m.one.detach().item(),
    "float": lambda m, p: float(m.one.detach()),
    "numpy": lambda m, p: p.detach().numpy(),
    "tolist": lambda m, p: p.detach().tolist(),
    "data_ptr": lambda m, p: p.data_ptr(),
    "share_memory": lambda m, p: m.share_memory(),
    "iteration": lambda m, p: list(p.detach()),
    "equal": lambda m, p: torch.equal(p.detach(), p.detach()),
    "orthogonal_": lambda m, p: nn.init.orthogonal_(p),
    "geometry": lambda m, p: p.data.add_(torch.ones(3, 2)),
    "too many dims": lambda m, p: p.data.add_(torch.ones(2, *p.shape)),
    "other shard": lambda m, p: p.data.add_(m.head.weight.detach()),
    "other bias": lambda m, p: p.data.add_(m.inp.bias.detach()),
    "out of place into plain": lambda m, p: torch.zeros(p.shape).add_(p.detach()),
    "copy into plain": lambda m, p: torch.zeros(p.shape).copy_(p.detach()),
    "deepcopy": lambda m, p: copy.deepcopy(p),
    "deepcopy model": lambda m, p: copy.deepcopy(m),
    "pickle": lambda m, p: pickle.dumps(p),
    "torch.save": lambda m, p: torch.save(p, io.BytesIO()),
    "torch.save state_dict": lambda m, p: torch.save(m.state_dict(), io.BytesIO()),
    "functional_call": lambda m, p: torch.func.functional_call(
        m, {"blocks.0.up.weight": torch.zeros(p.shape)}, (torch.ones(1, 3),)
    ),
    "hook": lambda m, p: p.register_hook(print),
    "post hook": lambda m, p: p.register_post_accumulate_grad_hook(print),
    "svd": lambda m, p: torch.linalg.svd(p.detach()),
    "resize": lambda m, p: p.detach().resize_(3),
    "einsum": lambda m, p: torch.einsum("ij->ji", p.detach()),
    "cumsum": lambda m, p: p.detach().cumsum(0),
    "softmax": lambda m, p: p.detach().softmax(-1),
}


def refusals(rank: int, world: int) -> None:
    """Each mistake raises, names the way out, and changes nothing."""
    model = build(Net)
    model.one = nn.Parameter(torch.ones(()))
    by_block(model)
    p = model.blocks[0].up.weight
    before = full_params(model)
    wrong = []
    for name, mistake in REFUSED.items():
        try:
            mistake(model, p)
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            if "full_params" not in str(error) and "full_state_dict" not in str(error):
                wrong.append(f"{name}: {type(error).__name__}: {error}")
        else:
            wrong.append(f"{name}: was not refused")
    assert not wrong, "\n".join(wrong)
    after = full_params(model)
    assert not [name for name in before if not torch.equal(before[name], after[name])]
    mse(model, Turn(rank, world, 0, torch.float32))  # still trains


def half_way(rank: int, world: int) -> None:
    """Truncation redraws by index, after a first draw in place: refused, though not undone."""
    p = by_block(build(Net)).head.weight
    with pytest.raises((TypeError, ValueError, RuntimeError), match="full_params"):
        nn.init.trunc_normal_(p)


def test_a_fill_that_indexes_is_refused() -> None:
    run_ranks(half_way, 1)


def test_what_a_fragment_cannot_do_is_refused_by_name() -> None:
    run_ranks(refusals, 2)


def refused_before_any_swap(rank: int, world: int) -> None:
    model = build(Net)
    watched = weakref.ref(model.blocks[1].down.weight)
    with pytest.raises((ValueError, RuntimeError), match=r"blocks\.1\.down\.weight"):
        by_block(model)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert type(model) is Net
    x = torch.ones(2, 3)
    assert torch.equal(model(x), build(Net)(x))
    del watched
    by_block(model)
    assert_close(model(x), build(Net)(x), "sharded after a refusal")


def test_a_weakly_referenced_parameter_is_refused_before_anything_is_swapped() -> None:
    run_ranks(refused_before_any_swap, 2)


def attributes(rank: int, world: int) -> None:
    """What the user set on a parameter survives; hooks that would never run are refused by name."""
    model = build(Net)
    model.head.weight.decay = False
    model.blocks[0].up.weight.tag = {"a": 1}
    by_block(model)
    assert model.head.weight.decay is False
    assert model.blocks[0].up.weight.tag == {"a": 1}
    model.head.weight.later = 3
    mse(model, Turn(rank, world, 0, torch.float32))
    assert model.head.weight.later == 3

    hooked, seen = build(Net, torch.float64), []
    hooked.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    hooked.inp.weight.register_hook(lambda grad: grad * 2)
    try:
        by_block(hooked)
    except (ValueError, RuntimeError) as error:
        assert "head.weight" in str(error) or "inp.weight" in str(error)  # noqa: PT017
    else:
        mse(hooked, Turn(rank, world, 0))
        plain = by_block(build(Net, torch.float64))
        mse(plain, Turn(rank, world, 0))
        assert seen == [(5, 7)]
        assert_close(full(hooked.inp.weight.grad), 2 * full(plain.inp.weight.grad), "hook")


def test_attributes_and_hooks_survive_or_are_refused() -> None:
    run_ranks(attributes, 2)

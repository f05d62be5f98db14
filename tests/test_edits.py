# SPDX-License-Identifier: Apache-2.0
"""Who wrote the parameters last: an edit on one rank, or another optimizer, is never lost."""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks
from models import Block, Net, Turn, assert_close, build, by_block, full, full_all, mse
from pairs import Pair
from torch import nn

from fsdp_kernels import MixedPrecisionPolicy, ShardedAdamW, fully_shard


def owner_only(rank: int, world: int, unshards: bool = False) -> None:
    """Forwards whose loss is dropped keep the root full; then one rank edits its own fragment.

    Every rank must gather the root again, or the gathers are paired with other units'.
    """
    pair = Pair(rank, world)
    for step in range(2):
        x = Turn(rank, world, step).rand(2, 3)
        for _ in range(2):
            pair.sharded(x)
        weight = pair.sharded.inp.weight
        with torch.no_grad():
            if rank == step:
                weight.to_local().mul_(2.0)
            pair.plain.inp.weight.copy_(full(weight))
        if unshards:
            pair.sharded.unshard()
            pair.sharded.blocks[0].unshard()
        pair.play(step)
        pair.check_grads(f"step {step}")
        assert_close(pair.sharded(x), pair.plain(x), f"step {step}: output")
        pair.zero_grad()


def test_an_edit_on_one_rank_after_forwards_without_backward() -> None:
    run_ranks(owner_only, 2, timeout=20)
    run_ranks(owner_only, 2, True, timeout=20)


def two_over_the_same(rank: int, world: int) -> None:
    """Each optimizer's fp32 master follows what the other one wrote."""
    model, plain = by_block(build(Net, torch.bfloat16)), build(Net, torch.bfloat16).float()
    ours = [ShardedAdamW(model.parameters(), lr=0.1, weight_decay=0.0) for _ in range(2)]
    theirs = [torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.0) for _ in range(2)]
    for step in range(6):
        mse(model, Turn(rank, world, step, torch.bfloat16))
        grads = full_all([p.grad for p in model.parameters()])
        for p, grad in zip(plain.parameters(), grads, strict=True):
            p.grad = grad.float()
        for optimizer in (ours[step % 2], theirs[step % 2]):
            optimizer.step()
        nn.Module.zero_grad(plain)
        model.zero_grad()
        for got, want in zip(full_all(list(model.parameters())), plain.parameters(), strict=True):
            # A lost step is 0.1 of each element; rounding to bf16, 2**-9 of it at each step.
            assert float((got.float() - want).abs().max()) < 0.03, f"step {step}"


def test_two_optimizers_over_the_same_low_precision_parameters() -> None:
    run_ranks(two_over_the_same, 2)


def edit_in_forward(model: nn.Module, value: float = 0.5) -> None:
    """Scale a weight while its unit is gathered, ahead of the weight's use."""

    def before(module: nn.Module, _: object) -> None:
        with torch.no_grad():
            module.weight.mul_(value)

    handle = model.blocks[1].up.register_forward_pre_hook(before)
    try:
        model(torch.ones(2, 3, dtype=model.offset.dtype))
    finally:
        handle.remove()


def on_the_parameter_itself(rank: int, world: int, strategy: str, dtype: torch.dtype) -> None:
    """Alone in its shard group a rank gathers nothing: an edit in forward edits the parameter.

    It is refused as everywhere. Whoever goes on goes on from it: gradients that were there, the
    next forward and the optimizer, whose fp32 master must not bring the old values back.
    """
    model = fully_shard(build(Net, dtype), units=Block, strategy=strategy)
    plain = build(Net, dtype).float() if dtype is torch.bfloat16 else build(Net, dtype)
    ours = ShardedAdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.0)
    for step in range(3):
        mse(model, Turn(rank, world, step, dtype))
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            q.grad = full(p.grad).to(q.dtype)
        if step == 1:
            with pytest.raises(RuntimeError, match="the parameter itself has the new values"):
                edit_in_forward(model)
            with torch.no_grad():
                plain.blocks[1].up.weight.mul_(0.5)
        ours.step()
        theirs.step()
        model.zero_grad()
        for got, want in zip(full_all(list(model.parameters())), plain.parameters(), strict=True):
            # A lost edit is half of each element; rounding to bf16, 2**-9 of it at each step.
            far = 0.01 if dtype is torch.bfloat16 else 1e-6
            assert float((got.to(want.dtype) - want).abs().max()) < far, f"step {step}"
    older = model(torch.ones(2, 3, dtype=dtype)).sum()
    with pytest.raises(RuntimeError, match="the parameter itself has the new values"):
        edit_in_forward(model)
    with pytest.raises(RuntimeError, match=r"modified|in-place change"):
        older.backward()


def on_the_compute_copy(rank: int, world: int) -> None:
    """The same where the compute dtype is another: then the edit is lost, as the error says."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = fully_shard(build(Net), units=Block, strategy="replicate", mp_policy=policy)
    x = torch.ones(2, 3)
    with torch.no_grad():
        want = model(x)
        with pytest.raises(RuntimeError, match="temporary copy and is lost"):
            edit_in_forward(model)
        assert torch.equal(model(x), want)


def alone_in_its_group(rank: int, world: int) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        on_the_parameter_itself(rank, world, "replicate" if world > 1 else "zero2", dtype)
    on_the_compute_copy(rank, world)


@pytest.mark.parametrize("world", [1, 2])
def test_an_edit_in_forward_by_a_rank_alone_in_its_shard_group(world: int) -> None:
    run_ranks(alone_in_its_group, world)

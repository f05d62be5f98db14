# SPDX-License-Identifier: Apache-2.0
"""Who wrote the parameters last: an edit on one rank, or another optimizer, is never lost."""

from __future__ import annotations

import torch
from harness import run_ranks
from models import Net, Turn, assert_close, build, by_block, full, full_all, mse
from pairs import Pair
from torch import nn

from fsdp_kernels import ShardedAdamW


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

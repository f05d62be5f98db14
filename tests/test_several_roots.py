# SPDX-License-Identifier: Apache-2.0
"""Several sharded models in one graph: what they reduce over one communicator is never mixed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from harness import run_ranks
from models import Block, Net, Sided, Turn, adamw, assert_grads, assert_params, build, turns
from torch import Tensor, nn

from fsdp_kernels import ShardedAdamW, _ext, fully_shard
from fsdp_kernels.comm.base import Comm
from fsdp_kernels.comm.process_group import ProcessGroupComm
from fsdp_kernels.comm.shared_memory import SharedMemoryComm


class Critic(Net):
    """Takes what a `Net` gives."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__(depth=2, block=block)
        self.inp = nn.Linear(5, 7)


def embed(table: nn.Module, turn: Turn) -> Tensor:
    return table((turn.rand(4) * 100).long() % 6)


def chained(table: nn.Module, maker: nn.Module, critic: nn.Module, turn: Turn) -> None:
    """Backward leads through the critic, then the maker, then the table, which reads no weight."""
    turn.backward(critic(maker(embed(table, turn))).square().mean())


def alternating(table: nn.Module, maker: nn.Module, critic: nn.Module, turn: Turn) -> None:
    """Backward comes to both of them by turns."""
    x = maker.inp(embed(table, turn))
    for ours, theirs in zip(maker.blocks, critic.blocks, strict=True):
        x = theirs(ours(x))
    turn.backward(critic(maker.head(x)).square().mean())


def adversarial(table: nn.Module, maker: nn.Module, critic: nn.Module, turn: Turn) -> None:
    """The critic's own backward, which stops at what the maker made, then the maker's."""
    made = maker(embed(table, turn))
    turn.backward(critic(made.detach()).square().mean())
    turn.backward(-critic(made).square().mean())


def trained(
    rank: int,
    world: int,
    make: type[Comm],
    block: type[nn.Module],
    overlap: bool,
) -> None:
    """Ranks leave out other layers at each step, so that units are complete at other times."""
    kinds = [lambda: nn.Embedding(6, 3), partial(Net, depth=2, block=block), partial(Critic, Sided)]
    plain, sharded = ([build(kind, torch.float64) for kind in kinds] for _ in range(2))
    comm = make()
    for model in sharded:
        units = None if isinstance(model, nn.Embedding) else Block
        fully_shard(model, units=units, comm=comm)
    ours = [
        ShardedAdamW(m.parameters(), lr=1e-2, weight_decay=0.1, overlap_backward=overlap)
        for m in sharded
    ]
    theirs = [adamw(m.parameters()) for m in plain]
    # A step in backward comes after every backward.
    plays = [chained] * 4 if overlap else [chained] * 3 + [alternating] * 3 + [adversarial] * 3

    for step, play in enumerate(plays):

        def turn_of(models: list[nn.Module], turn: Turn, play=play) -> None:
            for i, each in enumerate([*models[1].blocks, *models[2].blocks]):
                each.use = (i // 2 + turn.rank + turn.step) % 2 == 0
            play(*models, turn)

        turn_of(sharded, Turn(rank, world, step))
        for turn in turns(rank, world, step, torch.float64):
            turn_of(plain, turn)
        for mine, want in zip(sharded, plain, strict=True):
            if not overlap:
                assert_grads(mine, want, f"{play.__name__}, step {step}")
        for optimizer in (*ours, *theirs):
            optimizer.step()
            optimizer.zero_grad()
        for mine, want in zip(sharded, plain, strict=True):
            assert_params(mine, want, f"{play.__name__}, step {step}")


@pytest.mark.parametrize(
    ("make", "block", "overlap"),
    [
        pytest.param(
            SharedMemoryComm,
            Block,
            False,
            marks=pytest.mark.skipif(_ext.cpu() is None, reason="the C++ kernels are not built"),
        ),
        pytest.param(
            SharedMemoryComm,
            Sided,
            True,
            marks=pytest.mark.skipif(_ext.cpu() is None, reason="the C++ kernels are not built"),
        ),
        (ProcessGroupComm, Sided, False),
    ],
)
def test_two_models_in_one_graph_whose_parts_ranks_use_differently(
    make: type[Comm], block: type[nn.Module], overlap: bool
) -> None:
    run_ranks(trained, 2, make, block, overlap)

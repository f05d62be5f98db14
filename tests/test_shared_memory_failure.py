# SPDX-License-Identifier: Apache-2.0
"""Training over shared memory when a rank dies, stops early, or calls other units."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks, run_ranks_outcomes
from models import Block, Net, Scenario, Turn, build, check, mse

from fsdp_kernels import ShardedAdamW, _ext, fully_shard
from fsdp_kernels.comm import SharedMemoryComm, _arena

pytestmark = pytest.mark.skipif(_ext.cpu() is None, reason="the C++ kernels are not built")

shared = partial(fully_shard, units=Block, comm="shared_memory")
PREFIX = f"fsdp_kernels-test-{os.getpid()}-train-"
LIMIT_S = 10.0


def steps_until_it_fails(rank: int, world: int, ready: threading.Event) -> None:
    model = shared(build(Net))
    optimizer = ShardedAdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    for step in range(10**6):
        mse(model, Turn(rank, world, step, torch.float32))
        optimizer.step()
        optimizer.zero_grad()
        ready.set()  # two steps are through at least when it is looked at


def train_until_death(rank: int, world: int, victim: int, delay_s: float) -> tuple[str, float]:
    _arena.PREFIX = PREFIX
    ready = threading.Event()

    def die() -> None:
        ready.wait()
        threading.Event().wait(delay_s)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        threading.Thread(target=die, daemon=True).start()
    with pytest.raises(RuntimeError) as caught:
        steps_until_it_fails(rank, world, ready)
    return str(caught.value), time.monotonic()


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_that_is_killed_at_any_moment_of_a_step_is_named(seed: int) -> None:
    draw = random.Random(seed)
    world = 2 + seed % 2
    victim = draw.randrange(world)
    start = time.monotonic()
    outcomes = run_ranks_outcomes(train_until_death, world, victim, 0.05 * draw.random())
    assert outcomes[victim].died
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            message, when = outcome.value
            assert f"rank {victim} (process " in message, message
            assert ") has ended" in message, message
            assert when - start < LIMIT_S
    assert not list(Path(_arena.PLACE).glob(f"{PREFIX}*"))


def next_job(rank: int, world: int) -> None:
    _arena.PREFIX = PREFIX
    check(rank, world, Scenario(shard=shared, steps=2))


def test_the_next_job_starts_cleanly() -> None:
    run_ranks_outcomes(train_until_death, 2, 0, 0.0)
    run_ranks(next_job, 2)


def stop_early(rank: int, world: int, how: str) -> str:
    """Rank 1 goes after two steps."""
    model = shared(build(Net))
    optimizer = ShardedAdamW(model.parameters(), lr=1e-3)

    def steps(first: int, last: int) -> None:
        for step in range(first, last):
            mse(model, Turn(rank, world, step, torch.float32))
            optimizer.step()
            optimizer.zero_grad()

    steps(0, 2)
    if rank == 1:
        if how == "exits":
            os._exit(0)
        model.units[0].buckets[0].comm.close()
        return ""
    with pytest.raises(RuntimeError) as caught:
        steps(2, 4)
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "why"),
    [("exits", "has ended"), ("closes", "rank 1 has closed its communicator")],
)
def test_a_rank_that_stops_early_is_named_with_unit_and_operation(how: str, why: str) -> None:
    message = run_ranks_outcomes(stop_early, 2, how)[0].value
    assert message.startswith("fk.gather["), message
    assert "expected all_gather to complete on all 2 ranks (shared_memory), got on r" in message
    assert why in message


def skip_a_unit(rank: int, world: int) -> str:
    """Rank 1 leaves out a block: then nobody waits for what another one does."""
    model: Any = shared(build(Net, torch.float32))

    def step() -> None:
        x = model.inp(Turn(rank, world, 0, torch.float32).rand(2, 3))
        for index in (0, 1, 2) if rank == 0 else (0, 2):
            x = model.blocks[index](x)
        model.head(x).sum().backward()

    with pytest.raises(RuntimeError) as caught:
        step()
    return str(caught.value)


def test_a_rank_that_skips_a_unit_is_an_error_that_says_who_waits_in_what() -> None:
    texts = run_ranks(skip_a_unit, 2)
    assert all("every rank waits for another one: rank 0 in all_gather of fk" in t for t in texts)


def skips_its_first_backward(rank: int, world: int) -> str:
    """What the first backward sets up needs no process group: nobody waits for its time limit."""
    model = shared(build(Net))
    turn = Turn(rank, world, 0, torch.float32)
    if rank == 1:
        model(turn.rand(4, 3))
    with pytest.raises(RuntimeError) as caught:
        mse(model, turn)
    return str(caught.value)


def test_a_rank_that_skips_its_first_backward_is_named() -> None:
    for text in run_ranks(skips_its_first_backward, 2):
        assert "every rank waits for another one: rank 0 in allocate of fk.arena" in text
        assert "rank 1 in all_gather of fk.gather[root/0]" in text


def stops_calling(rank: int, world: int) -> str:
    """Rank 1 lives on, in its own code, after one step."""
    comm = SharedMemoryComm(timeout_s=5.0)
    model: Any = fully_shard(build(Net), units=Block, comm=comm)
    optimizer = ShardedAdamW(model.parameters(), lr=1e-3)
    mse(model, Turn(rank, world, 0, torch.float32))
    optimizer.step()
    if rank == 1:
        while comm.is_usable:
            threading.Event().wait(0.001)
        return ""
    with pytest.raises(RuntimeError) as caught:
        mse(model, Turn(rank, world, 1, torch.float32))
    return str(caught.value)


def test_a_rank_that_lives_but_stops_calling_is_named_at_the_time_limit() -> None:
    message = run_ranks(stops_calling, 2)[0]
    assert message.startswith("fk.gather["), message
    assert "expected all_gather to complete on all 2 ranks" in message
    assert "no word from rank 1" in message
    assert "(time limit 5 s): it is at number" in message
    assert "and computes" in message


def returns_early(rank: int, world: int) -> str:
    """Rank 1 returns from its program in an orderly way while others still train."""
    model = shared(build(Net))
    mse(model, Turn(rank, world, 0, torch.float32))
    if rank == 1:
        torch.distributed.destroy_process_group()
        os._exit(0)
    with pytest.raises(RuntimeError) as caught:
        mse(model, Turn(rank, world, 1, torch.float32))
    return str(caught.value)


def test_a_rank_that_leaves_after_destroying_its_group_is_told_at_once() -> None:
    message = run_ranks_outcomes(returns_early, 2)[0].value  # the time limit is the harness's
    assert "rank 1 (process " in message
    assert ") has ended" in message

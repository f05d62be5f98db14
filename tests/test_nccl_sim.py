# SPDX-License-Identifier: Apache-2.0
"""The NCCL communicator over simulated devices: the C++ programs of tests/sim, and the module."""

from __future__ import annotations

import subprocess

import nccl_sim
import pytest
import torch
from harness import run_ranks

SIM = nccl_sim.load()


PROGRAMS = ("test_table", "test_training", "test_errors", "test_lifetime")


def run(program: str, sanitizer: str | None = None) -> None:
    """Run all cases of a program, which prints what failed."""
    path = nccl_sim.build_program(program, sanitizer)
    ran = subprocess.run([str(path)], capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-8000:]


def test_the_simulation_itself() -> None:
    run("test_table")


def test_a_training_loop_gets_the_oracles_numbers_and_needs_every_wait() -> None:
    run("test_training")


def test_failures_end_the_communicator_with_their_whole_text() -> None:
    run("test_errors")


def test_beginning_and_end_of_a_communicator() -> None:
    run("test_lifetime")


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("sanitizer", list(nccl_sim.SANITIZERS))
def test_sanitizers_find_nothing(program: str, sanitizer: str) -> None:
    run(program, sanitizer)


# -- the module -----------------------------------------------------------------------------------


def communicator(rank: int, world: int, unique_id: bytes, **options: object) -> object:
    defaults = {
        "device": 0,
        "name": "test",
        "timeout_s": 20.0,
        "init_timeout_s": 20.0,
        "blocking": False,
        "min_ctas": 0,
        "max_ctas": 0,
        "cta_policy": -1,
        "registration": "local",
    }
    return SIM.Communicator(rank, world, unique_id, **{**defaults, **options})


def collectives(rank: int, world: int, ids: tuple[bytes, bytes], policy: str) -> None:
    SIM.configure(policy, seed=rank, chunk_bytes=64)
    comm = communicator(rank, world, ids[0])
    comm.open_reductions(ids[1])
    for step in range(3):
        shard = torch.arange(50.0) + 100 * rank + step
        full = torch.zeros(world, 50)
        gathered = comm.all_gather("g", full.data_ptr(), shard.data_ptr(), shard.nbytes, 0)
        gathered.wait(0)
        expected = torch.stack([torch.arange(50.0) + 100 * r + step for r in range(world)])
        assert torch.equal(full, expected)
        mine = torch.zeros(50, dtype=torch.bfloat16)
        low = full.bfloat16() * (rank + 1)
        reduced = comm.reduce_scatter(
            "r", mine.data_ptr(), low.data_ptr(), mine.numel(), "bfloat16", 0
        )
        assert reduced.event_id > gathered.event_id > 0
        reduced.synchronize()
        total = sum((full.bfloat16() * (r + 1))[rank].float() for r in range(world))
        assert torch.equal(mine, total.bfloat16())
    comm.close()
    del gathered, reduced  # they hold their events
    assert SIM.violations() == []
    assert set(SIM.live().values()) == {0}


@pytest.mark.parametrize("policy", ["lazy", "eager", "random", "round_robin"])
def test_the_module_moves_data_between_processes(policy: str) -> None:
    ids = SIM.unique_id(), SIM.unique_id()
    run_ranks(collectives, 3, ids, policy, timeout=30)

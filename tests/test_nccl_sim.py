# SPDX-License-Identifier: Apache-2.0
"""The NCCL communicator over simulated devices: the C++ programs of tests/sim, and the module."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import nccl_sim
import pytest
import torch
from harness import run_ranks

SIM = nccl_sim.load()

PROGRAMS = (
    *("test_table", "test_training", "test_errors", "test_abort", "test_capture"),
    *("test_lifetime", "test_memory", "test_threads"),
)


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


def test_the_memory_that_it_hands_out() -> None:
    run("test_memory")


def test_aborts_where_one_communicator_waits_for_another() -> None:
    run("test_abort")


def test_captures_of_graphs_beside_it() -> None:
    run("test_capture")


def test_several_host_threads_in_one_communicator() -> None:
    run("test_threads")


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("sanitizer", list(nccl_sim.SANITIZERS))
def test_sanitizers_find_nothing(program: str, sanitizer: str) -> None:
    run(program, sanitizer)


# -- the module -----------------------------------------------------------------------------------


def communicator(rank: int, world: int, unique_id: bytes, **options: object) -> Any:
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
        reduced.wait(0)
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


def thread_ranks(rank: int, world: int, ids: list[bytes]) -> None:
    """Two ranks as threads: a call that waited with Python's lock held would hang."""

    def one(rank: int) -> list[float]:
        comm = communicator(rank, 2, ids[0], device=rank)
        comm.open_reductions(ids[1])
        shard, full = torch.full((5,), rank + 1.0), torch.zeros(10)
        buffer = comm.allocate(100, True)
        comm.begin_group()
        ticket = comm.all_gather("g", full.data_ptr(), shard.data_ptr(), shard.nbytes, 0)
        comm.end_group(0)
        ticket.wait(0)
        ticket = comm.all_reduce("a", full.data_ptr(), full.numel(), "float32", "max", 0)
        ticket.wait(0)
        del ticket, buffer
        comm.close()
        return full.tolist()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, range(2))) == [[1.0] * 5 + [2.0] * 5] * 2
    assert SIM.violations() == []
    assert set(SIM.live().values()) == {0}


def test_no_call_waits_with_pythons_lock_held() -> None:
    run_ranks(thread_ranks, 1, [SIM.unique_id(), SIM.unique_id()], timeout=30)


def injected(rank: int, world: int, unique_id: bytes) -> None:
    comm = communicator(rank, world, unique_id)
    word = torch.ones(1)
    what = (word.data_ptr(), 1, "float32")
    with pytest.raises(ValueError, match="w: expected a reduction of sum, max, min, got 'mean'"):
        comm.all_reduce("w", *what, "mean", 0)
    SIM.clear_log()
    ticket = comm.all_reduce("w", *what, "sum", 0)
    ticket.wait(0)
    gathers = comm.gather_stream
    touched = word.data_ptr(), word.nbytes
    assert SIM.log() == [
        ("cudaEventRecord", 0, ticket.started_id),
        ("cudaStreamWaitEvent", gathers, ticket.started_id),
        ("ncclAllReduce", gathers, "test/gather", touched, touched),
        ("cudaEventRecord", gathers, ticket.event_id),
        ("cudaStreamWaitEvent", 0, ticket.event_id),
    ]
    SIM.inject("ncclAllReduce", 2, text="no route to rank 1")
    with pytest.raises(RuntimeError, match=r'w: .*"unhandled system error" from NCCL: no route to'):
        comm.all_reduce("w", *what, "sum", 0)
    assert comm.failure.startswith("w: expected all_reduce to complete on all 1 ranks (nccl)")
    comm.close()


def test_faults_and_the_log_are_pythons_too() -> None:
    run_ranks(injected, 1, SIM.unique_id(), timeout=30)


def compute_streams(rank: int, world: int, ids: list[bytes], drop: int) -> tuple[bool, bool]:
    """A collective between two copies on a compute stream of the device."""
    SIM.configure("lazy")
    comm = communicator(rank, world, ids[0])
    compute = SIM.create_stream()
    shard, full, seen = torch.zeros(4), torch.zeros(4 * world), torch.zeros(4 * world)
    value = torch.full((4,), rank + 1.0)
    SIM.drop_wait(drop)
    SIM.copy(compute, shard.data_ptr(), value.data_ptr(), value.nbytes)
    ticket = comm.all_gather("g", full.data_ptr(), shard.data_ptr(), shard.nbytes, compute)
    ticket.wait(compute)
    SIM.copy(compute, seen.data_ptr(), full.data_ptr(), full.nbytes)
    # What need not wait is done first.
    SIM.synchronize(comm.gather_stream if drop == 1 else compute)
    SIM.synchronize()
    assert SIM.waits() == 2
    comm.close()
    expected = torch.arange(1.0, world + 1).repeat_interleave(4)
    return torch.equal(seen, expected), bool(seen.isnan().any())


@pytest.mark.parametrize(
    ("drop", "equal", "nan"), [(0, True, False), (1, False, False), (2, False, True)]
)
def test_a_dropped_wait_shows_in_the_numbers(drop: int, equal: bool, nan: bool) -> None:
    assert run_ranks(compute_streams, 1, [SIM.unique_id()], drop, timeout=30) == [(equal, nan)]

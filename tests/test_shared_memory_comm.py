# SPDX-License-Identifier: Apache-2.0
"""Ranks that share memory: the contract of `Comm`, with and without gradient buckets."""

from __future__ import annotations

import pytest
import torch
from comm_contract import CommContract
from harness import run_ranks

from fsdp_kernels import _ext
from fsdp_kernels.comm import Comm, SharedMemoryComm

pytestmark = pytest.mark.skipif(_ext.cpu() is None, reason="the C++ kernels are not built")


class TestSharedMemoryComm(CommContract):
    """Small messages and gathers of ordinary buffers; reductions before their buckets are made."""

    @staticmethod
    def make_comm(rank: int, world: int) -> Comm:
        return SharedMemoryComm(timeout_s=20)


class TestSharedMemoryCommWithGradBuckets(CommContract):
    """Reductions through shared buckets, which some of the contract's buffers do not fit in."""

    @staticmethod
    def make_comm(rank: int, world: int) -> Comm:
        comm = SharedMemoryComm(timeout_s=20)
        comm.prepare_reductions(1 << 14)
        return comm


def sum_in_rank_order(rank: int, world: int) -> None:
    """In float32, sums of these in any other order differ."""
    comm = SharedMemoryComm()
    comm.prepare_reductions(1 << 10)
    for values, expected in (
        ([1e8, 1.0, -1e8], 0.0),
        ([1.0, 1e8, -1e8], 0.0),
        ([1e8, -1e8, 1.0], 1.0),
    ):
        full = comm.grads_buffer(2 * world, torch.float32, label="fk.reduce[a/0]")
        assert full is not None
        shard = torch.zeros(2)
        comm.reduce_scatter(shard, full.fill_(values[rank]), label="fk.reduce[a/0]").wait()
        assert shard.tolist() == [expected] * 2
        number = torch.tensor([values[rank]])
        comm.all_reduce(number, label="fk.norm").wait()
        assert number.item() == expected


def test_sums_are_in_rank_order_on_every_rank() -> None:
    run_ranks(sum_in_rank_order, 3)


def buckets_pass_on_their_memory(rank: int, world: int) -> None:
    """Three reductions in flight over two buckets of each rank; the third makes room itself."""
    comm = SharedMemoryComm()
    comm.prepare_reductions(1 << 10)
    shards, tickets = [torch.zeros(4) for _ in range(3)], []
    for number, shard in enumerate(shards):
        full = torch.full((4 * world,), float(10 * number + rank))
        tickets.append(comm.reduce_scatter(shard, full, label=f"fk.reduce[{number}/0]"))
    for ticket in reversed(tickets):
        ticket.wait()
    for number, shard in enumerate(shards):
        assert shard.tolist() == [world * 10.0 * number + world * (world - 1) / 2] * 4


def test_more_reductions_than_buckets() -> None:
    run_ranks(buckets_pass_on_their_memory, 3)

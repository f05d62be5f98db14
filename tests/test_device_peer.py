# SPDX-License-Identifier: Apache-2.0
"""`PeerMemory` on one CUDA device: several ranks in one process, and in two that share the device.

Torch's symmetric memory refuses two ranks on one device unless it is told to allow them; multicast
it then leaves out. What several devices would show is not here: links, switches, speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import peer_cases
import pytest
import torch
from device_tools import without_waiting
from harness import run_ranks
from peer_sim import Owner
from torch import Tensor

from fsdp_kernels import ops
from fsdp_kernels.comm._peer_grads import POSTED, SLOTS, PeerGrads
from fsdp_kernels.comm._peer_setup import CudaSide, why_no_symmetric_memory
from triton_ops import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class SharedRegion:
    """Memory of ranks that are in one process: all have packed before any of them reduces."""

    multicast = 0

    def __init__(self, memory: Sequence[Tensor], packed: list[Any]) -> None:
        self._memory = memory
        self._packed = packed

    def part(self, rank: int, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        return self._memory[rank][start : start + numel * dtype.itemsize].view(dtype)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        if channel == POSTED:
            for event in self._packed:
                torch.cuda.current_stream().wait_event(event)


@pytest.mark.gpu
@pytest.mark.parametrize(("world", "lend"), [(2, False), (3, False), (8, False), (3, True)])
def test_ranks_of_one_process(world: int, lend: bool) -> None:
    """The slots, streams and kernels of several ranks on one device: the reference's bits.

    What is lent is read by a kernel on the compute stream, which stands for the fused step.
    """
    device, numel = torch.device("cuda", 0), 5 * 1024
    nbytes = world * numel * 8
    memory = [torch.empty(SLOTS * nbytes, dtype=torch.uint8, device=device) for _ in range(world)]
    packed: list[Any] = []
    ranks = [
        PeerGrads(
            Owner(rank, world, device=device),
            CudaSide(),
            SharedRegion(memory, packed),
            nbytes,
            CudaSide().stream(device),
        )
        for rank in range(world)
    ]

    def reduce(sent: Sequence[Tensor], shards: Sequence[Tensor], number: int) -> None:
        label, dtype = f"fk.reduce[{number}/0]", sent[0].dtype
        packed.clear()
        for grads, full in zip(ranks, sent, strict=True):
            grads.begin(world * numel, dtype, label).copy_(full)
            packed.append(torch.cuda.current_stream().record_event())
        tickets = [
            grads.post(shard, label, lend=lend) for grads, shard in zip(ranks, shards, strict=True)
        ]
        for ticket, shard in zip(tickets, shards, strict=True):
            peers = ticket.peers()
            assert (peers is not None) == lend
            if peers is not None:
                ops.reduce(peers, shard)
            ticket.wait()

    for number, dtype in enumerate((*DTYPES, *DTYPES)):
        fulls = [torch.randn(world * numel).to(dtype) for _ in range(world)]
        sent = [full.to(device) for full in fulls]
        shards = [torch.empty(numel, dtype=dtype, device=device) for _ in range(world)]
        if number < len(DTYPES):  # compiles, uploads tables
            reduce(sent, shards, number)
        else:
            without_waiting(lambda sent=sent, shards=shards, n=number: reduce(sent, shards, n))
        for rank, shard in enumerate(shards):
            own = slice(rank * numel, (rank + 1) * numel)
            expected = torch.empty(numel, dtype=dtype)
            reference.reduce([full[own] for full in fulls], expected)
            assert torch.equal(shard.cpu(), expected), f"{dtype} on rank {rank}"


@pytest.fixture
def device() -> str:
    """A device that two processes share."""
    reason = why_no_symmetric_memory("cuda")
    if reason:
        pytest.skip(reason)
    return "cuda"


@pytest.mark.gpu
def test_sums_in_rank_order_and_the_contract(device: str) -> None:
    run_ranks(peer_cases.sums_and_contract, 2, device, fresh=True, timeout=40)


@pytest.mark.gpu
def test_training_equals_the_plain_model(device: str) -> None:
    run_ranks(peer_cases.train, 2, device, fresh=True, timeout=40)


@pytest.mark.gpu
def test_a_missing_rank_is_an_error_with_a_label(device: str) -> None:
    told, nothing = run_ranks(peer_cases.misses_a_reduction, 2, device, fresh=True, timeout=30)
    assert nothing == []
    assert told[0], "the device went on without the other rank"
    assert told[1].startswith("fk.reduce[third/0]: expected reduce_scatter to complete on all 2")


# ---- the same bodies without a device


def test_the_bodies_run_on_mapped_memory() -> None:
    run_ranks(peer_cases.sums_and_contract, 2, "cpu")
    run_ranks(peer_cases.steps_in_backward, 2, "cpu")
    told, nothing = run_ranks(peer_cases.misses_a_reduction, 2, "cpu")
    assert nothing == []
    assert [text.split(":")[0] for text in told] == ["fk.reduce[second/0]", "fk.reduce[third/0]"]
    assert all("expected reduce_scatter to complete on all 2 ranks (peer)" in t for t in told)

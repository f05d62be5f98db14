# SPDX-License-Identifier: Apache-2.0
"""What each strategy keeps on a rank and sends in a step: the table of docs/design.md, measured."""

from __future__ import annotations

import gc
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from test_shared_memory_shards import arena
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_kernels import ProcessGroupComm, ShardedAdamW, SharedMemoryComm, _ext, fully_shard, ops
from fsdp_kernels.comm import HybridComm, _group_ticket
from fsdp_kernels.comm.base import Comm, ReduceName, Ticket
from fsdp_kernels.comm.solo import SoloComm

DIM, DEPTH, BATCH, MICRO = 128, 8, 2, 3
LAYER = DIM * DIM * 4  # bytes of a unit in fp32; no shard of it is padded
PARAMS = LAYER * DEPTH


class Counting(ProcessGroupComm):
    """Counts the bytes that a rank must send at least, by what they are sent for."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self.sent: Counter[str] = Counter()

    def count(self, label: str, tensor: Tensor, times: int = 1) -> None:
        verb = label.split("[")[0].removeprefix("fk.")
        self.sent[verb] += Fraction(times * tensor.nbytes * (self.world - 1), self.world)

    def all_gather(self, full: Tensor, shard: Tensor, *, label: str) -> Ticket:
        self.count(label, full)
        return super().all_gather(full, shard, label=label)

    def reduce_scatter(
        self, shard: Tensor, full: Tensor, *, label: str, lend: bool = False
    ) -> Ticket:
        self.count(label, full)
        return super().reduce_scatter(shard, full, label=label)

    def all_reduce(self, tensor: Tensor, op: ReduceName = "sum", *, label: str) -> Ticket:
        self.count(label, tensor, 2)
        return super().all_reduce(tensor, op, label=label)


class Shared(SharedMemoryComm):
    """Counts the bytes of peers that a rank sums, and what takes the process group after all."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self._group = self.counting = Counting(group)
        real = ops.reduce

        def reduce(peers: list[Tensor], *args: Any, **kwargs: Any) -> None:
            self.counting.sent["reduce"] += sum(peer.nbytes for peer in peers[1:])
            real(peers, *args, **kwargs)

        ops.reduce = reduce


def connect(
    rank: int, world: int, strategy: str, rows: int, shares: bool
) -> tuple[Comm, list[Counting]]:
    """Make the communicator of a strategy and mesh out of counting ones."""
    if shares and rows == 1:
        comm = Shared()
        return comm, [comm.counting]
    if shares:
        mesh = init_device_mesh("cpu", (rows, world // rows))
        comm, across = Shared(mesh.get_group(1)), Counting(mesh.get_group(0))
        return HybridComm(comm, across, ProcessGroupComm()), [comm.counting, across]
    if strategy == "replicate":
        levels = [Counting()]
        return HybridComm(SoloComm(), levels[0], ProcessGroupComm()), levels
    if rows == 1:
        levels = [Counting()]
        return levels[0], levels
    mesh = init_device_mesh("cpu", (rows, world // rows))
    levels = [Counting(mesh.get_group(1)), Counting(mesh.get_group(0))]
    return HybridComm(*levels, ProcessGroupComm()), levels


def live_bytes() -> int:
    """Add up what this process's tensors hold, and its proportional part of shared memory."""
    mappings, shared = arena()
    _group_ticket._lent.cache_clear()
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, Tensor) and type(x) is not nn.Buffer]
    storages = {}
    for tensor in tensors:
        try:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        except (RuntimeError, NotImplementedError):
            continue  # a FlatShard has none of its own; its fragment is another tensor
    own = (n for at, n in storages.items() if not any(at in mapping for mapping in mappings))
    return shared + sum(own)


def measured(
    rank: int, world: int, strategy: str, rows: int, shares: bool
) -> tuple[int, dict[str, int]]:
    """Train with several micro-batches a step; the bytes held after one, and those sent in one."""
    comm, levels = connect(rank, world, strategy, rows, shares)
    before = live_bytes()
    model = nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(DEPTH)))
    fully_shard(model, units=nn.Linear, strategy=strategy, comm=comm)
    optimizer = ShardedAdamW(model.parameters(), lr=1e-3)
    x = torch.ones(BATCH, DIM)
    for _ in range(3):
        for level in levels:
            level.sent.clear()
        optimizer.zero_grad()
        for _ in range(MICRO):
            model(x).sum().backward()
        optimizer.step()
    dist.barrier()
    held = live_bytes() - before
    dist.barrier()  # a mapping that is gone changes its peers' proportions
    sent = {verb: int(sum(level.sent[verb] for level in levels)) for verb in ("gather", "reduce")}
    return held, sent


def expected(strategy: str, shards: int, replicas: int, shares: bool) -> tuple[int, dict[str, int]]:
    """Give the table's formulas, and this model's reuse of units: see `docs/design.md`."""
    if strategy == "replicate":
        shards, replicas = 1, shards * replicas
    shard = PARAMS // shards
    keeps = strategy in ("zero1", "zero2")
    # Forward and backward of each micro-batch; the last layer stays, and the first needs none.
    gathers = MICRO * (2 * DEPTH - 2) * LAYER if strategy == "zero3" else PARAMS
    full_params = PARAMS if keeps else 2 * LAYER if strategy == "zero3" else 0
    full_grads = PARAMS if strategy == "zero1" else LAYER
    reductions = 1 if strategy == "zero1" else MICRO
    if shares:
        gathers = full_params = 0
        full_grads = 2 * LAYER + (PARAMS if strategy == "zero1" else 0)
    held = full_params + full_grads + shard + shard + 2 * shard  # parameters, gradients, moments
    inside, across = Fraction(shards - 1, shards), Fraction(replicas - 1, replicas)
    sent = {
        "gather": int(gathers * inside),
        "reduce": int(reductions * (PARAMS * inside + 2 * shard * across)),
    }
    return held, sent


def check(strategy: str, rows: int, world: int, shares: bool) -> None:
    found = run_ranks(measured, world, strategy, rows, shares)
    want_held, want_sent = expected(strategy, world // rows, rows, shares)
    assert [sent for _, sent in found] == [want_sent] * world
    held = [held for held, _ in found]
    # Whose part a shared page is depends on who has touched it: ranks' parts are right in sum.
    for each in [sum(held) / world] if shares else held:
        # gloo's receive buffer, or the arena's epochs and messages, and small tensors.
        extra = each - want_held
        assert 0 <= extra <= LAYER + 64 * 1024, f"{extra / LAYER} layers too many"


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "zero1", "replicate"])
@pytest.mark.parametrize(("rows", "world"), [(1, 2), (2, 4)])
def test_bytes_kept_and_sent(rows: int, world: int, strategy: str) -> None:
    check(strategy, rows, world, shares=False)


@pytest.mark.skipif(_ext.cpu() is None, reason="the C++ kernels are not built")
@pytest.mark.parametrize(
    ("strategy", "rows", "world"),
    [("zero3", 1, 2), ("zero2", 1, 2), ("zero1", 1, 2), ("zero3", 2, 4)],
)
def test_bytes_kept_and_read_over_shared_memory(strategy: str, rows: int, world: int) -> None:
    check(strategy, rows, world, shares=True)

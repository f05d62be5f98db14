# SPDX-License-Identifier: Apache-2.0
"""What each strategy keeps on a rank and sends in a step: the table of docs/design.md, measured."""

from __future__ import annotations

import gc
from collections import Counter
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_kernels import ProcessGroupComm, ShardedAdamW, fully_shard
from fsdp_kernels.comm import HybridComm, process_group
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

    def reduce_scatter(self, shard: Tensor, full: Tensor, *, label: str) -> Ticket:
        self.count(label, full)
        return super().reduce_scatter(shard, full, label=label)

    def all_reduce(self, tensor: Tensor, op: ReduceName = "sum", *, label: str) -> Ticket:
        self.count(label, tensor, 2)
        return super().all_reduce(tensor, op, label=label)


def connect(rank: int, world: int, strategy: str, rows: int) -> tuple[Comm, list[Counting]]:
    """Make the communicator of a strategy and mesh out of counting ones."""
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
    """Add up the storages of this process's tensors, without those that hold no memory."""
    process_group._lent.cache_clear()
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, Tensor) and type(x) is not nn.Buffer]
    storages = {}
    for tensor in tensors:
        try:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        except (RuntimeError, NotImplementedError):
            continue  # a FlatShard has none of its own; its fragment is another tensor
    return sum(storages.values())


def measured(rank: int, world: int, strategy: str, rows: int) -> tuple[int, dict[str, int]]:
    """Train with several micro-batches a step; the bytes held after one, and those sent in one."""
    comm, levels = connect(rank, world, strategy, rows)
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
    held = live_bytes() - before
    sent = {verb: int(sum(level.sent[verb] for level in levels)) for verb in ("gather", "reduce")}
    return held, sent


def expected(strategy: str, shards: int, replicas: int) -> tuple[int, dict[str, int]]:
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
    held = full_params + full_grads + shard + shard + 2 * shard  # parameters, gradients, moments
    inside, across = Fraction(shards - 1, shards), Fraction(replicas - 1, replicas)
    sent = {
        "gather": int(gathers * inside),
        "reduce": int(reductions * (PARAMS * inside + 2 * shard * across)),
    }
    return held, sent


def check(rank: int, world: int, rows: int, strategy: str) -> None:
    held, sent = measured(rank, world, strategy, rows)
    want_held, want_sent = expected(strategy, world // rows, rows)
    assert sent == want_sent
    # gloo's receive buffer, and small tensors.
    extra = held - want_held
    assert 0 <= extra <= LAYER + 64 * 1024, f"{extra / LAYER} layers too many"


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "zero1", "replicate"])
@pytest.mark.parametrize(("rows", "world"), [(1, 2), (2, 4)])
def test_bytes_kept_and_sent(rows: int, world: int, strategy: str) -> None:
    run_ranks(check, world, rows, strategy)

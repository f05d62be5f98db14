# SPDX-License-Identifier: Apache-2.0
"""Peak bytes by arithmetic: every term of the bound is named, and the allocator is the witness."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import storage_bytes
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile

from fsdp_kernels import MixedPrecisionPolicy, ShardedAdamW, fully_shard

DIM, DEPTH, BATCH = 192, 8, 2
LAYER = DIM * DIM  # elements of one unit: a multiple of every shard's alignment: no padding


def allocations(prof: Any) -> list[tuple[int, int]]:
    """List what the profiler saw: (time, bytes allocated or, negative, freed)."""
    found, stack = [], list(prof.profiler.kineto_results.experimental_event_tree())
    while stack:
        node = stack.pop()
        stack.extend(node.children)
        if type(node.extra_fields).__name__ == "_ExtraFields_Allocation":
            found.append((node.start_time_ns, node.extra_fields.alloc_size))
    return found


def peak_bytes(run: Any) -> tuple[int, int]:
    """Run, and return the highest and the last number of bytes beyond those held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    now = peak = 0
    for _, size in sorted(allocations(prof), key=lambda event: event[0]):
        now += size
        peak = max(peak, now)
    return peak, now


def layers() -> nn.Module:
    """Layers whose biases and root parameters would blur the arithmetic are left out."""
    return nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(DEPTH)))


def step_peak(rank: int, world: int, prefetch: int, low: bool) -> None:
    dtype = torch.bfloat16 if low else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = fully_shard(layers(), units=nn.Linear, prefetch=prefetch, mp_policy=policy)
    optimizer = ShardedAdamW(model.parameters(), lr=1e-3)
    x = torch.ones(BATCH, DIM)

    def step() -> None:
        model(x).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    params = list(model.parameters())
    numel = LAYER * DEPTH
    moments = [
        optimizer.state[p][key].to_local() for p in params for key in ("exp_avg", "exp_avg_sq")
    ]
    assert storage_bytes([p.to_local() for p in params]) == 4 * numel // world
    assert storage_bytes(moments) == 8 * numel // world

    # What stays between steps, besides masters and moments, is pool memory; drop it to see a peak.
    pools = [params[0].bucket.resources.params, params[0].bucket.resources.grads]
    full_params = (1 + prefetch) * LAYER * dtype.itemsize
    reduce_bucket = LAYER * 4
    assert pools[0].peak_bytes == full_params
    assert pools[1].peak_bytes == reduce_bucket
    for pool in pools:
        pool.trim()
    grads = 4 * numel // world
    weight_grad = (
        LAYER * dtype.itemsize
    )  # the gradient that autograd hands over, before it is packed
    activations = 3 * (DEPTH + 2) * BATCH * DIM * 4
    slack = 64 * 1024
    peak, last = peak_bytes(step)
    reduced = LAYER * 4 // world  # a reduction's target where it cannot be the gradient itself
    bound = full_params + pools[1].peak_bytes + weight_grad + grads + reduced + activations + slack
    assert peak <= bound, f"{peak} bytes at the peak, {bound} allowed"
    assert peak < 4 * numel, "no better than holding the whole model"
    assert last <= full_params + pools[1].peak_bytes + grads + slack, f"{last} bytes stay"


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_peak_bytes_of_shards_and_full_buckets(prefetch: int) -> None:
    run_ranks(step_peak, 2, prefetch, False)


def test_peak_bytes_with_low_precision_compute() -> None:
    run_ranks(step_peak, 3, 1, True)


def graph_holds_no_weights(rank: int, world: int) -> None:
    """Between forward and backward the graph must not keep a full buffer alive."""
    model = fully_shard(layers(), units=nn.Linear, prefetch=0)
    x = torch.ones(BATCH, DIM)
    held: list[Tensor] = []
    for _ in range(2):
        held.clear()
        peak, last = peak_bytes(lambda: held.append(model(x).sum()))
    activations = 2 * (DEPTH + 2) * BATCH * DIM * 4
    assert peak < 2 * LAYER * 4 + activations + 64 * 1024
    assert last < LAYER * 4 + activations + 64 * 1024, f"{last} bytes after a forward"
    held[0].backward()
    model.zero_grad()


def test_the_graph_holds_no_weights() -> None:
    run_ranks(graph_holds_no_weights, 2)


class Remembers(nn.Module):
    """Keeps a weak reference to the storage of a result that backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.exp(self.layer(x))  # exp saves its own result
        self.seen.append(StorageWeakRef(hidden.untyped_storage()))
        return hidden * 2


def dropped_graphs(rank: int, world: int) -> None:
    """A graph dropped without a backward leaves nothing behind; no garbage collector helps."""
    model = fully_shard(Remembers())
    gc.collect()
    gc.disable()
    out = model(torch.ones(2, 4))
    assert not model.seen[0].expired()
    del out
    assert model.seen[0].expired(), "a dropped graph keeps its activations"
    model(torch.ones(2, 4)).sum().backward()
    assert model.seen[1].expired(), "a finished graph keeps its activations"


def test_a_dropped_graph_frees_its_activations() -> None:
    run_ranks(dropped_graphs, 1)

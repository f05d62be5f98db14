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


def step_peak(
    rank: int, world: int, prefetch: int, low: bool, overlap: bool = False
) -> tuple[int, int]:
    """Watch the first steps, in which everything that training holds is allocated.

    Returns:
        The highest and the last number of bytes.
    """
    dtype = torch.bfloat16 if low else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = fully_shard(
        layers(), units=nn.Linear, prefetch=prefetch, mp_policy=policy, comm="process_group"
    )
    optimizer = ShardedAdamW(model.parameters(), lr=1e-3, overlap_backward=overlap)
    x = torch.ones(BATCH, DIM)

    def steps() -> None:
        for _ in range(3):
            model(x).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    peak, last = peak_bytes(steps)
    params = list(model.parameters())
    numel = LAYER * DEPTH
    states = [optimizer.state[p] for p in params]
    moments = storage_bytes(
        [s[key].to_local() for s in states for key in ("exp_avg", "exp_avg_sq")]
    )
    assert storage_bytes([p.to_local() for p in params]) == 4 * numel // world
    assert moments == 8 * numel // world

    full_params = (1 + prefetch) * LAYER * dtype.itemsize
    reduce_bucket = LAYER * 4
    pools = params[0].bucket.resources
    assert pools.params.peak_bytes == full_params
    assert pools.grads.peak_bytes == reduce_bucket

    # Steps in backward leave none; at its end, the last units' gradients come at once.
    shard_grads = 4 * LAYER // world * (1 if overlap else DEPTH)
    reduced = LAYER * 4 // world  # a reduction's target where it cannot be the gradient itself
    weight_grad = (
        LAYER * dtype.itemsize * (2 + prefetch if overlap else 1)
    )  # what autograd hands over, before it is packed
    activations = 3 * (DEPTH + 2) * BATCH * DIM * 4
    slack = 64 * 1024
    # gloo copies what it moves: a buffer for each gather under way, and one for the reduction. Its
    # threads let go of the last copies when the next come.
    staging = max(1, prefetch) * LAYER * dtype.itemsize + LAYER * 4
    steady = moments + shard_grads + full_params + reduce_bucket
    bound = steady + reduced + weight_grad + staging + activations + slack
    assert peak <= bound, f"{peak} bytes at the peak, {bound} allowed"
    steady -= shard_grads if overlap else 0
    assert last <= steady + staging + slack, f"{last} bytes stay, {steady + staging} allowed"
    return peak, last


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_peak_bytes_of_shards_and_full_buckets(prefetch: int) -> None:
    run_ranks(step_peak, 2, prefetch, False)


def test_peak_bytes_with_low_precision_compute() -> None:
    run_ranks(step_peak, 3, 1, True)


def test_peak_bytes_of_steps_in_backward() -> None:
    """The shards of gradients are gone: nearly all of them at the peak, all at rest."""
    at_end, in_backward = (
        run_ranks(step_peak, 2, 0, False, overlap)[0] for overlap in (False, True)
    )
    shards = 4 * LAYER * DEPTH // 2
    assert at_end[0] - in_backward[0] >= shards - 3 * LAYER * 4, (at_end, in_backward)
    assert at_end[1] - in_backward[1] >= shards - 64 * 1024, (at_end, in_backward)


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

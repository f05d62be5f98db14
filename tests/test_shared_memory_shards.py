# SPDX-License-Identifier: Apache-2.0
"""A rank's shard over shared memory: once for all at rest, private where it is edited."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import Block, Net, Turn, build
from torch import Tensor, nn

from fsdp_kernels import (
    MixedPrecisionPolicy,
    ShardedAdamW,
    _ext,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
)
from fsdp_kernels.bucket import Bucket
from fsdp_kernels.comm._arena_setup import PLACE
from fsdp_kernels.flat_shard import FlatShard

pytestmark = pytest.mark.skipif(_ext.cpu() is None, reason="the C++ kernels are not built")


def buckets_of(model: nn.Module) -> list[Bucket]:
    return [bucket for unit in model.units for bucket in unit.buckets]


# -- at rest --------------------------------------------------------------------------------------


def arena() -> tuple[list[range], int]:
    """Where this process has mapped memory that ranks share, and its proportional bytes there.

    What it wrote to a private mapping counts in full.
    """
    places, pss, inside = [], 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            words = line.split()
            if not words[0].endswith(":"):
                inside = len(words) > 5 and words[5].startswith(PLACE)
                if inside:
                    start, stop = (int(word, 16) for word in words[0].split("-"))
                    places.append(range(start, stop))
            elif inside and words[0] == "Pss:":
                pss += int(words[1]) * 1024
    return places, pss


def storages() -> dict[int, int]:
    """Address and size of the memory that tensors of this process own."""
    gc.collect()
    found = {}
    for item in gc.get_objects():
        if issubclass(type(item), Tensor) and not issubclass(type(item), FlatShard):
            storage = item.untyped_storage()
            if storage.resizable():  # what is lent to a collective is somebody else's memory
                found[storage.data_ptr()] = storage.nbytes()
    return found


DIM, DEPTH = 512, 6
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "ours": partial(ShardedAdamW, lr=1e-3, max_grad_norm=1.0),
    "torch": partial(torch.optim.AdamW, lr=1e-3),
}


def at_rest(rank: int, world: int, name: str) -> tuple[int, int]:
    """Proportional bytes of the arena, and bytes of all other tensors, after steps."""
    before = storages()
    _, mapped_before = arena()
    model = nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(DEPTH)))
    fully_shard(model, units=nn.Linear, comm="shared_memory")
    optimizer = OPTIMIZERS[name](model.parameters())
    x = torch.ones(2, DIM)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
    if name == "torch":  # the next gather takes over what it wrote
        with torch.no_grad():
            model(x)
    dist.barrier()
    places, mapped = arena()
    dist.barrier()
    live = storages()
    outside = {
        at: nbytes
        for at, nbytes in live.items()
        if at not in before and not any(at in place for place in places)
    }
    return mapped - mapped_before, sum(outside.values())


@pytest.mark.parametrize(("world", "name"), [(2, "ours"), (4, "ours"), (2, "torch")])
def test_at_rest_there_is_one_copy_of_everything(world: int, name: str) -> None:
    found = run_ranks(at_rest, world, name)
    mapped, tensors = (sum(column) for column in zip(*found, strict=True))
    params, largest = DIM * DIM * DEPTH * 4, DIM * DIM * 4
    one_process = 4 * params  # parameters, gradients and two moments
    assert mapped + tensors <= 1.15 * one_process + 2 * world * largest
    assert tensors <= 3 * params + world * 64 * 1024


# -- edits ----------------------------------------------------------------------------------------


class Rig:
    """A model with two optimizers on every bucket, and ways to write its parameters."""

    def __init__(self, comm: str, kind: str) -> None:
        model = build(Net, torch.bfloat16 if kind == "bf16" else torch.float32)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        if kind == "fp32, bf16 compute":
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        self.model = fully_shard(model, units=Block, comm=comm, mp_policy=policy)
        self.first = ShardedAdamW(self.model.parameters(), lr=1e-2)
        self.second = ShardedAdamW(self.model.parameters(), lr=1e-2, amsgrad=True)
        self.torch = torch.optim.SGD(self.model.parameters(), lr=1e-1)
        self.kept = {name: p.to_local() for name, p in self.model.named_parameters()}
        self.at = {name: local.data_ptr() for name, local in self.kept.items()}

    @property
    def inp(self) -> Any:
        return self.model.inp.weight

    def shown(self) -> list[Tensor]:
        """What every fragment shows now, at the address where it has been from the first."""
        for name, p in self.model.named_parameters():
            assert p.to_local().data_ptr() == self.at[name]
        return [local.clone() for local in self.kept.values()]

    def peers_read(self) -> list[Tensor]:
        """This rank's bytes as the others see them, where there is such a place."""
        places = [bucket.placed for bucket in buckets_of(self.model)]
        return [place.shard.clone() for place in places if place is not None]

    def gather(self) -> None:
        with torch.no_grad():
            self.model(torch.ones(2, 3, dtype=self.inp.dtype))

    def step(self, optimizer: torch.optim.Optimizer, turn: Turn) -> None:
        dtype = self.inp.dtype
        self.model(turn.rand(4, 3).to(dtype)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def through_numpy(rig: Rig) -> None:
    """Written behind every counter's back."""
    local = rig.kept["blocks.1.up.weight"]
    local.view(torch.int16 if local.dtype == torch.bfloat16 else torch.int32).numpy()[:3] = 0


def through_full_params(rig: Rig) -> None:
    with rig.model.full_params():
        rig.model.blocks[0].up.weight[2].fill_(0.375)


def through_a_load(rig: Rig) -> None:
    state = full_state_dict(rig.model, rank0_only=False)
    load_full_state_dict(rig.model, {name: value * 0.5 for name, value in state.items()})


EDITS: list[Callable[[Rig], Any]] = [
    lambda rig: rig.inp.clamp_(-0.2, 0.2),
    lambda rig: rig.inp.to_local().mul_(0.75),
    lambda rig: rig.kept["blocks.2.down.bias"].detach().fill_(0.125),
    lambda rig: rig.inp.data.add_(0.25),
    through_full_params,
    through_a_load,
    lambda rig: rig.torch.step(),
]


def history(rank: int, world: int, comm: str, kind: str) -> list[list[Tensor]]:
    """Edit in every way, then gather or step; what the fragments showed all along."""
    rig = Rig(comm, kind)
    found = []
    edits = [(edit, True) for edit in EDITS] + [(edit, False) for edit in [*EDITS, through_numpy]]
    optimizers = [rig.first, rig.second, rig.torch]
    for number, (edit, gathers) in enumerate(edits):
        turn = Turn(rank, world, number, torch.float32)
        rig.step(optimizers[number % 3], turn)  # what is edited next is what some step left
        rig.gather()
        mse_like = rig.model(turn.rand(4, 3).to(rig.inp.dtype)).float().square().sum()
        mse_like.backward()
        before = rig.peers_read()
        with torch.no_grad():
            edit(rig)
        found.append(rig.shown())
        assert all(map(torch.equal, rig.peers_read(), before)), "an edit reached the peers at once"
        if gathers:
            rig.gather()
        else:
            optimizers[number % 2].step()
        rig.torch.zero_grad()
        found.append(rig.shown())
        for bucket in buckets_of(rig.model):
            assert bucket.master_view is None or not bucket.master_view.is_written()
    rig.gather()
    for bucket in buckets_of(rig.model):
        assert torch.equal(bucket.shard_params, bucket.shard_master.to(bucket.compute_dtype))
    found.append(list(full_state_dict(rig.model, rank0_only=False).values()))
    return found


def same_history(rank: int, world: int, kind: str) -> None:
    shared, apart = (history(rank, world, c, kind) for c in ("shared_memory", "process_group"))
    for place, (mine, other) in enumerate(zip(shared, apart, strict=True)):
        assert all(map(torch.equal, mine, other)), f"after action {place}"


@pytest.mark.parametrize("kind", ["fp32", "fp32, bf16 compute", "bf16"])
def test_edits_and_steps_have_the_bits_that_they_have_without_shared_memory(kind: str) -> None:
    """Two ranks: every sum of two is the same in any order."""
    run_ranks(same_history, 2, kind)


def neighbours(rank: int, world: int) -> None:
    """All ranks' shards lie in one page. Each rank's copy of it has old bytes of the others."""
    model = fully_shard(nn.Linear(5, 6, bias=False), comm="shared_memory")
    (bucket,) = buckets_of(model)
    assert bucket.placed.full.numel() < mmap.PAGESIZE
    optimizer = ShardedAdamW(model.parameters(), lr=1e-2)
    local = model.weight.to_local()

    def check(want: list[float]) -> None:
        values = model.weight.full_tensor().view(-1)
        parts = [bucket.layout.fragment(0, peer) for peer in range(world)]
        for part, value in zip(parts, want, strict=True):
            assert bool((values[part.start : part.stop] == value).all())
        assert bool((local == want[rank]).all())

    def gather() -> None:
        with torch.no_grad():
            model(torch.ones(1, 5))

    with torch.no_grad():
        local.fill_(rank)
    gather()
    check([0, 1, 2])
    for editor in range(world):
        if rank == editor:  # its page is a copy now
            with torch.no_grad():
                local.add_(10)
        want = [peer + (10 if peer <= editor else 0) for peer in range(world)]
        check(want)
        gather()
        check(want)
    # A step writes what peers read, beside pages that an edit had copied.
    if rank == 1:
        with torch.no_grad():
            local.fill_(7)
    check([10, 7, 12])
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.step()
    check([10, 7, 12])
    gather()
    check([10, 7, 12])


def test_a_page_that_several_ranks_shards_share() -> None:
    run_ranks(neighbours, 3)


def closed(rank: int, world: int) -> None:
    """A shard outlives communicator and model, and an edit survives with it."""
    model = fully_shard(build(Net), units=Block, comm="shared_memory")
    local = model.inp.weight.to_local()
    with torch.no_grad():
        local.fill_(3.0)
    bucket = model.units[0].buckets[0]
    other = bucket.shard_params.clone()
    bucket.comm.close()
    del model, bucket
    gc.collect()
    assert bool((local == 3.0).all())
    local.fill_(4.0)
    assert bool((local == 4.0).all())
    assert other.numel() > 0


def test_a_shard_outlives_its_communicator() -> None:
    run_ranks(closed, 2)

# SPDX-License-Identifier: Apache-2.0
"""Training over shared memory: the numbers, and what one place for all ranks must not change."""

from __future__ import annotations

import gc
import logging
import threading
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import (
    Block,
    Net,
    Routed,
    Scenario,
    Turn,
    adamw,
    build,
    check_all,
    full_params,
    mse,
    sharded_adamw,
    train,
)
from torch import Tensor, nn

from fsdp_kernels import MixedPrecisionPolicy, ShardedAdamW, ShardedModule, _ext, fully_shard
from fsdp_kernels.comm import _arena, pick

pytestmark = pytest.mark.skipif(_ext.cpu() is None, reason="the C++ kernels are not built")

shared = partial(fully_shard, units=Block, comm="shared_memory")


def bottom_up(model: nn.Module) -> nn.Module:
    """Shard the blocks one by one, then what is left: the root adopts their buckets."""
    for block in model.blocks:
        fully_shard(block, comm="shared_memory")
    return fully_shard(model, comm="shared_memory")


def accumulated(model: nn.Module, turn: Turn) -> Tensor:
    with turn.no_sync(model):
        first = mse(model, turn)
    return first + mse(model, turn)


def evaluated(model: nn.Module, turn: Turn) -> Tensor:
    """Evaluate in between, and keep a loss that is never run backward."""
    with torch.no_grad():
        model(turn.rand(2, 3))
    model(turn.rand(2, 3)).sum()
    loss = mse(model, turn)
    with torch.inference_mode():
        model(turn.rand(2, 3))
    return loss


def routed(model: nn.Module, turn: Turn) -> Tensor:
    return turn.backward(model(turn.rand(4, 3), turn.step % 3).square().mean())


def edited(model: nn.Module, step: int) -> None:
    """Edit parameters between steps: other names each time, on every rank alike."""
    for number, p in enumerate(model.parameters()):
        if (number + step) % 3 == 0:
            with torch.no_grad():
                p.clamp_(-0.2, 0.2)


torch_adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
SCENARIOS = [
    Scenario(shard=shared),
    Scenario(shard=partial(shared, prefetch=0), play=evaluated),
    Scenario(shard=partial(shared, prefetch=2), play=accumulated),
    Scenario(shard=bottom_up, before=edited),
    Scenario(shard=shared, optimizer=torch_adamw, oracle=adamw, play=evaluated),
    Scenario(partial(Routed), routed, shard=partial(fully_shard, comm="shared_memory")),
    Scenario(shard=shared, dtype=torch.float32, fed=True, rtol=1e-5),
]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_numbers_are_those_of_the_unsharded_model(world: int) -> None:
    run_ranks(check_all, world, *SCENARIOS)


def same_as_process_group(rank: int, world: int) -> None:
    """bf16 compute over two ranks: every sum of two is the same in any order."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    for comm in ("shared_memory", "process_group"):
        model = fully_shard(build(Net), units=Block, comm=comm, mp_policy=policy)
        optimizer = ShardedAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.1)
        for step in range(4):
            model(
                Turn(rank, world, step, torch.float32).rand(4, 3)
            ).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(full_params(model))
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


def test_bits_are_those_of_the_process_group() -> None:
    run_ranks(same_as_process_group, 2)


# -- one place for all ----------------------------------------------------------------------------


def unshard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, ShardedModule):
            module.unshard()


def reshard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, ShardedModule):
            module.reshard()


def nothing_is_copied(rank: int, world: int) -> None:
    """What one rank's step writes another rank reads in the same memory."""
    model = shared(build(Net))
    buckets = [bucket for unit in model.units for bucket in unit.buckets]
    assert all(bucket.placed is not None for bucket in buckets)
    mse(model, Turn(rank, world, 0, torch.float32))
    pools = buckets[0].resources
    assert pools.params.allocated_bytes == pools.grads.allocated_bytes == 0
    unshard(model)
    for bucket in buckets:
        assert bucket.full_params.data_ptr() == bucket.placed.full.data_ptr()
    reshard(model)


def test_full_parameters_and_gradients_take_no_memory_of_a_ranks_own() -> None:
    run_ranks(nothing_is_copied, 2)


def never_aliases(rank: int, world: int) -> None:
    """What is written through `to_local` while others read is published by the next gather."""
    model = shared(build(Net))
    want = {name: p.full_tensor() for name, p in model.named_parameters()}
    unshard(model)
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().fill_(7.0)
    dist.barrier()
    for unit in model.units:
        for bucket in unit.buckets:
            for name, leaf in zip(bucket.names, bucket.leaves, strict=True):
                assert torch.equal(leaf, want[name]), name
    dist.barrier()
    reshard(model)
    unshard(model)
    for unit in model.units:
        for bucket in unit.buckets:
            assert all(bool((leaf == 7.0).all()) for leaf in bucket.leaves)
    reshard(model)


def test_to_local_never_aliases_what_peers_read() -> None:
    run_ranks(never_aliases, 3)


def stepped_while_read(rank: int, world: int, fused: bool) -> None:
    """A rank steps while another one still reads what the step writes in place."""
    model = shared(build(Net))
    optimizer = (sharded_adamw if fused else torch_adamw)(model.parameters())
    for step in range(2):
        mse(model, Turn(rank, world, step, torch.float32))
        unshard(model)
        dist.barrier()
        if rank == 1:
            leaves = [leaf for u in model.units for b in u.buckets for leaf in b.leaves]
            before = [leaf.clone() for leaf in leaves]
            for _ in range(100):  # long enough for a rank that does not wait
                threading.Event().wait(0.001)
                assert all(map(torch.equal, leaves, before)), "a step was seen half"
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.ones(2, 3))  # publishes what another optimizer wrote


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_waits_until_nobody_reads_what_it_writes(fused: bool) -> None:
    run_ranks(stepped_while_read, 2, fused)


class Writes(Block):
    """Writes its gathered weight behind torch's back."""

    writes = False

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.writes:
            self.up.weight.data.fill_(9.0)
        return out


def written(rank: int, world: int) -> list[str]:
    def play(model: nn.Module, turn: Turn) -> Tensor:
        loss = mse(model, turn)
        for block in model.blocks:
            block.writes = turn.sharded and (rank, turn.step) == (1, 1)
        with torch.no_grad():
            model(turn.rand(2, 3))
        for block in model.blocks:
            block.writes = False
        return loss

    shard = partial(fully_shard, units=Writes, comm="shared_memory")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(rank, world, Scenario(partial(Net, block=Writes), play, shard=shard))
    return [str(w.message) for w in caught if "no in-place change" in str(w.message)]


def test_a_write_through_data_is_dropped_and_told() -> None:
    quiet, told = run_ranks(written, 2)
    assert quiet == []
    assert len(told) == 3
    assert told[0].startswith("bucket 'blocks.0/0': expected no in-place change of gathered param")


def in_place(rank: int, world: int) -> None:
    model = shared(build(Net))
    want = full_params(model)
    unshard(model)
    with torch.no_grad():
        if rank == 1:
            model.head.weight.fill_(5.0)
    dist.barrier()
    assert torch.equal(model.head.weight, want["head.weight"]) == (rank == 0)
    dist.barrier()
    if rank == 1:
        with pytest.raises(RuntimeError, match=r"'head\.weight': expected no in-place change"):
            model.reshard()
    reshard(model)
    unshard(model)
    assert torch.equal(model.head.weight, want["head.weight"])
    reshard(model)


def test_an_in_place_edit_raises_and_is_reverted() -> None:
    run_ranks(in_place, 2)


class Stashing(Block):
    """Keeps a view of a weight beyond its forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.stash = self.up.weight[1:3].detach()
        return super().forward(x)


def stashed(rank: int, world: int) -> list[str]:
    shard = partial(fully_shard, units=Stashing, comm="shared_memory")
    model = shard(build(partial(Net, block=Stashing)))
    optimizer = ShardedAdamW(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            want = [block.up.weight.full_tensor()[1:3] for block in model.blocks]
            mse(model, Turn(rank, world, step, torch.float32))
            kept = [block.stash for block in model.blocks]
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.ones(2, 3))  # publishes what the step wrote
            dist.barrier()
            assert all(torch.equal(a, b) for a, b in zip(kept, want, strict=True)), step
    return [str(w.message) for w in caught if "expected nobody to hold" in str(w.message)]


def test_a_view_that_a_module_keeps_shows_what_it_showed() -> None:
    for told in run_ranks(stashed, 2):
        assert len(told) == 1
        assert told[0].startswith("bucket 'blocks.")


# -- memory ---------------------------------------------------------------------------------------


def smaps_bytes(field: str) -> int:
    with open("/proc/self/smaps_rollup") as file:
        (line,) = [line for line in file if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def gone(rank: int, world: int) -> None:
    """Memory goes back with the last model; while one lives, the next joins its communicator."""
    before = smaps_bytes("Pss_Shmem")
    first = shared(build(Net))
    second = shared(build(Net))
    comm = first.units[0].buckets[0].comm
    assert second.units[0].buckets[0].comm is comm
    reference = pick._shared_comms[dist.group.WORLD]
    del first, second, comm
    gc.collect()
    assert reference() is None
    dist.barrier()
    assert smaps_bytes("Pss_Shmem") <= before
    shared(build(Net))


def test_memory_goes_back_with_the_last_model() -> None:
    run_ranks(gone, 2)


def log_lines() -> list[str]:
    lines: list[str] = []

    class Log(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("fsdp_kernels").addHandler(Log())
    return lines


def short(rank: int, world: int) -> list[str]:
    """There is room for what is asked first, and too little for gradients."""
    lines = log_lines()
    real = _arena.Arena.reserve
    left = [1]

    def reserve(self: Any, nbytes: int, *, spare_nbytes: int = 0) -> None:
        left[0] -= 1
        real(self, nbytes if left[0] >= 0 else 1 << 60, spare_nbytes=spare_nbytes)

    _arena.Arena.reserve = reserve  # type: ignore[method-assign]
    check_all(rank, world, Scenario(shard=shared, steps=2))
    return lines


def test_reductions_take_the_process_group_where_there_is_no_room_for_gradients() -> None:
    first, second = run_ranks(short, 2)
    assert len(first) == 1
    assert first[0].startswith("fk.reduce: gradients take the process group: shared memory: exp")
    assert second == []


def too_large(rank: int, world: int) -> str:
    real = _arena.Arena.reserve

    def grow(self: Any, nbytes: int, *, spare_nbytes: int = 0) -> None:
        real(self, nbytes, spare_nbytes=1 << 60)

    _arena.Arena.reserve = grow  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as caught:
        shared(build(Net))
    return str(caught.value)


def test_too_little_memory_is_an_error_before_anything_is_changed() -> None:
    first, second = run_ranks(too_large, 2)
    assert first == second
    assert first.startswith("shared memory: expected 1099511627776.")
    assert " MiB free in /dev/shm, got " in first

# SPDX-License-Identifier: Apache-2.0
"""Every strategy, plain and over a 2-D mesh: the numbers of the unsharded model, and refusals."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_activation_checkpointing
import test_checkpoint
import test_control_flow
import test_edits
import test_failed_gradients
import test_left_over
import test_mixed_precision
import test_torch_optim
import test_weights
import torch
import torch.distributed as dist
from harness import run_ranks
from models import (
    Block,
    Net,
    Routed,
    Scenario,
    Sided,
    Turn,
    adamw,
    build,
    by_block,
    check_all,
    full_params,
    lopsided,
    mse,
    sharded_adamw,
    varied,
)
from pairs import Pair, no_sync
from test_checkpoint import Odd
from test_numbers import accumulate, clipped_by_hand, clipping, routed, scheduled
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh

from fsdp_kernels import (
    ProcessGroupComm,
    ShardedAdamW,
    checkpoint,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
)
from fsdp_kernels.comm import HybridComm

Body = Callable[..., Any]

STRATEGIES = ("zero3", "zero2", "zero1", "replicate")
GRIDS = [
    *((strategy, 1, world) for strategy in STRATEGIES[1:] for world in (2, 3)),
    *((strategy, 2, 4) for strategy in STRATEGIES),
]
"""Strategy, replicas in the mesh, ranks; without a mesh "zero3" is what all other tests do."""

by_grid = pytest.mark.parametrize(("strategy", "rows", "world"), GRIDS)


def choose(strategy: str, rows: int = 1, comm: str = "process_group") -> None:
    """Make a strategy and a mesh what this process's calls of `fully_shard` mean by default."""
    mesh = None
    if rows > 1:
        mesh = init_device_mesh("cpu", (rows, dist.get_world_size() // rows))
    fully_shard.__kwdefaults__.update(strategy=strategy, mesh=mesh, comm=comm)


def bodies(rank: int, world: int, strategy: str, rows: int, calls: Sequence[Body]) -> None:
    """Do what other tests do, with another strategy and mesh."""
    choose(strategy, rows)
    for call in calls:
        try:
            call(rank, world)
        except Exception as error:
            error.add_note(f"in {call}")
            raise


# The numbers.


def numbers(rank: int, world: int, strategy: str, rows: int) -> None:
    choose(strategy, rows)
    base = Scenario(steps=3)
    fp32 = varied(base, dtype=torch.float32, fed=True)
    if world == 2:
        check_all(rank, world, base, fp32, varied(base, optimizer=adamw, shard=bottom_up))
        return
    twice = varied(base, play=partial(accumulate, (False, False)))
    check_all(
        rank,
        world,
        base,
        fp32,
        twice,
        varied(twice, play=partial(accumulate, (True, False, True, False))),
        varied(twice, play=lopsided, build=partial(Net, block=Sided)),
        varied(base, build=Routed, play=routed, shard=fully_shard, steps=4),
        varied(base, optimizer=clipping, oracle=clipping, steps=2),
    )
    bf16 = partial(test_mixed_precision.fp32_master, make=sharded_adamw)
    bodies(rank, world, strategy, rows, [clipped_by_hand, bf16])


def shared(rank: int, world: int) -> None:
    """Over shared memory: inside a row at most, with a process group between the rows."""
    twice = Scenario(play=partial(accumulate, (False, False)), steps=2)
    for strategy in STRATEGIES:
        for rows in (1, 2):
            choose(strategy, rows, "shared_memory")
            check_all(rank, world, twice, varied(twice, dtype=torch.float32, fed=True, play=mse))


def bottom_up(model: nn.Module) -> nn.Module:
    """Shard module by module, as with torch's `fully_shard`."""
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


@by_grid
def test_training_equals_the_unsharded_model(strategy: str, rows: int, world: int) -> None:
    run_ranks(numbers, world, strategy, rows)


def test_training_over_shared_memory() -> None:
    run_ranks(shared, 4)


CASES: list[Body] = [
    test_edits.two_over_the_same,
    test_torch_optim.scaled,
    partial(test_activation_checkpointing.checkpointed_equals_plain, prefetch=1),
    test_control_flow.edit_after_forward,
    partial(test_control_flow.evaluated_first, mode=torch.inference_mode),
    test_mixed_precision.compute_copy,
    test_mixed_precision.bf16_parameters,
    test_weights.tied,
    test_weights.initial,
    test_left_over.zeroed,
    test_checkpoint.whole,
    scheduled,
]


def sided(model: nn.Module, turn: Turn) -> torch.Tensor:
    """On rank 0 alone a block's gradients are complete when its backward ends."""
    for block in model.blocks:
        block.use = turn.rank == 0
    return mse(model, turn)


def uneven(rank: int, world: int) -> None:
    """A rank that is ahead when all fail waits for nobody who will not come."""
    pair = Pair(rank, world, partial(test_failed_gradients.Fragile, block=Sided))
    for step in range(3):
        pair.play(step, sided)
        pair.zero_grad()
    for at in (0, 1, 2):
        pair.sharded.fail_at = at
        with pytest.raises(ArithmeticError):
            sided(pair.sharded, Turn(rank, world, 5))
        pair.sharded.fail_at = -1
        pair.play(6, sided)
        pair.check_grads(f"after a failure at block {at}")
        pair.zero_grad()


FAILURES: list[Body] = [
    uneven,
    test_failed_gradients.assigned,
    partial(test_failed_gradients.micro_batches, play=mse, at=0),
    partial(test_failed_gradients.micro_batches, play=mse, at=2),
    partial(test_failed_gradients.micro_batches, play=no_sync, at=0),
]


@pytest.mark.parametrize(
    ("strategy", "rows", "world"), [("zero2", 1, 2), ("replicate", 1, 2), ("zero1", 2, 4)]
)
def test_what_zero3_does_right_the_others_do_too(strategy: str, rows: int, world: int) -> None:
    # What one rank alone edits is its shard; of a replica, others would not have the edit.
    alone = [test_edits.owner_only] if strategy == "zero2" else []
    run_ranks(bodies, world, strategy, rows, [*CASES, *alone])


@pytest.mark.parametrize(("strategy", "rows", "world"), [g for g in GRIDS if g[2] != 3])
def test_failed_backwards(strategy: str, rows: int, world: int) -> None:
    run_ranks(bodies, world, strategy, rows, FAILURES, timeout=40)


def mixed(rank: int, world: int) -> None:
    """Units of one root may keep more or less than others, and change over from a step to it."""

    def shard(model: nn.Module) -> nn.Module:
        for block, strategy in zip(model.blocks, ("zero1", "zero2", "zero3"), strict=True):
            fully_shard(block, strategy=strategy)
        return fully_shard(model, strategy="zero2")

    twice = partial(accumulate, (False, False))
    check_all(rank, world, Scenario(shard=shard), Scenario(shard=shard, play=twice))


def test_units_with_strategies_of_their_own() -> None:
    run_ranks(mixed, 3)


# What is kept.


def edited_alone(rank: int, world: int) -> None:
    """A forward after one rank's edit: all ranks gather again, and only what was edited."""
    choose("zero2")
    pair = Pair(rank, world)
    for step in range(3):
        pair.play(step)
        pair.sharded.zero_grad()
        weight = pair.sharded.blocks[1].up.weight
        with torch.no_grad():
            if rank == step % world:
                weight.to_local().mul_(2.0)
            pair.plain.blocks[1].up.weight.copy_(weight.full_tensor())
        pair.zero_grad()
        pair.play(step)
        pair.check_grads(f"step {step}")
        gathers = [line for line in pair.schedule if line.startswith("gather")]
        assert gathers == ["gather blocks.1/0"], gathers


def test_only_what_any_rank_edited_is_gathered_again() -> None:
    run_ranks(edited_alone, 2, timeout=20)


def changed_before_backward(rank: int, world: int) -> None:
    """A recomputation would see other parameters than the forward did."""
    choose("zero2")
    model = by_block(test_activation_checkpointing.Checkpointed(around=True, reentrant=False))
    mse(model, Turn(rank, world, 0, torch.float32))
    loss = model(torch.ones(2, 3)).sum()
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"unit 'blocks.1': .*'zero2' keeps them.*in-place"):
        loss.backward()


def test_a_change_between_forward_and_backward_is_refused() -> None:
    run_ranks(changed_before_backward, 2, timeout=20)


# State dicts and checkpoints.


def make(strategy: str, rows: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    choose(strategy, rows)
    model = fully_shard(build(Odd), units=Block)
    return model, ShardedAdamW(model.parameters(), lr=1e-2)


def written(rank: int, world: int, folder: str, strategy: str, rows: int) -> dict[str, Any]:
    model, optimizer = make(strategy, rows)
    test_checkpoint.train(model, optimizer, rank, world, range(2))
    checkpoint.save(Path(folder) / "c", model, optimizer, {"rank": rank})
    kept = test_checkpoint.bits(model, optimizer)
    losses = test_checkpoint.train(model, optimizer, rank, world, range(2, 4))
    again, loaded = make(strategy, rows)
    assert checkpoint.load(Path(folder) / "c", again, loaded) == {"rank": rank}
    assert test_checkpoint.bits(again, loaded) == kept
    assert test_checkpoint.train(again, loaded, rank, world, range(2, 4)) == losses
    checkpoint.load(Path(folder) / "c", again, loaded)
    state = {n: test_checkpoint.full_moments(loaded, p) for n, p in again.named_parameters()}
    return {"params": full_params(again), "state": state}


def read(
    rank: int, world: int, folder: str, want: dict[str, Any], strategy: str, rows: int
) -> None:
    model, optimizer = make(strategy, rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.load(Path(folder) / "c", model, optimizer)
    for name, value in full_params(model).items():
        assert torch.equal(value, want["params"][name]), name
    for name, p in model.named_parameters():
        for key, value in test_checkpoint.full_moments(optimizer, p).items():
            assert torch.equal(value, want["state"][name][key]), f"{key} of {name}"
    test_checkpoint.train(model, optimizer, rank, world, range(1))
    whole = full_state_dict(model, rank0_only=False)
    other, _ = make(strategy, rows)
    load_full_state_dict(other, whole if rank == 0 else {})
    for name, value in full_params(other).items():
        assert torch.equal(value, whole[name]), name


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("zero2", 2, 4), ("replicate", 1, 2)),
        (("replicate", 1, 3), ("zero3", 2, 4)),
        (("zero1", 1, 2), ("zero1", 2, 4)),
    ],
)
def test_a_checkpoint_fits_another_strategy_and_world(
    first: tuple[str, int, int], second: tuple[str, int, int], tmp_path: Path
) -> None:
    strategy, rows, world = first
    want = run_ranks(written, world, str(tmp_path), strategy, rows)[0]
    # What replicas hold alike is written once.
    stored = sum(file.stat().st_size for file in (tmp_path / "c").glob("*.distcp"))
    index = FileSystemReader(tmp_path / "c").read_metadata().storage_data
    assert stored == sum(info.length for info in index.values())
    strategy, rows, world = second
    run_ranks(read, world, str(tmp_path), want, strategy, rows)


# The two levels by themselves, and refusals.


def two_levels(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    rows, everyone = mesh.get_group(1), ProcessGroupComm()
    comm = HybridComm(ProcessGroupComm(rows), ProcessGroupComm(mesh.get_group(0)), everyone)
    assert (comm.rank, comm.world, comm.everyone.world) == (rank % 2, 2, 4)
    full, shard = torch.zeros(4), torch.full((2,), float(rank))
    comm.all_gather(full, shard, label="fk.gather[x]").wait()
    first = float(rank // 2 * 2)
    assert full.tolist() == [first, first, first + 1, first + 1]
    whole = torch.arange(4.0) + 10 * rank
    comm.reduce_scatter(shard, whole, label="fk.reduce[x]").wait()
    assert shard.tolist() == [60.0 + 4 * (2 * comm.rank + i) for i in range(2)]
    assert comm.agree(torch.tensor([float(rank)]), label="x").item() == 3
    norm = torch.tensor([float(rank)])
    comm.all_reduce(norm, label="fk.norm").wait()
    assert norm.item() == 2 * first + 1
    comm.broadcast(norm.fill_(rank + 5.0), src=2, label="x").wait()
    assert norm.item() == 7
    comm.barrier("x")
    with pytest.raises(ValueError, match=r"expected 2 ranks in a grid, got 2 replicas of 2"):
        HybridComm(ProcessGroupComm(rows), ProcessGroupComm(mesh.get_group(0)), comm.shard)


def refusals(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="expected strategy 'zero3', 'zero2', 'zero1', 'repl"):
        fully_shard(build(Net), strategy="zero4")
    cube = init_device_mesh("cpu", (1, 2, 2))
    with pytest.raises(ValueError, match=r"1-D mesh, or a 2-D one .* got 3-D"):
        fully_shard(build(Net), mesh=cube)
    with pytest.raises(ValueError, match="expected a backend's name with strategy 'replicate'"):
        fully_shard(build(Net), strategy="replicate", comm=ProcessGroupComm())
    model = build(Net)
    fully_shard(model.blocks[0])
    with pytest.raises(ValueError, match=r"rank \d of 4 beside 0 of 1 in each of 4 replicas"):
        fully_shard(model, strategy="replicate")
    with pytest.raises(ValueError, match=r"rank \d of 4 beside \d of 2 in each of 2 replicas"):
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2)))
    fully_shard(model, strategy="zero1")  # nothing was changed by what was refused
    mse(model, Turn(rank, world, 0, torch.float32))


def alone(rank: int, world: int) -> None:
    """Alone, every strategy is plain training."""
    for strategy in STRATEGIES:
        choose(strategy)
        check_all(rank, world, Scenario(steps=3), Scenario(play=no_sync_then, steps=2))


def no_sync_then(model: nn.Module, turn: Turn) -> torch.Tensor:
    return accumulate((True, False), model, turn)


def test_two_levels() -> None:
    run_ranks(two_levels, 4)
    run_ranks(refusals, 4)
    run_ranks(alone, 1)


def evaluates_alone(rank: int, world: int) -> None:
    """A replica's forward needs no other rank, as with DDP."""
    choose("replicate")
    model = by_block(build(Net))
    if rank == 0:
        with torch.no_grad():
            want = build(Net)(torch.ones(2, 3))
            assert torch.equal(model(torch.ones(2, 3)), want)
    mse(model, Turn(rank, world, 0, torch.float32))


def other_order(rank: int, world: int) -> None:
    choose("replicate")
    model = build(Net)
    blocks = list(model.blocks)
    by_block(model)
    model.blocks = nn.ModuleList(blocks[::-1] if rank else blocks)
    with pytest.raises(RuntimeError, match=r"reduce the same units in the same order"):
        mse(model, Turn(rank, world, 0, torch.float32))


def test_a_replica_evaluates_alone() -> None:
    run_ranks(evaluates_alone, 2, timeout=20)
    run_ranks(other_order, 2, timeout=20)

# SPDX-License-Identifier: Apache-2.0
"""The arena over real processes: memory, epochs, messages, and what is left in /dev/shm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks

from fsdp_kernels import _ext
from fsdp_kernels.comm._arena import Area, Arena

pytestmark = pytest.mark.skipif(_ext.cpu() is None, reason="the C++ kernels are not built")

GATHER, REDUCE = "fk.gather[layers.3/0]", "fk.reduce[layers.3/0]"


def with_arena(rank: int, world: int, check: Callable[..., Any], *args: Any) -> Any:
    arena = Arena()
    assert (arena.rank, arena.world) == (rank, world)
    result = check(arena, *args)
    arena.close()
    return result


def run(world: int, check: Callable[..., Any], *args: Any) -> list[Any]:
    return run_ranks(with_arena, world, check, *args)


# -- memory ---------------------------------------------------------------------------------------


def check_common_area(arena: Arena) -> list[int]:
    area = arena.allocate(4 * arena.world)
    assert area.tensor.data_ptr() % 128 == 0
    own = area.tensor[4 * arena.rank : 4 * arena.rank + 4]
    assert own.tolist() == [0] * 4
    own.fill_(arena.rank + 1)
    arena.exchange(torch.zeros(1), label="written")
    return area.tensor.tolist()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_ranks_see_what_each_writes(world: int) -> None:
    expected = [rank + 1 for rank in range(world) for _ in range(4)]
    assert run(world, check_common_area) == [expected] * world


def check_each_area(arena: Arena) -> list[list[float]]:
    areas = arena.allocate_each(12)
    assert len(areas) == arena.world
    areas[arena.rank].tensor.view(torch.float32).fill_(arena.rank + 0.5)
    arena.exchange(torch.zeros(1), label="written")
    return [area.tensor.view(torch.float32).tolist() for area in areas]


def test_each_rank_has_an_area_that_all_read() -> None:
    assert run(2, check_each_area) == [[[0.5] * 3, [1.5] * 3]] * 2


def check_growth(arena: Arena) -> list[tuple[int, int]]:
    places = []
    arena.reserve(1000)
    areas = [arena.allocate(nbytes) for nbytes in (1, 0, 128, 700, 5000, 300)]
    for number, area in enumerate(areas):
        if arena.rank == number % arena.world:
            area.tensor.fill_(number + 1)
        places.append((arena._segments.index(area.segment), area.offset))
    arena.exchange(torch.zeros(1), label="written")
    for number, area in enumerate(areas):
        assert area.tensor.tolist() == [number + 1] * area.tensor.numel()
    return places


def test_areas_lie_at_the_same_place_everywhere_and_segments_are_added() -> None:
    first, *others = run(3, check_growth)
    assert first == [(1, 0), (1, 128), (1, 128), (1, 256), (2, 0), (3, 0)]
    assert others == [first] * 2


def check_private_view(arena: Arena) -> None:
    nbytes = 3 * 4096
    area = arena.allocate(nbytes * arena.world)
    own = area.tensor[nbytes * arena.rank : nbytes * (arena.rank + 1)]
    view = area.private_view(nbytes * arena.rank, nbytes)
    own.fill_(1)
    assert view.tensor.tolist() == [1] * nbytes
    view.tensor[5000] = 9  # copies one page
    assert own[5000] == 1
    own.fill_(2)
    assert (view.tensor[0], view.tensor[5000], view.tensor[nbytes - 1]) == (2, 9, 2)
    own.copy_(view.tensor)  # what a gather publishes
    view.revert()
    own.add_(1)
    assert view.tensor[5000] == own[5000]
    arena.exchange(torch.zeros(1), label="written")
    assert {int(value) for value in area.tensor.unique()} <= {2, 3, 9, 10, 4}
    with pytest.raises(ValueError, match=r"expected bytes inside \[0, .* got 2 from"):
        area.private_view(area.tensor.numel() - 1, 2)
    assert area.private_view(5, 0).tensor.numel() == 0


def test_a_private_view_shows_the_shared_bytes_until_it_is_written() -> None:
    run(2, check_private_view)


def check_memory_outlives_the_arena(arena: Arena) -> None:
    tensor = arena.allocate(8).tensor
    arena.close()
    del arena
    tensor.fill_(3)
    assert tensor.tolist() == [3] * 8


def test_memory_stays_as_long_as_a_tensor_shows_it() -> None:
    run(2, check_memory_outlives_the_arena)


# -- epochs and messages --------------------------------------------------------------------------


def check_training(arena: Arena) -> None:
    """Three steps of two units with real numbers: gather, reduce and step as ranks would."""
    world, numel = arena.world, 96
    params = [arena.allocate(8 * numel * world).tensor.view(torch.float64) for _ in range(2)]
    slots = [arena.allocate_each(8 * numel * world) for _ in range(2)]
    units, grads = [arena.param_epochs() for _ in range(2)], arena.grad_epochs(2)
    mine = slice(numel * arena.rank, numel * (arena.rank + 1))
    for step in range(3):
        sums = []
        for full, unit in zip(params, units, strict=True):
            unit.gather(GATHER)
            unit.wait_ready(GATHER)
            assert torch.equal(full, torch.full_like(full, step * world * (world + 1) / 2))
            slot = slots[grads.begin(REDUCE)][arena.rank].tensor.view(torch.float64)
            slot.fill_(arena.rank + 1.0)
            grads.post()
            unit.release()
            peers = [area.tensor.view(torch.float64) for area in slots[grads.wait_posted(REDUCE)]]
            sums.append(torch.stack([peer[mine] for peer in peers]).sum(0))
            grads.consume()
            assert grads.outstanding == 0
        for full, unit, total in zip(params, units, sums, strict=True):
            unit.wait_released("fk.step[layers.3/0]")
            full[mine] += total


@pytest.mark.parametrize("world", [1, 2, 4])
def test_gather_reduce_and_step(world: int) -> None:
    run(world, check_training)


def check_epochs(arena: Arena) -> None:
    epochs = arena.epochs()
    assert epochs.get(arena.rank) == 0
    for number in (1, 2, 2**30, 2**31, 2**32 - 1):
        epochs.set(number)
        epochs.wait(number, "a", "b")
    assert epochs.get(0) == epochs.get(arena.world - 1) == 2**32 - 1
    with pytest.raises(IndexError):
        epochs.get(arena.world)


def test_numbers_of_ranks() -> None:
    run(2, check_epochs)


def check_exchange(arena: Arena) -> None:
    for numel, dtype in [(1, torch.float64), (0, torch.float32), (5000, torch.int64)]:
        words = torch.arange(numel, dtype=dtype) + arena.rank
        found = arena.exchange(words, label="words")
        assert found.dtype is dtype
        for rank, row in enumerate(found):
            assert torch.equal(row, torch.arange(numel, dtype=dtype) + rank)
    matrix = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(arena.exchange(matrix, label="not contiguous")[0], matrix)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_messages_of_every_size(world: int) -> None:
    run(world, check_exchange)


def check_different_messages(arena: Arena) -> str:
    nbytes, label = [(8, "same"), (16, "same"), (8, "other")][arena.rank]
    with pytest.raises(RuntimeError, match="expected the same exchange of") as caught:
        arena.exchange(torch.zeros(nbytes // 8, dtype=torch.float64), label=label)
    return str(caught.value)


def test_ranks_that_exchange_different_things_are_told() -> None:
    assert all("Call the same operations" in text for text in run(3, check_different_messages))


def check_order(arena: Arena) -> None:
    unit, grads = arena.param_epochs(), arena.grad_epochs(1)
    unit.release()  # nothing is held: nothing happens
    with pytest.raises(RuntimeError, match=r"fk.gather.*expected a gather to wait for, got none"):
        unit.wait_ready(GATHER)
    unit.gather(GATHER)
    assert (unit.held, unit.number) == (True, 1)
    with pytest.raises(RuntimeError, match="expected the last gather to be freed"):
        unit.gather(GATHER)
    with pytest.raises(RuntimeError, match="expected this rank's own gather to be freed"):
        unit.wait_released(GATHER)
    unit.release()
    grads.consume()
    with pytest.raises(RuntimeError, match="expected a reduction to wait for, got none"):
        grads.wait_posted(REDUCE)
    assert grads.begin(REDUCE) == grads.begin(REDUCE)
    grads.post()
    with pytest.raises(RuntimeError, match="expected a slot that this rank has consumed"):
        grads.begin(REDUCE)
    with pytest.raises(RuntimeError, match="expected earlier reductions to be consumed"):
        grads.skip(REDUCE)
    grads.consume()
    grads.skip(REDUCE)
    assert grads.outstanding == 0
    with pytest.raises(ValueError, match="expected 1, 2, 4"):
        arena.grad_epochs(3)


def test_a_wrong_order_of_calls_is_refused_before_it_hangs() -> None:
    run(1, check_order)


def test_an_arena_needs_a_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"expected torch\.distributed to be initialised"):
        Arena()


def test_areas_are_compared_by_identity() -> None:
    area = Area(torch.zeros(1), None, 0)
    assert area != Area(torch.zeros(1), None, 0)

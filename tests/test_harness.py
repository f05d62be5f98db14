# SPDX-License-Identifier: Apache-2.0
"""The harness itself: results, failures, deaths and hangs of ranks."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from typing import Any, ClassVar

import harness
import pytest
import torch
import torch.distributed as dist
from harness import RankError, run_ranks, run_ranks_outcomes


class Unpicklable(Exception):
    """Holds what cannot be sent to another process."""

    def __init__(self) -> None:
        super().__init__("holds a lambda")
        self.secret = lambda: None


def _sum(rank: int, world: int, start: int) -> tuple[int, int, float, int]:
    value = torch.tensor([float(start + rank)])
    dist.all_reduce(value)
    return rank, world, value.item(), torch.get_num_threads()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_results_come_in_rank_order(world: int) -> None:
    total = float(sum(10 + rank for rank in range(world)))
    assert run_ranks(_sum, world, 10) == [(rank, world, total, 1) for rank in range(world)]


def _inherited(rank: int, world: int) -> tuple[float, int, bool]:
    return _sum(rank, world, 0)[2], os.getppid(), hasattr(os, "_left_by_a_test")


def test_fresh_ranks_inherit_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA needs: no rank is a fork of this process."""
    monkeypatch.setattr(os, "_left_by_a_test", True, raising=False)
    results = run_ranks(_inherited, 2, fresh=True)
    assert [(total, left) for total, _, left in results] == [(1.0, False)] * 2
    assert os.getpid() not in {parent for _, parent, _ in results}
    monkeypatch.setattr(harness, "_cuda_is_live", lambda: True)
    assert os.getpid() not in {parent for _, parent, _ in run_ranks(_inherited, 2)}


@pytest.mark.parametrize("fresh", [False, True])
def test_no_rank_has_used_cuda_before_its_function_runs(fresh: bool) -> None:
    assert run_ranks(_cuda_is_initialized, 1, fresh=fresh) == [False]


def _cuda_is_initialized(rank: int, world: int) -> bool:
    return torch.cuda.is_initialized()


def test_closures_run_and_tensors_return() -> None:
    base = torch.arange(4.0)
    results = run_ranks(lambda rank, _world: base * rank, 2)
    assert torch.equal(results[1], base)


def test_two_worlds_after_one_another_do_not_meet() -> None:
    for start in range(3):
        assert run_ranks(_sum, 2, start)[0][2] == 2 * start + 1


def test_large_results_do_not_block() -> None:
    results = run_ranks(lambda rank, _world: torch.full((1 << 20,), float(rank)), 2)
    assert [result[0].item() for result in results] == [0.0, 1.0]


def _fail_on(rank: int, _world: int, which: int, error: BaseException) -> None:
    if rank == which:
        raise error
    dist.barrier()  # never completes: the failed rank must end the test, not the timeout


def test_a_failure_is_raised_with_its_type_and_traceback() -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="on purpose") as info:
        run_ranks(_fail_on, 3, 1, ValueError("on purpose"))
    assert time.monotonic() - start < 20
    cause = info.value.__cause__
    assert isinstance(cause, RankError)
    assert "rank 1 failed" in str(cause)
    assert "in _fail_on" in str(cause)
    assert not multiprocessing.active_children()


def test_a_failure_that_does_not_pickle_is_raised_as_text() -> None:
    with pytest.raises(RankError, match=r"(?s)in _fail_on.*Unpicklable: holds a lambda"):
        run_ranks(_fail_on, 2, 0, Unpicklable())


def test_a_skip_on_a_rank_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="no such thing here"):
        run_ranks(lambda _rank, _world: pytest.skip("no such thing here"), 2)


def _die(rank: int, _world: int) -> str:
    if rank == 0:
        os._exit(7)
    try:
        dist.barrier()
    except RuntimeError:
        return "survived"
    return "did not notice"


def test_a_death_is_reported_with_its_exit_code() -> None:
    with pytest.raises(RankError, match=r"rank 0 failed.*\n.*exit code 7"):
        run_ranks(lambda rank, _world: os._exit(7) if rank == 0 else time.sleep(30), 2)


def test_outcomes_tell_who_died_and_who_survived() -> None:
    outcomes = run_ranks_outcomes(_die, 2)
    assert outcomes[0].died
    assert "exit code 7" in outcomes[0].traceback
    assert outcomes[1].value == "survived"
    assert not outcomes[1].failed
    assert not multiprocessing.active_children()


def _hang(rank: int, _world: int) -> None:
    if rank == 1:
        time.sleep(60)


def test_a_hang_is_cut_with_the_stack_of_the_slow_rank() -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"(?s)none from \[1\].*rank 1:.*in _hang"):
        run_ranks(_hang, 2, timeout=3)
    assert time.monotonic() - start < 15
    assert not multiprocessing.active_children()


def test_state_of_the_parent_is_left_alone() -> None:
    before: dict[str, Any] = dict(os.environ)
    run_ranks(_sum, 2, 0)
    assert dict(os.environ) == before
    assert not dist.is_initialized()


class _Trap:
    """Garbage in a cycle, whose destructor tells where it ran."""

    destroyed: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        self.destroyed.append(os.getpid())


def _collect(_rank: int, _world: int) -> list[int]:
    gc.collect()
    return [pid for pid in _Trap.destroyed if pid == os.getpid()]


def test_ranks_do_not_destroy_what_the_parent_left() -> None:
    """A destructor that joins a thread of the parent would hang in the child."""
    gc.disable()
    try:
        _Trap()
        assert run_ranks(_collect, 2) == [[], []]
    finally:
        gc.enable()
    gc.collect()
    assert os.getpid() in _Trap.destroyed

# SPDX-License-Identifier: Apache-2.0
"""Shared memory when a rank is late, stops, dies or is interrupted."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Outcome, run_ranks, run_ranks_outcomes

from fsdp_kernels import _ext
from fsdp_kernels.comm import _arena
from fsdp_kernels.comm._arena import Arena

pytestmark = pytest.mark.skipif(_ext.cpu() is None, reason="the C++ kernels are not built")

GATHER, REDUCE = "fk.gather[layers.3/0]", "fk.reduce[layers.3/0]"


def with_arena(rank: int, world: int, check: Callable[..., Any], *args: Any) -> Any:
    arena = Arena()
    result = check(arena, *args)
    arena.close()
    return result


def run(world: int, check: Callable[..., Any], *args: Any) -> list[Any]:
    return run_ranks(with_arena, world, check, *args)


def check_skipped(arena: Arena) -> str:
    unit, epochs = arena.param_epochs(), arena.epochs()
    if arena.rank == 0:
        unit.gather(GATHER)
        with pytest.raises(RuntimeError) as caught:
            unit.wait_ready(GATHER)
    else:  # skips the unit
        with pytest.raises(RuntimeError) as caught:
            epochs.wait(7, "fk.gather[layers.4/0]", "all_gather")
    assert arena.failure is not None
    with pytest.raises(RuntimeError, match="failed first"):  # for good
        epochs.wait(0, GATHER, "all_gather")
    return str(caught.value)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_all_wait_for_one_another_are_told_where_each_one_is(world: int) -> None:
    texts = run(world, check_skipped)  # the time limit is the harness's
    (first,) = [text for text in texts if "failed first" not in text]
    others = [text for text in texts if "failed first" in text]
    assert f": expected all_gather to complete on all {world} ranks (shared_memory), got" in first
    assert (
        "every rank waits for another one: rank 0 in all_gather of fk.gather[layers.3/0], rank 1 "
        "in all_gather of fk.gather[layers.4/0]"
    ) in first
    assert len(others) == world - 1
    assert all(first in other for other in others)


def check_time_limit(rank: int, world: int) -> str:
    arena = Arena(timeout_s=2.0)
    unit = arena.param_epochs()
    if rank == 0:
        unit.gather(GATHER)
        with pytest.raises(RuntimeError) as caught:
            unit.wait_ready(GATHER)
        return str(caught.value)
    while arena.failure is None:  # computes
        threading.Event().wait(0.001)
    return ""


def test_a_late_rank_is_an_error_within_the_time_limit() -> None:
    text = run_ranks(check_time_limit, 2)[0]
    assert text.startswith(f"{GATHER}: expected all_gather to complete on all 2 ranks (shared_mem")
    assert "no word from rank 1" in text
    assert "(time limit 2 s): it is at number 0 of 1, and computes" in text


def check_alternating(arena: Arena) -> None:
    """Ranks that wait for one another in turn, each for long: nobody is stuck."""
    epochs = arena.epochs()
    for number in range(1, 13):
        if number % arena.world == arena.rank:
            threading.Event().wait(0.15)  # longer than a sleeper goes without a look
        epochs.set(number)
        epochs.wait(number, GATHER, "all_gather")


def test_ranks_that_wait_in_turn_are_not_stuck() -> None:
    run(2, check_alternating)


def check_closed(arena: Arena) -> str:
    unit = arena.param_epochs()
    if arena.rank == 1:
        arena.close()
        arena.close()
        with pytest.raises(RuntimeError, match="expected an open communicator"):
            arena.exchange(torch.zeros(1), label="late")
        return ""
    unit.gather(GATHER)
    with pytest.raises(RuntimeError) as caught:
        unit.wait_ready(GATHER)
    return str(caught.value)


def test_a_rank_that_stops_early_is_an_error() -> None:
    text = run(2, check_closed)[0]
    assert text.startswith(f"{GATHER}: expected all_gather to complete on all 2 ranks")
    assert "rank 1 has closed its communicator" in text


def check_abort(arena: Arena) -> str:
    unit, epochs = arena.param_epochs(), arena.epochs()

    def gather_and_wait() -> None:
        unit.gather(GATHER)
        unit.wait_ready(GATHER)  # nobody allocates any more
        if arena.rank == 1:
            arena.abort("out of memory")
            arena.abort("something else")
        epochs.wait(1, GATHER, "all_gather")

    with pytest.raises(RuntimeError) as caught:
        gather_and_wait()
    return str(caught.value)


def test_an_abort_is_every_ranks_error() -> None:
    for text in run(3, check_abort):
        assert "rank 1 failed first: out of memory" in text


class Interrupt(Exception):
    pass


def check_signal(arena: Arena) -> None:
    """A signal handler's exception leaves a wait; the wait may be made again."""

    def interrupt(*_: object) -> None:
        raise Interrupt

    unit, epochs = arena.param_epochs(), arena.epochs()
    unit.gather(GATHER)
    if arena.rank == 1:
        epochs.wait(0, "", "")
        while epochs.get(0) == 0:
            threading.Event().wait(0.001)
    else:
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupt):
            epochs.wait(1, REDUCE, "reduce_scatter")
        signal.signal(signal.SIGALRM, before)
    epochs.set(1)
    epochs.wait(1, REDUCE, "reduce_scatter")
    unit.wait_ready(GATHER)
    assert arena.failure is None


def test_a_signal_interrupts_a_wait() -> None:
    run(2, check_signal)


def check_threads_run(arena: Arena) -> None:
    """While one thread waits, the others of its process run."""
    epochs = arena.epochs()
    if arena.rank == 0:
        thread = threading.Thread(target=lambda: epochs.set(1))
        waiting = threading.Thread(target=lambda: epochs.wait(1, "", ""))
        waiting.start()
        thread.start()
        waiting.join()
        thread.join()
    else:
        epochs.wait(0, "", "")
        while epochs.get(0) == 0:
            threading.Event().wait(0.001)
        epochs.set(1)


def test_other_threads_run_during_a_wait() -> None:
    run(2, check_threads_run)


def check_forked_child(arena: Arena) -> None:
    child = os.fork()
    if child == 0:
        arena.close()
        os._exit(0)
    os.waitpid(child, 0)
    arena.exchange(torch.zeros(1), label="still open")


def test_a_forked_child_that_closes_does_not_speak_for_its_parent() -> None:
    run(2, check_forked_child)


# -- death ----------------------------------------------------------------------------------------


class Mortal:
    """Trains over an arena until it is told to die, at a call or at a moment."""

    def __init__(self, arena: Arena, dies_at: int | None) -> None:
        self.arena = arena
        self.calls_left = dies_at

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    def train(self) -> None:
        arena = self.arena
        units = [self.call(arena.param_epochs) for _ in range(2)]
        grads = self.call(arena.grad_epochs, 2)
        for _ in range(10**6):
            for number, unit in enumerate(units):
                self.call(unit.gather, f"fk.gather[layers.{number}/0]")
                self.call(unit.wait_ready, f"fk.gather[layers.{number}/0]")
                self.call(grads.begin, f"fk.reduce[layers.{number}/0]")
                self.call(grads.post)
                self.call(unit.release)
                self.call(grads.wait_posted, f"fk.reduce[layers.{number}/0]")
                self.call(grads.consume)
            self.call(arena.exchange, torch.zeros(2000), label="fk.agree[used parameters]")
            for number, unit in enumerate(units):
                self.call(unit.wait_released, f"fk.step[layers.{number}/0]")
            self.call(arena.allocate, 100)  # a segment of its own, after the first ones


def train_until_death(rank: int, world: int, victim: int, dies_at: int | float) -> str:
    dies_at_call = dies_at if rank == victim and isinstance(dies_at, int) else None
    _arena.PREFIX = PREFIX
    arena = Arena()  # its time limit is the harness's, beyond which the test fails
    if rank == victim and isinstance(dies_at, float):
        timer = threading.Timer(dies_at, os.kill, (os.getpid(), signal.SIGKILL))
        timer.start()
    with pytest.raises(RuntimeError) as caught:
        Mortal(arena, dies_at_call).train()
    return str(caught.value)


PREFIX = f"fsdp_kernels-test-{os.getpid()}-dead-"


def check_deaths(outcomes: list[Outcome], victim: int) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.died == (rank == victim), outcome.traceback
        if rank != victim:
            assert f"rank {victim} (process " in outcome.value
            assert ") has ended" in outcome.value
            assert outcome.value.startswith("fk.")
    assert not list(Path(_arena.PLACE).glob(f"{PREFIX}*"))


@pytest.mark.parametrize("seed", range(10))
def test_a_rank_that_is_killed_at_a_call_is_named(seed: int) -> None:
    draw = random.Random(seed)
    victim, dies_at = draw.randrange(3), draw.randrange(1, 80)
    outcomes = run_ranks_outcomes(train_until_death, 3, victim, dies_at)
    check_deaths(outcomes, victim)


@pytest.mark.parametrize("seed", range(10))
def test_a_rank_that_is_killed_at_any_moment_is_named(seed: int) -> None:
    draw = random.Random(seed)
    victim = draw.randrange(3)
    outcomes = run_ranks_outcomes(train_until_death, 3, victim, 0.2 * draw.random())
    check_deaths(outcomes, victim)


def die_in_set_up(rank: int, world: int, victim: int, when: str) -> str:
    """Die with a segment under its name: before, or after, the others know that it is there."""
    _arena.PREFIX = PREFIX
    arena = Arena()
    module: Any = arena._module
    if rank == victim:
        real = module.Segment

        class Deadly:
            @staticmethod
            def create(path: str, nbytes: int) -> Any:
                made = real.create(path, nbytes)
                if when == "named":
                    os.kill(os.getpid(), signal.SIGKILL)
                return made

            @staticmethod
            def open(path: str, nbytes: int) -> Any:
                os.kill(os.getpid(), signal.SIGKILL)

        module.Segment = Deadly
    with pytest.raises(RuntimeError) as caught:
        arena.reserve(1000)
    return str(caught.value)


@pytest.mark.parametrize(("victim", "when"), [(0, "named"), (1, "opened")])
def test_a_death_in_the_set_up_leaves_no_file(victim: int, when: str) -> None:
    check_deaths(run_ranks_outcomes(die_in_set_up, 3, victim, when), victim)


def die_before_the_others_open(rank: int, world: int) -> str:
    """Die when all is done on this rank, and let another job remove the file at once."""
    _arena.PREFIX = PREFIX
    arena = Arena()
    module: Any = arena._module
    creator = Path(f"/proc/{arena.exchange(torch.tensor([os.getpid()]), label='pid')[0].item()}")
    real, shares = module.Segment, iter(range(3))

    class Late:
        create = real.create

        @staticmethod
        def open(path: str, nbytes: int) -> Any:
            while creator.exists() and ") Z " not in (creator / "stat").read_text():
                threading.Event().wait(0.001)
            module.unlink(path)
            return real.open(path, nbytes)

    def share(text: str) -> list[str]:
        if next(shares) == 2:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        return Arena._share(arena, text)

    module.Segment = Late
    if rank == 0:
        arena._share = share  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as caught:
        arena.reserve(1000)
    return str(caught.value)


def test_a_file_that_is_gone_with_its_creator_is_the_creators_death() -> None:
    check_deaths(run_ranks_outcomes(die_before_the_others_open, 3), 0)

# SPDX-License-Identifier: Apache-2.0
"""Every interleaving of small worlds: the shared-memory protocol is right, and needs its rules."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
from arena_model import MASK, Rank, search
from arena_scenarios import Training, programs

SCENARIOS = {
    "plain": Training(),
    "three steps": Training(steps=3),
    "units stay gathered for backward": Training(forward="ABC", carries=True),
    "a module twice, gathered once": Training(forward="ABA", carries=True, evaluations=1),
    "stepped in backward after one gather": Training(forward="ABC", carries=True, overlap=True),
    "three units": Training(forward="ABC"),
    "a module twice": Training(forward="ABA"),
    "a module twice in a row": Training(forward="AAB"),
    "evaluation without gradients": Training(evaluations=1, agrees=False),
    "accumulation": Training(micro_batches=2),
    "overlapped step": Training(forward="ABC", overlap=True),
    "two reductions under way": Training(forward="ABC", under_way=1, agrees=False),
    "no words exchanged": Training(forward="ABC", agrees=False),
    "a rank edits": Training(edits=(0,), evaluations=1),
    "a rank reduces late": Training(forward="ABC", late=(1,)),
    "a rank frees early": Training(quick=(0,)),
    "a prefetch in vain": Training(vain=(0,), edits=(0, 1)),
    "a failed backward": Training(fails=(2, 1, 2, 1)),
    "a backward that fails at once": Training(fails=(0, 1, 1, 0)),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_interleaving_is_wrong(name: str) -> None:
    training = SCENARIOS[name]
    for world in (1, 2, 3):
        result = search(programs(training, world))
        assert not result.fault, (world, result)
        assert result.states > 30 * world * world
    # Numbers that wrap around change nothing.
    wrapped = search(programs(training, 3, start=MASK - 2))
    assert wrapped == result


def test_four_ranks() -> None:
    result = search(programs(SCENARIOS["plain"], 4))
    assert not result.fault, result
    assert result.states > 50_000


def test_every_choice_of_two_ranks() -> None:
    """All combinations of what ranks may do differently, and of how they train."""
    subsets = [(), (0,), (1,), (0, 1)]
    modes = [
        Training(forward=forward, overlap=overlap, under_way=under_way, evaluations=evaluations)
        for forward in ("AB", "ABA")
        for overlap, under_way, evaluations in product((False, True), (0, 1), (0, 1))
    ]
    states = 0
    for mode, edits, late, quick in product(modes, subsets, subsets, subsets[:2]):
        training = replace(mode, edits=edits, late=late, quick=quick)
        result = search(programs(training, 2))
        assert not result.fault, (training, result)
        states += result.states
    assert states > 300_000


@pytest.mark.parametrize("seed", range(8))
def test_random_trainings_of_three_ranks(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(5):
        subset = [tuple(rank for rank in range(3) if draw.random() < 0.5) for _ in range(4)]
        overlap = draw.random() < 0.5
        training = Training(
            forward="".join(draw.choice("ABC") for _ in range(draw.randint(1, 4))),
            micro_batches=1 if overlap else draw.randint(1, 2),
            evaluations=draw.randint(0, 1),
            carries=draw.random() < 0.5,
            overlap=overlap,
            under_way=draw.randint(0, 1),
            agrees=draw.random() < 0.5,
            edits=subset[0],
            vain=subset[1],
            late=subset[2],
            quick=subset[3],
        )
        result = search(programs(training, 3, start=draw.getrandbits(32)))
        assert not result.fault, (training, result)


def faults_of(mutation: str) -> list[str]:
    """Return the faults of the scenarios in which a broken rule shows."""
    trainings = SCENARIOS.values()
    faults = [search(programs(training, 2, mutations=[mutation])).fault for training in trainings]
    return [fault for fault in faults if fault]


WAITS = ["wait_ready", "wait_released", "begin", "wait_posted", "receive"]
ANNOUNCED = ["release", "post", "consume", "send"]


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("how", ["drop", "weak"])
def test_a_broken_wait_is_found(how: str, wait: str) -> None:
    assert faults_of(f"{how} {wait}")


@pytest.mark.parametrize("epoch", ANNOUNCED)
def test_an_epoch_that_is_set_too_early_is_found(epoch: str) -> None:
    assert faults_of(f"early {epoch}")


@pytest.mark.parametrize("epoch", ["gather", *ANNOUNCED])
def test_an_epoch_that_is_not_set_is_a_deadlock(epoch: str) -> None:
    faults = faults_of(f"drop {epoch}")
    assert faults
    assert all(fault.startswith("deadlock") for fault in faults)


def test_an_edit_that_is_published_after_the_gather_said_so_is_found() -> None:
    assert "params" in search(programs(Training(edits=(0,), publishes="after"), 2)).fault


def test_one_slot_is_enough_for_gradients_and_too_little_for_messages() -> None:
    assert not search(programs(Training(forward="ABC"), 3, slots=1)).fault
    assert search(programs(Training(forward="ABC"), 2, slots=1, mutations=["drop begin"])).fault
    assert "message" in search(programs(Training(), 2, message_slots=1)).fault


def test_a_rank_that_skips_a_unit_is_a_deadlock() -> None:
    """What the time limit is for: nothing but time tells it from a slow rank."""
    ranks = programs(Training(), 2)
    ranks[1] = Rank(1)
    ranks[1].gather("A")
    result = search(ranks)
    assert result.fault.startswith("deadlock")
    assert result.trace


def broken(training: Training, who: int, at: int) -> list[Rank]:
    """Return the programs with one wait of one rank removed."""
    ranks = programs(training, 2)
    ranks[who].steps[at].wait = None
    return ranks


def test_every_single_wait_is_needed_or_follows_from_the_others() -> None:
    """Remove the waits one at a time, where no exchange orders the ranks besides."""
    training = replace(SCENARIOS["two reductions under way"], evaluations=1)
    needed: dict[str, int] = {}
    for who in (0, 1):
        for at, step in enumerate(programs(training, 2)[who].steps):
            if step.wait is not None and search(broken(training, who, at)).fault:
                needed[step.name] = needed.get(step.name, 0) + 1
    # Each kind, of both ranks, in every step in which it can matter (before the first step nothing
    # was written yet). The rest follows: who has gathered A has stepped all units before, and who
    # has gathered C has freed A.
    assert needed == {"wait_ready": 2, "begin": 4, "wait_posted": 4, "wait_released": 8}

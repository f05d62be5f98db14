# SPDX-License-Identifier: Apache-2.0
"""Training over `NcclComm`, on simulated devices: what `test_device_nccl.py` does on real ones."""

from __future__ import annotations

import device_cases as cases
import device_steps as steps
import nccl_sim
import pytest
from device_cases import SIMULATED
from harness import run_ranks, run_ranks_outcomes


@pytest.fixture(autouse=True, scope="module")
def _built() -> None:
    nccl_sim.load()  # before the ranks, which would each wait for it within their time limit


@pytest.mark.parametrize("world", [1, 2])
def test_every_check_of_the_contract(world: int) -> None:
    assert len(cases.CHECKS) >= 11
    for failed in run_ranks(cases.run_checks, world, SIMULATED, list(cases.CHECKS)):
        assert not failed, "\n".join(failed.values())


@pytest.mark.parametrize("world", [1, 3])
def test_training_equals_the_plain_model(world: int) -> None:
    names = list(cases.SCENARIOS)
    run_ranks(cases.train_like_the_plain_model, world, SIMULATED, names, timeout=120)


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("world", [1, 2])
def test_the_backend_changes_no_bit(world: int, low: bool) -> None:
    run_ranks(cases.train_like_over_a_process_group, world, SIMULATED, low)


@pytest.mark.parametrize("world", [1, 2])
def test_registered_buffers(world: int) -> None:
    assert run_ranks(cases.registered_buffers, world, SIMULATED) == ["local"] * world


def test_abort() -> None:
    (messages,) = run_ranks(cases.aborted, 1, SIMULATED)
    assert len(messages) == 3
    for message, label in zip(messages, ("fk.gather", "fk.reduce", "fk.agree"), strict=True):
        assert message.startswith(label)
        assert "the test says so" in message


def test_a_dead_rank() -> None:
    where = cases.Where("cpu", options={"timeout_s": 3.0})
    outcomes = run_ranks_outcomes(cases.outlives_the_last_rank, 3, where)
    assert outcomes[2].died
    for rank in (0, 1):
        message = outcomes[rank].value
        assert message is not None, outcomes[rank].traceback
        assert message.startswith("fk.gather[layers.3/0]: expected all_gather to complete on all 3")


@pytest.mark.parametrize("world", [2, 3])
def test_a_gather_behind_a_reduction_that_hangs(world: int) -> None:
    where = cases.Where("cpu", options={"timeout_s": 2.0})
    messages = run_ranks(cases.stops_after_a_gather, world, where)
    assert messages[-1] is None
    for message in messages[:-1]:
        assert "fk.reduce[layers.2/0]: expected reduce_scatter to complete on all" in message
        assert "; issued after it: fk.gather[layers.1/0] (all_gather)" in message


@pytest.mark.parametrize("body", ["buffers_are_given_back", "step_without_waiting", "side_stream"])
def test_bodies_of_device_tests(body: str) -> None:
    """As far as they go without a device: their lines run, and the numbers are right."""
    run_ranks(getattr(steps, body), 1, SIMULATED)


@pytest.mark.parametrize("world", [1, 2])
def test_two_compute_streams(world: int) -> None:
    run_ranks(steps.two_compute_streams, world, SIMULATED)


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_peak_bytes(prefetch: int, low: bool) -> None:
    run_ranks(steps.peak_bytes, 2, SIMULATED, prefetch, low)

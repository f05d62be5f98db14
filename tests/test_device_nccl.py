# SPDX-License-Identifier: Apache-2.0
"""`NcclComm` on one CUDA device, world 1. `test_nccl_training.py` runs the same on simulated ones.

Ranks are processes of their own that inherit nothing of this one, which may have used CUDA.
"""

from __future__ import annotations

from typing import Any

import device_cases as cases
import device_steps as steps
import pytest
from device_cases import Where
from harness import run_ranks

from fsdp_kernels import _ext

pytestmark = pytest.mark.gpu
DEVICE = Where()


def run(body: Any, *args: Any, where: Where = DEVICE) -> Any:
    """Run a body on the one rank, and return what it returned."""
    return run_ranks(body, 1, where, *args, fresh=True, timeout=60)[0]


@pytest.fixture(autouse=True, scope="module")
def _built() -> None:
    module = _ext.load("_nccl")
    if isinstance(module, str):
        pytest.skip(f"fsdp_kernels._nccl is {module}")


@pytest.fixture(scope="module")
def failed_checks() -> dict[str, str]:
    """What failed of the contract; a rank starts once for all of it."""
    found: dict[str, str] = run(cases.run_checks, list(cases.CHECKS))
    return found


@pytest.mark.parametrize("name", cases.CHECKS)
def test_contract(name: str, failed_checks: dict[str, str]) -> None:
    if name in failed_checks:
        pytest.fail(failed_checks[name], pytrace=False)


def test_training_equals_the_plain_model() -> None:
    run(cases.train_like_the_plain_model, list(cases.SCENARIOS))


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
def test_the_backend_changes_no_bit(low: bool) -> None:
    run(cases.train_like_over_a_process_group, low)


@pytest.mark.parametrize("registration", ["local", "symmetric", "none"])
def test_registered_buffers(registration: str) -> None:
    where = Where(options={"registration": registration})
    got = run(cases.registered_buffers, where=where)
    # Windows need NVLink or peers on one device; a communicator of one rank may have none.
    assert got == registration or (registration, got) == ("symmetric", "local")


def test_memory_of_buffers_is_given_back() -> None:
    run(steps.buffers_are_given_back)


def test_blocking_communicators_and_cta_limits() -> None:
    where = Where(options={"blocking": True, "min_ctas": 1, "max_ctas": 4})
    assert (
        run(cases.run_checks, ["check_gather", "check_grouped", "check_close"], where=where) == {}
    )


def test_abort() -> None:
    messages = run(cases.aborted)
    for message, label in zip(messages, ("fk.gather", "fk.reduce", "fk.agree"), strict=True):
        assert message.startswith(label)
        assert "the test says so" in message


def test_a_collective_that_outlasts_the_time_limit() -> None:
    message = run(steps.outlasts_the_limit, where=Where(options={"timeout_s": 1.0}))
    assert message.startswith("fk.gather[layers.3/0]: expected all_gather to complete on all 1")
    assert "time limit 1 s" in message


def test_nothing_waits_for_the_device() -> None:
    run(steps.step_without_waiting)


@pytest.mark.parametrize(("prefetch", "low"), [(0, False), (1, True), (2, False)])
def test_peak_bytes(prefetch: int, low: bool) -> None:
    run(steps.peak_bytes, prefetch, low)


def test_two_compute_streams() -> None:
    run(steps.two_compute_streams)


def test_a_side_stream_all_along() -> None:
    run(steps.side_stream)

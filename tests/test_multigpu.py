# SPDX-License-Identifier: Apache-2.0
"""Two or more CUDA devices, a rank on each: contract, parity, overlap, failures of `NcclComm`.

And `PeerMemory`: parity, its sum in rank order, and the one of NVLink's switches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import comm_contract
import device_cases as cases
import peer_cases
import pytest
import torch
from comm_contract import CommContract
from device_cases import Where
from device_profile import Step, check_order, check_overlap, check_streams, profiled_step
from harness import run_ranks, run_ranks_outcomes

from fsdp_kernels import _ext

pytestmark = pytest.mark.multigpu
DEVICES = Where()


def ranks() -> int:
    """How many ranks a test has: up to four, since that shows what more would."""
    return min(torch.cuda.device_count(), 4)


@pytest.fixture(autouse=True, scope="module")
def _built() -> None:
    module = _ext.load("_nccl")
    if isinstance(module, str):
        pytest.skip(f"fsdp_kernels._nccl is {module}")


class TestContract(CommContract):
    device = DEVICES.device

    def run(self, world: int, check: Callable[..., Any], *args: Any) -> list[Any]:
        if world > torch.cuda.device_count():
            pytest.skip(f"needs {world} CUDA devices, found {torch.cuda.device_count()}")
        what = DEVICES.comm, check, self.device
        return run_ranks(comm_contract._with_comm, world, *what, *args, fresh=True)

    def test_a_dead_rank_is_an_error_on_the_others(self) -> None:  # type: ignore[override]
        limited = Where(options={"timeout_s": 4.0})
        world = ranks()
        outcomes = run_ranks_outcomes(
            cases.outlives_the_last_rank, world, limited, fresh=True, timeout=60
        )
        assert outcomes[world - 1].died
        for rank in range(world - 1):
            message = outcomes[rank].value
            assert message is not None, outcomes[rank].traceback
            assert f"to complete on all {world} ranks (nccl), got on rank {rank}" in message


@pytest.mark.parametrize("name", cases.SCENARIOS)
def test_training_equals_the_plain_model(name: str) -> None:
    run_ranks(cases.train_like_the_plain_model, ranks(), DEVICES, [name], fresh=True)


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
def test_the_backend_changes_no_bit(low: bool) -> None:
    run_ranks(cases.train_like_over_a_process_group, 2, DEVICES, low, fresh=True)


@pytest.mark.parametrize("registration", ["local", "symmetric", "none"])
def test_registered_buffers(registration: str) -> None:
    where = Where(options={"registration": registration})
    got = run_ranks(cases.registered_buffers, ranks(), where, fresh=True)
    assert len(set(got)) == 1, "the ranks registered differently"
    # Windows need peers that address one another directly.
    assert got[0] in (registration, "local" if registration == "symmetric" else registration)


@pytest.mark.parametrize("policy", ["efficiency", "zero"])
def test_cta_policies(policy: str) -> None:
    where = Where(options={"registration": "symmetric", "gather_cta_policy": policy})
    run_ranks(cases.train_like_the_plain_model, ranks(), where, ["float64"], fresh=True)


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    found: list[Step] = run_ranks(profiled_step, ranks(), DEVICES, fresh=True, timeout=120)
    return found


@pytest.mark.parametrize("check", [check_streams, check_order, check_overlap])
def test_gathers_and_reductions_run_beside_computation(
    check: Callable[[Step], None], steps: list[Step]
) -> None:
    for step in steps:
        check(step)


@pytest.mark.parametrize("switches", [False, True], ids=["in rank order", "in switches"])
def test_peer_memory(switches: bool) -> None:
    reasons = run_ranks(peer_cases.over_nvlink, ranks(), switches, fresh=True)
    if reasons[0]:
        pytest.skip(reasons[0])

# SPDX-License-Identifier: Apache-2.0
"""Two ranks of `NcclComm` on one CUDA device: values, order and failures, nothing of speed.

NCCL refuses that as a mistake, so it needs a way around: from 2.30 on it can be told to allow it;
before, each rank may say that it is on a host of its own, and they talk over loopback.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import device_cases as cases
import pytest
import torch
from device_cases import Where
from harness import run_ranks, run_ranks_outcomes

from fsdp_kernels import _ext
from fsdp_kernels.comm.pick import dotted

# Two ranks share the device's resources, and take turns on it.
SHARED = {"NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2", "NCCL_DEBUG": "WARN"}


@dataclass(frozen=True)
class Way:
    """A way to have two ranks on one device, and the NCCL versions that have it."""

    name: str
    environ: dict[str, str]
    since: int = 0
    before: int = 1 << 30


WAYS = (
    Way("NCCL_MULTI_RANK_GPU_ENABLE=1", {"NCCL_MULTI_RANK_GPU_ENABLE": "1", **SHARED}, since=23000),
    Way(
        "a host id for each rank, over loopback",
        {
            "NCCL_HOSTID": "rank{rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
            "NCCL_ALGO": "Ring",
            "NCCL_PROTO": "Simple",
            **SHARED,
        },
    ),
)


def where(way: Way, timeout_s: float = 20.0) -> Where:
    return Where(environ=way.environ, options={"timeout_s": timeout_s, "max_ctas": 2})


def connect(rank: int, world: int, place: Where) -> list[float]:
    """Gather a little."""
    comm = place.comm(rank, world)
    device = comm.device
    full, shard = torch.zeros(world, device=device), torch.full((1,), rank + 1.0, device=device)
    comm.all_gather(full, shard, label="fk.gather[a/0]").wait()
    got: list[float] = full.tolist()
    comm.close()
    return got


def first_that_works(version: int, attempt: Any) -> Way | str:
    """Return the first way that this NCCL has and that connects, or why none does."""
    reasons = []
    for way in WAYS:
        if not way.since <= version < way.before:
            reasons.append(f"{way.name}: needs NCCL {dotted(way.since)}, {dotted(version)} is here")
            continue
        try:
            got = attempt(way)
        except Exception as error:
            text = " ".join(str(error).split())
            reasons.append(f"{way.name}: {type(error).__name__}: {text[:300]}")
            continue
        assert got == [[1.0, 2.0]] * 2, f"{way.name}: gathered {got}"
        return way
    return "two ranks do not come up on one device: " + "; ".join(reasons)


@pytest.fixture(scope="module")
def place() -> Where:
    """Where two ranks share a device, if they can."""
    module = _ext.load("_nccl")
    if isinstance(module, str):
        pytest.skip(f"fsdp_kernels._nccl is {module}")

    def attempt(way: Way) -> Any:
        return run_ranks(connect, 2, where(way, 12.0), fresh=True, timeout=25)

    found = first_that_works(module.runtime_version(), attempt)
    if isinstance(found, str):
        pytest.skip(found)
    print(f"two ranks on one device by {found.name}")
    return where(found)


@pytest.mark.gpu
def test_contract(place: Where) -> None:
    # Last the one that closes: the ranks set up one communicator for all of it.
    names = sorted(cases.CHECKS, key=lambda name: name == "check_close")
    for failed in run_ranks(cases.run_checks, 2, place, names, fresh=True, timeout=60):
        assert not failed, "\n".join(failed.values())


@pytest.mark.gpu
def test_training_equals_the_plain_model(place: Where) -> None:
    names = ["float64", "float32", "no_sync"]
    run_ranks(cases.train_like_the_plain_model, 2, place, names, fresh=True, timeout=60)


@pytest.mark.gpu
def test_a_dead_rank_is_an_error(place: Where) -> None:
    limited = Where(environ=place.environ, options={**place.options, "timeout_s": 4.0})
    outcomes = run_ranks_outcomes(cases.outlives_the_last_rank, 2, limited, fresh=True, timeout=40)
    assert outcomes[1].died
    message = outcomes[0].value
    assert message is not None, outcomes[0].traceback
    assert "expected all_gather to complete on all 2 ranks (nccl), got on rank 0" in message


@pytest.mark.gpu
def test_a_gather_behind_a_reduction_that_hangs(place: Where) -> None:
    limited = Where(environ=place.environ, options={**place.options, "timeout_s": 4.0})
    message, nothing = run_ranks(cases.stops_after_a_gather, 2, limited, fresh=True, timeout=40)
    assert nothing is None
    assert "fk.reduce[layers.2/0]: expected reduce_scatter to complete on all 2 ranks" in message


# ---- the choice of a way, without a device


def refuses(*names: str) -> Any:
    def attempt(way: Way) -> list[list[float]]:
        if way.name in names:
            raise RuntimeError("Duplicate GPU\n detected")
        return [[1.0, 2.0]] * 2

    return attempt


def test_the_first_way_that_works_is_taken() -> None:
    assert first_that_works(23007, refuses()) is WAYS[0]
    assert first_that_works(22809, refuses()) is WAYS[1]
    assert first_that_works(23007, refuses(WAYS[0].name)) is WAYS[1]


def test_why_no_way_works() -> None:
    reason = first_that_works(22809, refuses(WAYS[1].name))
    assert isinstance(reason, str)
    assert f"{WAYS[0].name}: needs NCCL 2.30.0, 2.28.9 is here" in reason
    assert f"{WAYS[1].name}: RuntimeError: Duplicate GPU detected" in reason


def test_wrong_values_are_no_reason_to_go_on() -> None:
    with pytest.raises(AssertionError, match="gathered"):
        first_that_works(22809, lambda way: [[1.0, 1.0], [1.0, 2.0]])


def test_the_bodies_run_on_simulated_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    import nccl_sim

    nccl_sim.load()
    assert run_ranks(connect, 2, cases.SIMULATED) == [[1.0, 2.0]] * 2
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5")  # which this host may need
    seen = run_ranks(_environ, 2, Where("cpu", environ=WAYS[1].environ))
    assert [found["NCCL_HOSTID"] for found in seen] == ["rank0", "rank1"]
    seen = run_ranks(_environ, 2, cases.SIMULATED)
    kept = {"NCCL_IB_HCA": "mlx5"}
    assert seen == [kept, kept], "what the environment tells NCCL reached a test"


def _environ(rank: int, world: int, place: Where) -> dict[str, str]:
    import os

    place.enter(rank)
    return {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}

# SPDX-License-Identifier: Apache-2.0
"""The planner: the examples that people teach sharding with, by the command; impossible input."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fsdp_kernels.cli import main

GB = 10**9


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    """Return what `fsdp-kernels plan ... --json` prints."""
    assert main(["plan", *arguments, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_12_gb_with_adam_on_4_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    job = ("--params-bytes", "12GB", "--optimizer", "adam", "--world", "4")
    (ddp,) = run(capsys, *job, "--strategy", "ddp")
    assert ddp["peak_bytes"] == ddp["steady_bytes"] == 48 * GB
    (sharded,) = run(capsys, *job, "--unit-bytes", "1GB", "--prefetch", "0")
    kinds = ("params_bytes", "grads_bytes", "optimizer_bytes")
    assert [sharded[kind] for kind in kinds] == [3 * GB, 3 * GB, 6 * GB]
    assert sharded["steady_bytes"] == 12 * GB
    assert sharded["gather_bytes"] == 1 * GB  # one layer's buffer


def test_dp_ddp_and_sharded_with_activations(capsys: pytest.CaptureFixture[str]) -> None:
    def each(gb: int, *more: str) -> dict[str, Any]:
        kinds = ("params", "grads", "optimizer", "activation")
        given = [word for kind in kinds for word in (f"--{kind}-bytes", f"{gb}GB")]
        (found,) = run(capsys, *given, "--world", "4", *more)
        return found

    dp = each(7, "--strategy", "dp")
    assert dp["first_gpu_bytes"] == 28 * GB
    assert dp["peak_bytes"] == 21 * GB
    assert each(7, "--strategy", "ddp")["peak_bytes"] == 28 * GB
    sharded = each(12, "--unit-bytes", "2GB", "--prefetch", "0")
    assert sharded["steady_bytes"] == 9 * GB
    assert sharded["steady_bytes"] + sharded["activation_bytes"] == 21 * GB
    assert sharded["gather_bytes"] == 2 * GB  # the wrapped unit


SEVENTY = (
    *("--params", "70e9", "--param-dtype", "fp16", "--optimizer", "adam"),
    *("--state-dtype", "fp32", "--master-dtype", "none", "--strategy", "zero3"),
)


def test_70_b_in_fp16_with_adam_in_fp32(capsys: pytest.CaptureFixture[str]) -> None:
    one, *rows = run(capsys, *SEVENTY, "--world", "1,8,12,16,24")
    kinds = ("params_bytes", "grads_bytes", "optimizer_bytes", "steady_bytes")
    assert [one[kind] for kind in kinds] == [140 * GB, 140 * GB, 560 * GB, 840 * GB]
    assert [rows[0][kind] for kind in kinds] == [17.5 * GB, 17.5 * GB, 70 * GB, 105 * GB]
    steady = {row["world"]: row["steady_bytes"] / GB for row in rows}
    assert steady == {8: 105, 12: 70, 16: 52.5, 24: 35}
    assert [row["fits"] for row in rows] == [False, True, True, True]


def test_gathering_70_b_at_once_or_by_units(capsys: pytest.CaptureFixture[str]) -> None:
    (whole,) = run(capsys, *SEVENTY, "--world", "8", "--unit-params", "70e9")
    assert whole["gather_bytes"] == 140 * GB
    (units,) = run(capsys, *SEVENTY, "--world", "8", "--unit-params", "875e6")
    assert units["gather_bytes"] == 2 * 875_000_000 * 2
    assert units["gather_whole_bytes"] == 140 * GB


def test_a_largest_unit_of_7_gb_on_4_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    only = ("--grads-bytes", "0", "--optimizer-bytes", "0")
    units = ("--unit-bytes", "7GB", "--prefetch", "0")
    (found,) = run(capsys, "--params-bytes", "140GB", *only, *units, "--world", "4")
    assert found["params_bytes"] == 35 * GB
    assert found["gather_bytes"] == 7 * GB
    assert found["peak_bytes"] == 42 * GB


@pytest.mark.parametrize(
    ("strategy", "divided"),
    [
        ("ddp", ""),
        ("replicate", ""),
        ("zero1", "optimizer"),
        ("zero2", "optimizer grads"),
        ("zero3", "optimizer grads params"),
    ],
)
def test_what_each_strategy_divides(
    capsys: pytest.CaptureFixture[str], strategy: str, divided: str
) -> None:
    (found,) = run(capsys, "--params", "3e9", "--strategy", strategy, "--world", "4")
    whole = {"params": 12 * GB, "grads": 12 * GB, "optimizer": 24 * GB}
    for kind, nbytes in whole.items():
        assert found[f"{kind}_bytes"] == nbytes // (4 if kind in divided.split() else 1)

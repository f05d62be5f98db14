# SPDX-License-Identifier: Apache-2.0
"""Every bench runs at a tiny size, checks its sides against one another, and ends in one JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[1] / "bench"

STEP = "--dim 64 --layers 2 --batch 1 --sequence 8 --rounds 2 --dtype bf16"
BENCHES = {
    "adam": (
        "--numel 5000 --rounds 2",
        {"speedup", "speedup_buffer_kept", "ceiling_gb_per_s", "sides"},
    ),
    "kernels": ("--numel 5000 --rounds 2", {"pack", "norm", "pack_speedup", "norm_speedup"}),
    "reduce_adam": (
        "--numel 5000 --world 3 --copies 2 --clip 1 --dtype bf16 --rounds 2",
        {"share_of_copy", "speedup", "ceiling_gb_per_s", "sides"},
    ),
    "step": (STEP, {"speedup_over_fsdp2", "speedup_over_ddp", "losses", "ceiling_gb_per_s"}),
    "host": ("--units 3 --rounds 2", {"least_ratio", "worlds"}),
}


@cache
def run(bench: str) -> dict[str, Any]:
    """Run a bench in a process of its own and return its last line."""
    command = [sys.executable, str(BENCH / f"{bench}.py"), *BENCHES[bench][0].split()]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return last


@pytest.mark.parametrize("bench", BENCHES)
def test_bench_ends_in_one_json(bench: str) -> None:
    result = run(bench)
    assert BENCHES[bench][1] | {"bench", "date", "command", "environment"} <= result.keys()
    assert result["bench"] == bench


def test_every_kernel_runs_on_small_data() -> None:
    """What `make gpu-check` runs under compute-sanitizer."""
    command = [sys.executable, str(BENCH / "gpu_small.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout) == {"adam": 1, "ops pack": 18, "ops norm": 3}


def test_step_sends_less_than_fsdp2() -> None:
    sides = run("step")["sides"]
    ours, theirs = sides["ours"], sides["FSDP2"]
    assert ours["collectives"] <= theirs["collectives"]
    assert ours["sent_mb"] < theirs["sent_mb"]
    assert sides["unsharded"]["collectives"] == 0

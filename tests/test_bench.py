# SPDX-License-Identifier: Apache-2.0
"""Every bench runs at a tiny size, checks its sides against one another, and ends in one JSON.

All run in one process, through the command, which starts torch once; what is counted is compared
with the arithmetic of the algorithm, so it is the same on every machine.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fsdp_kernels import _benches
from fsdp_kernels.cli import main

BENCH = Path(__file__).parents[1] / "bench"

SHAPE = "--dim 64 --layers 2 --batch 1 --sequence 8"
BENCHES = {
    "adam": ("--numel 5000 --rounds 2", {"speedup", "speedup_buffer_kept", "ceiling_gb_per_s"}),
    "reduce_adam": (
        "--numel 5000 --world 3 --copies 2 --clip 1 --dtype bf16 --rounds 2",
        {"share_of_copy", "speedup", "ceiling_gb_per_s"},
    ),
    "pack": ("--numel 50000 --rounds 2 --world 3", {"speedup_over_chunk_cat", "ceiling_gb_per_s"}),
    "norm": ("--numel 50000 --rounds 2", {"speedup", "speedup_with_count", "ceiling_gb_per_s"}),
    "collectives": ("--sizes 3000 --rounds 2", {"sizes", "world"}),
    "step": (
        f"{SHAPE} --rounds 2 --dtype bf16 --clip none 1.0 --strategies zero3 zero1",
        {"speedup_over_fsdp2", "speedup_over_ddp", "losses", "ceiling_gb_per_s", "skipped"},
    ),
    "host": ("--units 3 --params 20 --rounds 2 --worlds 2", {"least_ratio", "worlds"}),
    "memory": (f"{SHAPE} --sides unsharded FSDP2 ours ours,~shared~memory DDP", {"ideal_bytes"}),
}
RUN = """
import json, sys
from fsdp_kernels.cli import main
sys.exit(any([main(["bench", *words]) for words in json.loads(sys.argv[1])]))
"""


def words(bench: str, folder: Path) -> list[str]:
    """Spell a bench's command; ~ stands for a space inside a word."""
    options = [word.replace("~", " ") for word in BENCHES[bench][0].split()]
    return [bench, *options, "--record", str(folder)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Run all, and return the rows of each."""
    return run(tmp_path_factory.mktemp("bench"))


@cache
def run(folder: Path) -> dict[str, list[dict[str, Any]]]:
    commands = [words(bench, folder) for bench in BENCHES]
    commands.append(["plot", "--rows", str(folder), "--output", str(folder / "drawn")])
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(commands)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[dict[str, Any]]] = {}
    for line in done.stdout.splitlines():
        if line.startswith('{"bench"'):
            row = json.loads(line)
            found.setdefault(row["bench"], []).append(row)
    assert json.loads(done.stdout.splitlines()[-1]), "the last line is no JSON"
    recorded = {
        file.stem: [json.loads(line) for line in file.read_text().splitlines()]
        for file in folder.glob("*.jsonl")
    }
    assert recorded == {bench: rows for bench, rows in found.items() if bench != "plot"}
    return found


@pytest.mark.parametrize("bench", BENCHES)
def test_bench_ends_in_one_json(bench: str, rows: dict[str, list[dict[str, Any]]]) -> None:
    for row in rows[bench]:
        assert BENCHES[bench][1] | {"date", "command", "environment", "device"} <= row.keys()
    assert len(rows[bench]) == (2 if bench == "step" else 1)


def test_every_bench_is_drawn(rows: dict[str, list[dict[str, Any]]]) -> None:
    (drawn,) = rows["plot"]
    assert {Path(path).stem for path in drawn["pictures"]} == BENCHES.keys()
    assert all(Path(path).read_bytes().startswith(b"\x89PNG") for path in drawn["pictures"])


def bytes_of(row: dict[str, Any]) -> dict[str, int]:
    """Read bytes per parameter, without the few of scalars and tables."""
    return {name: int(side["bytes_per_parameter"]) for name, side in row["sides"].items()}


def test_bytes_of_the_optimizer_tail_follow_from_what_it_must_read_and_write(
    rows: dict[str, list[dict[str, Any]]],
) -> None:
    """bf16 gradients and parameters, float32 master and moments, clipped."""
    state, cast, norm = 3 * 8, 2 + 4, 4
    want = {
        "ours": 2 + 2 + state + 2,
        "torch": cast + norm + 8 + 4 + state + cast,
        "torch, buffer kept": cast + norm + 8 + 4 + state + cast,
        "fused AdamW alone": 4 + state,
        "ceiling": 8,
    }
    (row,) = rows["adam"]
    found = bytes_of(row)
    assert {name: found[name] for name in want} == want
    assert found["torch, foreach"] > 100
    launches = {name: side["launches"] for name, side in row["sides"].items()}
    assert launches["ours"] < launches["torch"] < launches["torch, foreach"]


def test_bytes_of_the_other_kernels(rows: dict[str, list[dict[str, Any]]]) -> None:
    (reduced,), (packed,), (normed,) = (rows[name] for name in ("reduce_adam", "pack", "norm"))
    # Three peers in bf16, the sum written and read, state, two copies in bf16.
    assert bytes_of(reduced)["ours"] == 3 * 2 + 2 * 4 + 24 + 2 * 2 == reduced["bytes_per_parameter"]
    # A vector that has no gradient, and padding, are written alone; torch writes all twice.
    assert 5.5 < packed["sides"]["ours"]["bytes_per_parameter"] < 6
    assert 9.5 < packed["sides"]["torch _foreach_copy_"]["bytes_per_parameter"] < 10
    assert [packed["sides"][name]["launches"] for name in ("ours", "torch _foreach_copy_")] == [
        1,
        2,
    ]
    assert bytes_of(normed)["ours"] == bytes_of(normed)["torch vector_norm"] == 4
    assert normed["sides"]["ours"]["launches"] == 1


def test_a_step_is_counted_on_every_side(rows: dict[str, list[dict[str, Any]]]) -> None:
    free, clipped = rows["step"]
    assert (free["clip"], clipped["clip"]) == (None, 1.0)
    sides = free["sides"]
    tails = {name: round(side["tail_bytes_per_parameter"]) for name, side in sides.items()}
    # Half of the parameters each, gradients in float32, a bf16 copy for the gathers.
    assert tails["ours"] == (4 + 24 + 2) / 2
    # The sum of both ranks' gradients is in it, though it runs in backward.
    assert tails["ours, shared memory, overlapped"] == (2 * 4 + 24 + 2) / 2
    assert tails["FSDP2, fused AdamW"] == (4 + 24) / 2
    assert tails["DDP, fused AdamW"] == tails["unsharded, fused AdamW"] == 4 + 24
    assert sides["ours"]["launches"] < sides["FSDP2, fused AdamW"]["launches"]
    assert {"ours, shared memory", "ours, zero1", "ours, zero1, shared memory"} <= sides.keys()
    clip = clipped["sides"]["ours"]["tail_bytes_per_parameter"] * 2
    assert round(clip) == 4 + 24 + 2 + 4, "the norm reads the gradients once more"


def test_step_sends_less_than_fsdp2(rows: dict[str, list[dict[str, Any]]]) -> None:
    for row in rows["step"]:
        ours, theirs = row["sides"]["ours"], row["sides"]["FSDP2"]
        assert ours["collectives"] <= theirs["collectives"]
        assert ours["sent_mb"] < theirs["sent_mb"]
        assert row["sides"]["unsharded"]["collectives"] == 0
        assert set(row["skipped"]) <= {"DeepSpeed ZeRO-3", "Megatron-FSDP"}


def test_bandwidths_are_those_of_nccl_tests(rows: dict[str, list[dict[str, Any]]]) -> None:
    (row,) = rows["collectives"]
    factors = {"all_gather": 1 / 2, "reduce_scatter": 1 / 2, "all_reduce": 1}
    sides = {side["side"] for side in row["sides"]}
    assert {"torch.distributed", "ours, process_group"} <= sides
    assert len(row["sides"]) == 3 * len(sides)
    for side in row["sides"]:
        assert side["algorithm_gb_per_s"] == pytest.approx(side["bytes"] / side["us"] / 1e3)
        bus = side["algorithm_gb_per_s"] * factors[side["operation"]]
        assert side["bus_gb_per_s"] == pytest.approx(bus)


def test_memory_holds_what_each_side_must(rows: dict[str, list[dict[str, Any]]]) -> None:
    (row,) = rows["memory"]
    sides, ideal = row["sides"], row["ideal_bytes"]
    assert set(sides) == {"unsharded", "FSDP2", "ours", "ours, shared memory", "DDP"}
    for name, side in sides.items():
        least = ideal if name in ("unsharded", "DDP") else ideal / 2
        assert least <= side["rest_bytes"] <= side["peak_bytes"], name
    assert sides["ours"]["rest_bytes"] < sides["unsharded"]["rest_bytes"]
    assert sides["ours, shared memory"]["shared_bytes"] > 0 == sides["ours"]["shared_bytes"]


def test_host_time_is_given_for_units_and_for_steps(rows: dict[str, list[dict[str, Any]]]) -> None:
    (row,) = rows["host"]
    parts = row["worlds"]["2"]
    assert len(parts) == 5
    many = parts["optimizer step, many"]["launches"]
    assert many["ours"] < 10, "the launches of a step do not grow with the parameters of a unit"
    assert many["FSDP2"] > 20


@pytest.fixture(scope="module")
def counts() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module("counts")
    sys.path.remove(str(BENCH))


def test_operators_are_counted_by_what_they_read_and_write(counts: ModuleType) -> None:
    x, y, low = torch.ones(100), torch.ones(100), torch.ones(100, dtype=torch.bfloat16)
    steps = {
        "in place": (lambda: x.add_(y), 1, 1200),
        "new": (lambda: x + y, 1, 1200),
        "a copy reads the source alone": (lambda: x.copy_(low), 1, 600),
        "a cast": (lambda: x.bfloat16(), 1, 600),
        "a foreach": (lambda: torch._foreach_copy_([x, y], [low, low]), 1, 1200),
        "zeros": (lambda: (x.zero_(), torch.zeros_like(x)), 2, 800),
        "views and empty tensors are free": (lambda: (x.view(10, 10).t(), torch.empty(9)), 0, 0),
        "out is written": (lambda: torch.add(x, y, out=torch.empty(100)), 1, 1200),
    }
    for name, (run, launches, nbytes) in steps.items():
        found = counts.count(run)
        assert (found.launches, found.nbytes) == (launches, nbytes), (name, found)


def test_every_kernel_runs_on_small_data() -> None:
    """What `make gpu-check` runs under compute-sanitizer."""
    command = [sys.executable, str(BENCH / "gpu_small.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout) == {"adam": 1, "ops pack": 18, "ops norm": 3}


@pytest.mark.parametrize("arguments", [[], ["--list"], ["--help"]])
def test_the_command_lists_the_benches(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 0
    printed = capsys.readouterr().out
    for name in _benches.NAMES:
        assert f"  {name} " in printed
    assert "The optimizer tail after a reduce-scatter" in printed


def test_an_unknown_bench_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "nothing", "--rounds", "3"]) == 2
    assert "expected one of adam, " in capsys.readouterr().err


def test_benches_that_are_not_there_are_missed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_benches, "__file__", str(tmp_path / "fsdp_kernels" / "_benches.py"))
    with pytest.raises(FileNotFoundError, match="expected the benches in"):
        _benches.folder()

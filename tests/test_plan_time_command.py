# SPDX-License-Identifier: Apache-2.0
"""`fsdp-kernels plan --time`: tables, JSON, traces, pictures, and what documents show of them."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_kernels import cli
from fsdp_kernels.trace_file import Sample, Slice, TraceFile
from fsdp_kernels.trace_picture import draw

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "bench"))

import published  # noqa: E402

MODEL = "--params 7e9 --layers 32 --width 4096 --vocabulary 32000 --param-dtype bf16"
TOKENS = "--batch 2 --sequence 4096"


def plan(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.main(["plan", *shlex.split(command)])
    return code, *capsys.readouterr()


def rows(command: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    code, out, err = plan(f"--time --json {command}", capsys)
    assert code == 0, err
    found: list[dict[str, Any]] = json.loads(out)
    return found


def test_rows_of_every_strategy_and_world(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(
        f"{MODEL} {TOKENS} --strategy zero3,hybrid,zero2,zero1,replicate,ddp --world 8,64", capsys
    )
    assert len(found) == 12
    for row in found:
        assert row["step_s"] == pytest.approx(row["compute_s"] + row["exposed_s"])
        tokens = 2 * 4096 * row["world"]
        assert row["tokens_per_s"] == pytest.approx(tokens / row["step_s"])
        assert row["tokens_per_s_per_gpu"] == pytest.approx(row["tokens_per_s"] / row["world"])
        assert 0.1 < row["mfu"] <= row["hfu"] < 0.5
    shards = {(row["strategy"], row["world"]): row["shard"] for row in found}
    assert shards["zero3", 64] == 64
    assert shards["hybrid", 64] == 8
    assert shards["replicate", 64] == shards["ddp", 64] == 1


def test_what_changes_a_step_does(capsys: pytest.CaptureFixture[str]) -> None:
    def step_s(more: str) -> float:
        return float(rows(f"{MODEL} {TOKENS} --world 64 {more}", capsys)[0]["step_s"])

    plain = step_s("")
    assert step_s("--prefetch 0") > plain
    assert step_s("--efficiency 0.25") > 1.8 * plain
    assert step_s("--measured 4000") > plain > step_s("--measured 16000")
    assert step_s("--network 1GB") > plain
    assert step_s("--device A100") > 2 * plain
    assert step_s("--checkpoint-activations") == pytest.approx(4 / 3 * plain, rel=0.1)
    assert 1.9 * plain < step_s("--micro-batches 2") < 2 * plain
    assert step_s("--micro-batches 2 --no-sync") < step_s("--micro-batches 2 --network 20GB")
    assert step_s("--nvlink 10GB") > plain
    assert step_s("--link-share 0.1") > plain
    assert step_s("--algorithm tree --world 1024") < step_s("--algorithm ring --world 1024")
    assert step_s("--host-gpus 4 --network 5GB") > step_s("--host-gpus 8 --network 5GB")


@pytest.mark.parametrize("recompute", ["", "--checkpoint-activations"])
def test_the_bytes_are_those_of_the_plan(
    recompute: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At their peaks."""
    command = f"{MODEL} {TOKENS} --prefetch 2 --world 32 {recompute}"
    code, out, _ = plan(f"--json {command}", capsys)
    assert code == 0
    (planned,) = json.loads(out)
    rows(f"{command} --trace {tmp_path / 'trace.json'}", capsys)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    peaks: dict[str, int] = {}
    for event in events:
        if event["ph"] == "C":
            value = event["args"]["bytes"]
            assert value >= 0
            peaks[event["name"]] = max(peaks.get(event["name"], 0), value)
    assert peaks["full_params"] == planned["gather_bytes"]
    assert peaks["full_grads"] == planned["reduce_bytes"]
    assert peaks["activations"] == planned["activation_bytes"]
    labels = {event["name"] for event in events if event["ph"] == "X"}
    assert {"fk.gather[blocks.3/0]", "fk.backward[root]", "fk.step[blocks.31/0]"} <= labels


def test_a_table_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    command = f"--time {MODEL} {TOKENS} --strategy zero3,hybrid --world 8,64 --plot {path}"
    code, out, _ = plan(command, capsys)
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines if "tokens/s/GPU" in line] == ["zero3", "hybrid"]
    assert any(line.startswith("64 GPUs (8 x 8) ") for line in lines)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"--time {MODEL}", "--time: expected tokens to compute with, got none. Give --batch"),
        (f"--time {MODEL} {TOKENS} --efficiency 2", "--efficiency: expected a share above 0"),
        (f"--time {MODEL} {TOKENS} --measured 1e6", "--measured: expected above 0 and up to"),
        (f"--time {MODEL} {TOKENS} --link-share 0", "--link-share: expected a share above 0"),
        (f"--time {MODEL} {TOKENS} --trace /nowhere/x.json", "--trace: expected a file that can"),
        (f"--time {MODEL} {TOKENS} --strategy dp", "--time: expected a strategy with a process"),
        (f"--time {MODEL} {TOKENS} --offload optimizer", "--time: expected parameters and state"),
        (f"--time {MODEL} {TOKENS} --world 13", "mesh: expected groups that share nodes of"),
        ("--time --params 7e9 --param-dtype fp8 --device A100 " + TOKENS, "--param-dtype: expec"),
        (f"{MODEL} --trace x.json", "--trace: expected --time, got a plan of memory"),
    ],
)
def test_impossible_input_is_answered(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = plan(command, capsys)
    assert code == 2
    assert out == ""
    assert message in err


# -- pictures and documents -----------------------------------------------------------------------


def command_of(picture: str) -> str:
    """The command that a document gives for one of its pictures."""
    texts = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    (line,) = [x for text in texts for x in text.splitlines() if f"--picture {picture}" in x]
    return line.strip().removeprefix("fsdp-kernels plan ")


def test_the_picture_of_a_step_is_what_its_command_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = command_of("docs/step.svg").replace("docs/step.svg", str(tmp_path / "step.svg"))
    code, _, err = plan(command, capsys)
    assert code == 0, err
    assert (tmp_path / "step.svg").read_text() == (ROOT / "docs/step.svg").read_text()


def test_published_results_are_shown_as_they_come_out() -> None:
    assert published.table() in (ROOT / "docs/time.md").read_text()


def test_a_picture_has_every_slice_and_counter() -> None:
    trace = TraceFile(
        "a < b",
        ["compute"],
        [Slice("compute", "fk.forward[a]", 0, 900), Slice("gather", "fk.gather[a/0]", 100, 1000)],
        [Sample("bytes", 0, 0), Sample("bytes", 500, 7)],
    )
    text = draw(trace)
    assert "<title>a &lt; b</title>" in text
    assert text.count("fk.forward[a]: 900 ns") == text.count("fk.gather[a/0]: 900 ns") == 1
    assert text.count("<polygon") == 1
    assert "fk.gather" not in draw(trace, rows=["compute"])
    with pytest.raises(ValueError, match="expected slices to draw, got none"):
        draw(TraceFile("empty"))

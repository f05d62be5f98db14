# SPDX-License-Identifier: Apache-2.0
"""The planner: the examples that people teach sharding with, by the command; impossible input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_kernels.cli import main
from fsdp_kernels.plan.sizes import parse_bytes, parse_count, show_bytes

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


LONG = ("--params", "70e9", "--batch", "1", "--sequence", "4096")


def test_what_each_option_takes_away_at_70_b(capsys: pytest.CaptureFixture[str]) -> None:
    """Width 9,064 and 71 blocks stand for 70e9 parameters: see `transformer.py`."""

    def at_64(*more: str) -> dict[str, Any]:
        (found,) = run(capsys, *LONG, "--world", "64", *more)
        return found

    token = 4096 * 9064  # elements of a block's input
    plain, mixed = at_64("--param-dtype", "fp32"), at_64("--param-dtype", "bf16")
    assert plain["activation_bytes"] == pytest.approx(71 * 16 * token * 4, abs=71)
    for kind in ("gather", "reduce", "autograd", "activation"):
        assert mixed[f"{kind}_bytes"] == pytest.approx(plain[f"{kind}_bytes"] / 2, abs=71)
    assert mixed["steady_bytes"] == plain["steady_bytes"]  # an fp32 master took what was won
    without = at_64("--param-dtype", "bf16", "--master-dtype", "none")
    assert plain["steady_bytes"] - without["steady_bytes"] == 280 * GB / 64

    again = at_64("--param-dtype", "bf16", "--checkpoint-activations")
    # Inputs of all blocks, and 15 of the 16 times that of the one that is computed again.
    assert again["activation_bytes"] == pytest.approx((71 + 15) * token * 2, abs=71)
    moved = at_64("--param-dtype", "bf16", "--offload", "optimizer")
    taken = (280 + 560) * GB / 64  # master and moments
    assert mixed["steady_bytes"] - moved["steady_bytes"] == moved["host_bytes"] == taken


def test_the_fewest_80_gb_gpus_with_all_three(capsys: pytest.CaptureFixture[str]) -> None:
    every = ("--param-dtype", "bf16", "--checkpoint-activations", "--offload", "optimizer")
    four, five = run(capsys, *LONG, *every, "--hbm", "80GB", "--world", "4,5")
    assert (four["fits"], five["fits"]) == (False, True)
    assert four["smallest_world"] == 5
    block = 70e9 / 71 * 2
    passing = 4 * block + (71 + 15) * 4096 * 9064 * 2  # two gathered, one reduced, one unpacked
    assert five["peak_bytes"] == pytest.approx((140 + 140) * GB / 5 + passing, rel=1e-6)


def test_the_smallest_world_is_where_it_begins_to_fit(capsys: pytest.CaptureFixture[str]) -> None:
    for hbm in ("60GB", "80GB", "141GB"):
        (first,) = run(capsys, *SEVENTY, "--world", "8", "--hbm", hbm)
        least = first["smallest_world"]
        rows = run(capsys, *SEVENTY, "--world", f"{least - 1},{least}", "--hbm", hbm)
        assert [row["fits"] for row in rows] == [False, True]
    (ddp,) = run(capsys, *SEVENTY[:-1], "ddp", "--world", "8")
    assert ddp["smallest_world"] is None


def test_hybrid_shards_inside_a_host_only(capsys: pytest.CaptureFixture[str]) -> None:
    rows = run(capsys, *SEVENTY[:-1], "hybrid", "--world", "8,16,64")
    assert {row["steady_bytes"] for row in rows} == {105 * GB}
    (pairs,) = run(capsys, *SEVENTY[:-1], "hybrid", "--world", "8", "--shard", "2")
    assert pairs["steady_bytes"] == 420 * GB


def test_8_bit_moments_and_sgd(capsys: pytest.CaptureFixture[str]) -> None:
    def state(optimizer: str) -> int:
        (found,) = run(capsys, "--params", "256e6", "--optimizer", optimizer, "--world", "1")
        return int(found["optimizer_bytes"])

    assert state("adam8bit") == 2 * (256 + 4) * 10**6  # a scale for each 256 values
    assert [state(name) for name in ("sgd", "momentum", "adam")] == [0, 1024e6, 2048e6]


def test_gathers_grow_with_prefetch_and_stop_at_the_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = ("--params", "4e6", "--unit-params", "1e6", "--world", "2")
    for prefetch, units in ((0, 1), (1, 2), (2, 3), (3, 4), (9, 4)):
        (found,) = run(capsys, *job, "--prefetch", str(prefetch))
        assert found["gather_bytes"] == units * 4e6


def test_accumulating_without_reductions_keeps_full_gradients(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (found,) = run(capsys, "--params", "3e9", "--world", "4", "--no-sync")
    assert (found["grads_bytes"], found["grads_shard_bytes"]) == (12 * GB, 3 * GB)
    assert found["reduce_bytes"] == 0


def test_steps_in_backward_leave_one_units_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    job = ("--params", "8e9", "--unit-params", "1e9", "--world", "4", "--overlap-backward")
    (found,) = run(capsys, *job)
    assert (found["grads_bytes"], found["stepping_bytes"]) == (0, GB)
    assert found["steady_bytes"] == (8 + 16) * GB
    (deferred,) = run(capsys, *job, "--strategy", "zero1")  # whose reductions are the step's
    assert (deferred["grads_shard_bytes"], deferred["stepping_bytes"]) == (8 * GB, 0)
    assert main(["plan", *job, "--explain"]) == 0
    text = capsys.readouterr().out
    assert "stepping     1 GB = units.7 1 GB, at 'reduce units.7'" in text
    assert "0 B = each unit's go with its step in backward" in text


def test_every_figure_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SEVENTY, "--world", "8", "--explain"]) == 0
    text = capsys.readouterr().out
    assert "params       17.5 GB = 70e9 parameters x 2 B / 8 ranks" in text
    assert "optimizer      70 GB = 70e9 parameters x 8 B / 8 ranks" in text
    assert "gather       3.94 GB = blocks.0 1.97 GB + blocks.1 1.97 GB" in text
    assert "steady        105 GB = params + grads + optimizer" in text
    assert "fits              no = 112.9 GB > 80 GB" in text
    assert "smallest world that fits: 12 GPUs" in text
    assert "the whole model at once would take 140 GB" in text


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="needs the `plan` extra")
    path = tmp_path / "plan.png"
    assert main(["plan", *SEVENTY, "--world", "8,12", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert main(["plan", *SEVENTY, "--world", "8", "--plot", str(tmp_path / "plan.xyz")]) == 2
    assert "expected a .png, .svg or .pdf file" in capsys.readouterr().err


def small() -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def small_inputs(batch: int, sequence: int) -> tuple[torch.Tensor]:
    return (torch.zeros(batch, sequence, 8),)


def no_model() -> int:
    return 3


def test_a_model_from_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    """Padding is what the layout says; activations are the layers' inputs and the output."""
    where = ("--module", "test_plan:small", "--inputs", "test_plan:small_inputs")
    (found,) = run(capsys, *where, "--batch", "2", "--sequence", "3", "--world", "3")
    # 64 + 8 elements are cut into three shards of 24, each padded to 128 bytes: 32 elements.
    assert found["params_bytes"] == 4 * 32 * 4
    assert found["gather_bytes"] == 2 * 3 * 32 * 4
    assert found["activation_bytes"] == 5 * 2 * 3 * 8 * 4
    (one,) = run(capsys, *where[:2], "--unit-params", "1000", "--world", "1")
    assert one["gather_bytes"] == 4 * 72 * 4  # no layer is as large: all are the root's


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("llama-7b", "expected options, got a name"),
        ("", "expected one of --params, --params-bytes, --hf-config, --module, got none"),
        ("--params 7e9 --module a:b", "got --params and --module"),
        ("--params 7e9 --strategy hybrid --world 12", "expected a multiple of the shard group's 8"),
        ("--params 7e9 --strategy ddp --shard 4", "expected a strategy that shards, got ddp"),
        ("--params 7e9 --strategy ddp --offload optimizer", "Use --strategy zero3, or leave"),
        ("--params 7e9 --strategy zero2 --offload params", "expected zero3 or hybrid, got zero2"),
        ("--params 7e9 --strategy ddp --overlap-backward", "fully_shard, got ddp"),
        ("--params 7e9 --no-sync --overlap-backward", "expected a reduction in every backward"),
        ("--params 7e9 --time --overlap-backward", "expected a plan of memory, got --time"),
        ("--params 7e9 --optimizer sgd --overlap-backward", "got --optimizer sgd: only Sharded"),
        ("--params 7e9 --optimizer adam8bit --overlap-backward", "or adamw, got --optimizer adam8"),
        ("--params 7e9 --micro-batches 4", "--micro-batches: expected --time"),
        ("--params 7e9 --efficiency 0.3", "--efficiency: expected --time"),
        ("--params 1e30", "expected at most 10,000 blocks, got 171,975,378"),
        ("--params 7e9 --width 1", "expected at most 10,000 blocks, got 583,333,333 of width 1"),
        ("--params 7e9 --batch 1", "expected --batch and --sequence together"),
        ("--params 7e9 --unit-params 8e9", "expected from 1 to the model's 7,000,000,000"),
        ("--params 7e9 --unit-params 1000", "expected at most 10,000 units, got 7,000,000"),
        ("--params 7e9 --unit-params 1e9 --unit-bytes 1GB", "got both"),
        ("--params 7e9 --device H300", "expected A100-40GB, A100, H100, H200, B200, got 'H300'"),
        ("--params 7e9 --vocabulary 1000000", "expected an embedding and a head smaller than"),
        ("--params 7e9 --unit-class Block", "expected --module or --hf-config, got --params"),
        ("--params 7e9 --trace x.json", "expected --time"),
        ("--module test_plan:small --optimizer-bytes 1GB", "expected --params, got --module"),
        ("--module test_plan:missing", "expected package.module:function"),
        ("--module test_plan:no_model", "returns a int"),
        ("--module test_plan:small --unit-class Block", "It has Linear, Sequential"),
        ("--module test_plan:small --param-dtype fp8", "in which fully_shard cannot compute"),
        ("--module test_plan:small --batch 1 --sequence 2", "a forward of Sequential that runs"),
        ("--hf-config nowhere.json", "expected a file, got 'nowhere.json'"),
    ],
)
def test_impossible_input_is_answered_with_what_to_change(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "hf-config" in arguments:
        pytest.importorskip("transformers", reason="needs the `plan` extra")
    assert main(["plan", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("fsdp-kernels plan: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--params many", "expected a number, got 'many'. Write 70e9, 70B or 350M"),
        ("--params 1.23456e3", "without a fraction"),
        ("--params 7e9 --hbm 80XB", "expected bytes, got '80XB'. Write 80GB"),
        ("--params 7e9 --hbm 80", "expected at least 1 GB, got '80', which is 80 B. Write 80GB"),
        ("--params 7e9 --hbm 0", "expected at least 1 GB, got '0', which is 0 B. Write 80GB"),
        ("--params 7e9 --hbm 512MB", "which is 512 MB. Write 80GB"),
        ("--params 7e9 --reserve 4", "expected 0 or at least 1 MB, got '4', which is 4 B. Write 4"),
        ("--params 7", "expected at least 1,000 parameters, got '7'. Write 7e9"),
        ("--params 0", "expected at least 1,000 parameters, got '0'. Write 7e9"),
        ("--params-bytes 7B", "which is 7 B. Write 7GB"),
        ("--params 7e9 --time --network 400Gb", "which are bits. Write 50GB for 400 Gb/s"),
        ("--params 7e9 --time --nvlink 450", "expected at least 1 MB, got '450'"),
        ("--params 7e9 --world 8,zero", "expected a whole number from 1, got 'zero'"),
        ("--params 7e9 --world 0", "expected a whole number from 1, got '0'"),
        ("--params 7e9 --world 2.5", "expected a whole number from 1, got '2.5'"),
        ("--params 7e9 --prefetch -1", "expected a whole number from 0, got '-1'"),
        ("--params 7e9 --strategy zero4", "expected some of dp,ddp,replicate"),
    ],
)
def test_what_cannot_be_read(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *arguments.split()])
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 3  # the usage in two lines, and what is wrong


def test_lists_with_commas_and_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--params 7e9 --world 8,16 32 --strategy zero3 ddp --hbm 80GB --optimizer adamw"
    found = run(capsys, *words.split())
    assert [(row["strategy"], row["world"]) for row in found] == [
        (strategy, world) for strategy in ("zero3", "ddp") for world in (8, 16, 32)
    ]


@pytest.mark.parametrize("command", ["", "plan"])
def test_help_is_plain_text(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert "fsdp-kernels" in text
    assert "`" not in text


def test_bytes_as_people_write_them() -> None:
    texts = {"80GB": 80 * GB, "80GiB": 80 * 2**30, "1.5e3": 1500, "17.5 GB": 17_500_000_000}
    for text, nbytes in texts.items():
        assert parse_bytes(text) == nbytes
    for nbytes, text in ((17_500_000_000, "17.5 GB"), (999, "999 B"), (112_900_000, "112.9 MB")):
        assert show_bytes(nbytes) == text
        assert parse_bytes(text) == nbytes
    assert parse_count("70B") == parse_count("70e9") == 70 * GB

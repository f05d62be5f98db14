# SPDX-License-Identifier: Apache-2.0
"""The training example on a tiny model: under torchrun, and on ranks that are forked."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

from lm.data import HELD_OUT, ResumableSampler, Windows, endless, read_corpus  # noqa: E402
from lm.options import parse  # noqa: E402
from train_lm import check, run  # noqa: E402

TINY = [
    *("--layers", "2", "--heads", "2", "--width", "32", "--context", "32"),
    *("--batch", "8", "--accumulate", "2", "--steps", "8", "--warmup", "2"),
    *("--eval-every", "4", "--eval-bytes", "1024", "--checkpoint-every", "100"),
    *("--sample-bytes", "6"),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with forty small files, of which some are held out."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        words = " ".join(f"{j * j % (i + 7)} sheep" for j in range(120))
        (folder / f"{i}.txt").write_text(words)
    return folder


def launch(*arguments: str | Path, world: int = 2) -> subprocess.CompletedProcess[str]:
    """Run the example as a user does: under torchrun, or alone for a world of one."""
    launcher = [sys.executable]
    if world > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        launcher += ["--nproc-per-node", str(world)]
    command = [*launcher, str(EXAMPLES / "train_lm.py"), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def on_rank(rank: int, world: int, words: list[str]) -> str:
    """Do what the example does once its processes have joined, and return what it prints."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        run(parse(words), torch.device("cpu"))
    return printed.getvalue()


def summarised(printed: str) -> tuple[dict[str, Any], list[float]]:
    """Return the last line of a training, and its losses."""
    summary = json.loads(printed.splitlines()[-1])
    return summary, json.loads(Path(summary["history"]).read_text())["losses"]


def train(out: Path, *arguments: str | Path, world: int = 2) -> tuple[dict[str, Any], list[float]]:
    """Train on forked ranks, which need not import torch: most of what a launch would take."""
    words = ["--out", str(out), *TINY, *map(str, arguments)]
    return summarised(run_ranks(on_rank, world, words, timeout=120)[0])


def test_resume_continues_bit_for_bit(text: Path, tmp_path: Path) -> None:
    """Four and four steps are eight steps, with dropout, accumulation and bf16.

    The eight are taken under torchrun.
    """
    arguments = ["--data", text, "--dtype", "bf16", "--dropout", "0.1"]
    traced = ["--trace", tmp_path / "trace.json"]
    done = launch("--out", tmp_path / "at_once", *TINY, *arguments, *traced)
    assert done.returncode == 0, done.stdout + done.stderr
    summary, at_once = summarised(done.stdout)
    train(tmp_path / "parts", *arguments, "--stop-after", "4")
    resumed, in_parts = train(tmp_path / "parts", *arguments, "--resume")
    assert in_parts == at_once
    assert len(at_once) == 8
    assert resumed["val_bits_per_byte"] == summary["val_bits_per_byte"]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    labels = [event["name"] for event in events]
    assert labels.count("fk.pack[blocks.1/0]") == 2, "not one step of two micro-batches"
    assert labels.count("fk.step[blocks.1/0]") == 1

    keys = {"loss_first", "loss_last", "val_bits_per_byte", "tokens_per_s", "world_size", "comm"}
    assert keys | {"rank_bytes", "checkpoint"} <= summary.keys()
    assert summary["loss_last"] < summary["loss_first"]
    assert summary["world_size"] == 2
    assert summary["comm"] == "shared_memory"
    assert Path(summary["checkpoint"]).is_dir()
    assert (tmp_path / "at_once/loss.png").read_bytes().startswith(b"\x89PNG")
    sizes = summary["rank_bytes"]
    assert sizes["master"] == sizes["grads"] == 2 * sizes["params"]
    assert sizes["moments"] == 4 * sizes["params"]
    assert sizes["full_params"] == 0  # every rank's part of them is its `params`
    assert sizes == summary["rank_bytes_planned"]


def test_sharded_ddp_and_one_process_agree(text: Path, tmp_path: Path) -> None:
    """The same seed gives the same losses, and recomputing activations changes nothing."""
    arguments = ["--data", text, "--dtype", "fp32"]
    _, alone = train(tmp_path, *arguments, "--baseline", "none", world=1)
    ddp, replicated = train(tmp_path, *arguments, "--baseline", "ddp")
    sharded, losses = train(
        tmp_path, *arguments, "--checkpoint-activations", "--comm", "process_group"
    )
    shared, same = train(tmp_path, *arguments)
    assert (sharded["comm"], shared["comm"]) == ("process_group", "shared_memory")
    assert same == losses  # two numbers have one sum
    assert shared["rank_bytes"]["params"] == sharded["rank_bytes"]["params"]
    assert sharded["rank_bytes"]["full_params"] > shared["rank_bytes"]["full_params"] == 0
    for one in (sharded, shared):
        assert one["rank_bytes"] == one["rank_bytes_planned"]
    expected = torch.tensor(alone)
    torch.testing.assert_close(torch.tensor(replicated), expected, rtol=2e-6, atol=0)
    torch.testing.assert_close(torch.tensor(losses), expected, rtol=2e-6, atol=0)
    kept, losses = train(tmp_path, *arguments, "--strategy", "zero1", "--comm", "process_group")
    torch.testing.assert_close(torch.tensor(losses), expected, rtol=2e-6, atol=0)
    assert kept["rank_bytes"] == kept["rank_bytes_planned"]
    arguments += ["--accumulate", "1", "--max-grad-norm", "none"]
    _, at_end = train(tmp_path, *arguments)
    overlapped, in_backward = train(tmp_path, *arguments, "--overlap-backward")
    assert in_backward == at_end
    assert overlapped["rank_bytes"] == overlapped["rank_bytes_planned"]
    assert overlapped["rank_bytes"]["grads"] == 0
    # Half of each, and padding: every bucket's shards are multiples of 128 bytes.
    for kind in ("params", "moments", "grads"):
        assert ddp["rank_bytes"][kind] / 2 <= sharded["rank_bytes"][kind]
        assert sharded["rank_bytes"][kind] < 0.52 * ddp["rank_bytes"][kind]
    for one in (sharded, shared, ddp):
        assert one["rank_bytes"]["master"] == 0


def test_mistakes_are_answered_with_sentences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = launch("--data", tmp_path / "nowhere", *TINY, world=1)
    assert done.returncode == 1
    assert "nowhere', which does not exist. Check the spelling" in done.stderr
    assert "Traceback" not in done.stderr
    with pytest.raises(SystemExit):
        parse(["--dtype", "fp8"])
    assert "argument --dtype: invalid choice: 'fp8' (choose from" in capsys.readouterr().err
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="--baseline none: expected one process, got 2"):
        check(parse(["--baseline", "none"]))
    with pytest.raises(ValueError, match="--overlap-backward: expected a sharded model and one"):
        check(parse(["--overlap-backward", "--accumulate", "2"]))
    with pytest.raises(ValueError, match="--trace: expected a sharded model, got --baseline"):
        check(parse(["--baseline", "ddp", "--trace", "x"]))
    with pytest.raises(ValueError, match="expected a multiple of 2 processes x 3 micro-batches"):
        check(parse(["--batch", "8", "--accumulate", "3"]))
    with pytest.raises(ValueError, match="expected at least 16 bytes of text, got 0 bytes"):
        read_corpus([tmp_path])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_see_disjoint_parts_of_each_epoch(world: int) -> None:
    windows = Windows(torch.arange(101, dtype=torch.uint8), 4)
    assert len(windows) == 25
    epochs = []
    for epoch in (0, 1):
        parts = []
        for rank in range(world):
            sampler = ResumableSampler(windows, num_replicas=world, rank=rank, seed=3)
            sampler.set_epoch(epoch)
            parts.append(list(sampler))
        seen = [index for part in parts for index in part]
        assert len(set(seen)) == len(seen) == 25 // world * world
        epochs.append(parts)
    assert epochs[0] != epochs[1]


def test_batches_go_on_from_any_position() -> None:
    windows = Windows(torch.arange(101, dtype=torch.uint8), 4)

    def take(done: int, count: int) -> list[list[list[int]]]:
        sampler = ResumableSampler(windows, num_replicas=2, rank=1, seed=3)
        batches = endless(windows, sampler, 5, done)
        return [next(batches).tolist() for _ in range(count)]

    eleven = take(0, 11)  # two batches an epoch
    for done in range(11):
        assert take(done, 11 - done) == eleven[done:]


def test_held_out_files_are_not_trained_on(tmp_path: Path) -> None:
    for i in range(200):
        (tmp_path / f"{i:03}").write_bytes(bytes([i]) * 8)
    corpus = read_corpus([tmp_path])
    train, held_out = set(corpus.train.tolist()), set(corpus.held_out.tolist())
    assert train | held_out == set(range(200))
    assert not train & held_out
    assert 200 / HELD_OUT / 2 < len(held_out) < 200 / HELD_OUT * 2
    one = read_corpus([tmp_path / "000"] * 4)  # too few files: the end of the text is held out
    assert len(one.train) == 30
    assert len(one.held_out) == 2


def test_the_default_text_is_the_standard_library() -> None:
    corpus = read_corpus([])
    assert len(corpus.train) > 5_000_000
    assert len(corpus.held_out) > 200_000
    assert bytes(corpus.train.tolist()).count(b"def ") > 10_000

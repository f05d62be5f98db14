# SPDX-License-Identifier: Apache-2.0
"""The command line of the language-model example."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Options:
    """What the user asked for; the names are those of the command line."""

    data: list[Path]
    out: Path
    resume: bool
    baseline: str | None
    comm: str | None
    strategy: str
    dtype: str
    seed: int
    layers: int
    heads: int
    width: int
    context: int
    dropout: float
    checkpoint_activations: bool
    batch: int
    accumulate: int
    steps: int
    stop_after: int | None
    lr: float
    warmup: int
    weight_decay: float
    max_grad_norm: float | None
    overlap_backward: bool
    eval_every: int
    eval_bytes: int
    checkpoint_every: int
    sample_bytes: int
    trace: Path | None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of computation."""
        return DTYPES[self.dtype]

    def fixed(self) -> dict[str, Any]:
        """Return what must not change when training is resumed: it decides batches or numbers."""
        names = "seed dtype layers heads width context dropout batch accumulate steps lr warmup"
        names += " weight_decay max_grad_norm"
        return {name: getattr(self, name) for name in names.split()}


def parse(arguments: list[str] | None = None) -> Options:
    """Read the command line; a mistake ends the program with a sentence."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add(
        "--data",
        nargs="+",
        type=Path,
        default=[],
        metavar="PATH",
        help="files or directories to learn from; none: Python's standard library",
    )
    add("--out", type=Path, default=Path("runs/train"), help="directory for what is written")
    add("--resume", action="store_true", help="go on from the checkpoint in --out")
    add("--baseline", choices=("none", "ddp"), help="train without sharding, to compare")
    strategies = ("zero3", "zero2", "zero1", "replicate")
    add("--strategy", choices=strategies, default="zero3", help="what fully_shard shards")
    add("--comm", help="communication backend of fully_shard; none: it picks one")
    add("--dtype", choices=sorted(DTYPES), default=fast_dtype(), help="dtype of computation")
    add("--seed", type=int, default=0, help="of weights, order of data, dropout and sampling")
    model = parser.add_argument_group("model")
    add = model.add_argument
    add("--layers", type=positive, default=6, help="blocks; each is a unit of sharding")
    add("--heads", type=positive, default=6, help="attention heads of a block")
    add("--width", type=positive, default=384, help="channels")
    add("--context", type=positive, default=128, help="bytes that the model sees at once")
    add("--dropout", type=float, default=0.0, help="share of activations dropped in training")
    add("--checkpoint-activations", action="store_true", help="compute blocks twice, save memory")
    training = parser.add_argument_group("training")
    add = training.add_argument
    add("--batch", type=positive, default=8, help="windows of a step, over all ranks")
    add("--accumulate", type=positive, default=1, help="micro-batches that a step is split into")
    add("--steps", type=positive, default=1000, help="length of the whole training")
    add("--stop-after", type=positive, help="stop after that many steps; --resume goes on")
    add("--lr", type=float, default=1e-3, help="highest learning rate")
    add("--warmup", type=int, default=50, help="steps until the highest learning rate")
    add("--weight-decay", type=float, default=0.1, help="of matrices; vectors have none")
    add(
        "--max-grad-norm",
        type=norm,
        default=1.0,
        metavar="NORM",
        help="clip the global gradient norm to it; 'none': no clipping",
    )
    add(
        "--overlap-backward",
        action="store_true",
        help="step each block in backward, which leaves no gradients; needs --max-grad-norm none",
    )
    add("--eval-every", type=positive, default=200, help="steps between tests on held-out files")
    add("--eval-bytes", type=positive, default=65536, help="held-out bytes of a test")
    add("--checkpoint-every", type=positive, default=500, help="steps between checkpoints")
    add("--sample-bytes", type=int, default=240, help="text to generate at the end")
    add("--trace", type=Path, help="write what rank 0 does in the fourth step, for Perfetto")
    return Options(**vars(parser.parse_args(arguments)))


def positive(text: str) -> int:
    """Read a whole number from 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text}")
    return number


def norm(text: str) -> float | None:
    """Read a number, or 'none'."""
    return None if text == "none" else float(text)


def fast_dtype() -> str:
    """Name the dtype in which this machine multiplies matrices fastest."""
    native = torch.cuda.is_available() or any(
        torch.cpu.get_capabilities().get(name) for name in ("avx512_bf16", "amx_bf16")
    )
    return "bf16" if native else "fp32"

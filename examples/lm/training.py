# SPDX-License-Identifier: Apache-2.0
"""One training: steps, tests on held-out text, checkpoints."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from lm.data import ResumableSampler, Windows, endless, read_corpus
from lm.options import Options


def warmup_cosine(options: Options, step: int) -> float:
    """Return the factor of the learning rate: up in a line, then down to a tenth as a cosine."""
    if step < options.warmup:
        return (step + 1) / options.warmup
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


@dataclass
class History:
    """What has been trained so far; a checkpoint keeps it."""

    losses: list[float] = field(default_factory=list)  # nats per byte, mean over ranks, each step
    held_out: list[tuple[int, float]] = field(default_factory=list)  # step, bits per byte


class Training:
    """One training: its model, data, schedule and history; the same sharded or not.

    Attributes:
        checkpoints: What saves and loads: `fsdp_kernels.checkpoint`, or `baselines`.
        history: Losses and held-out results since the first step, from before a resume too.
        recent: Losses of this rank since the last look at them; they stay on the device, so that
            the host does not wait for it at every step.
    """

    def __init__(
        self,
        options: Options,
        device: torch.device,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        checkpoints: ModuleType,
    ) -> None:
        self.options, self.device = options, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model, self.optimizer = model, optimizer
        self.checkpoints = checkpoints
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: warmup_cosine(options, step)
        )
        kind = f"-{options.baseline}" if options.baseline else ""
        self.checkpoint_path = options.out / f"checkpoint{kind}"
        self.history = History()
        self.recent: list[Tensor] = []
        corpus = read_corpus(options.data)
        self.origin = corpus.origin
        self.micro_batch = options.batch // (self.world * options.accumulate)
        self.train_set = Windows(corpus.train, options.context)
        self.held_out = self.choose_held_out(Windows(corpus.held_out, options.context))

    def choose_held_out(self, windows: Windows) -> DataLoader[Tensor]:
        """Spread a fixed number of windows over the held-out text, and take this rank's part."""
        shared = self.micro_batch * self.world  # every rank must call the model equally often
        count = min(len(windows), self.options.eval_bytes // self.options.context)
        count = max(1, count // shared) * shared
        if len(windows) < shared or len(self.train_set) < shared:
            raise ValueError(
                f"--data: expected text for {shared} windows of {self.options.context} bytes to "
                f"train on, and as much held out, got {len(self.train_set)} and {len(windows)}. "
                "Name more files, or lower --batch or --context."
            )
        chosen = [i * len(windows) // count for i in range(self.rank, count, self.world)]
        return DataLoader(Subset(windows, chosen), self.micro_batch, generator=torch.Generator())

    @property
    def done(self) -> int:
        """How many steps have been taken since the first."""
        return len(self.history.losses) + len(self.recent)

    def batches(self) -> Iterator[Tensor]:
        """Yield this rank's micro-batches from where training stands."""
        options = self.options
        sampler = ResumableSampler(
            self.train_set, num_replicas=self.world, rank=self.rank, seed=options.seed
        )
        done = self.done * options.accumulate
        return endless(self.train_set, sampler, self.micro_batch, done)

    def step(self, batches: Iterator[Tensor]) -> None:
        """Take one optimizer step; the gradients are left for `rank_bytes` to look at."""
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for i in range(self.options.accumulate):
            window = next(batches).to(self.device, non_blocking=True)
            with self.no_sync(unless=i == self.options.accumulate - 1):
                loss = self.model(window[:, :-1], window[:, 1:]) / self.options.accumulate
                loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.scheduler.step()
        self.recent.append(total)

    def no_sync(self, unless: bool) -> AbstractContextManager[None]:
        """Keep gradients on this rank, but for the last micro-batch of a step."""
        if unless or self.options.baseline == "none":
            return nullcontext()
        return self.model.no_sync()  # type: ignore[operator, no-any-return]

    def collect(self) -> None:
        """Move recent losses into the history, as their means over the ranks."""
        if self.recent:
            losses = self.mean(torch.stack(self.recent))
            self.history.losses += losses.tolist()
            self.recent.clear()

    def mean(self, values: Tensor) -> Tensor:
        """Take the mean over the ranks."""
        dist.all_reduce(values)
        return values / self.world

    @torch.no_grad()
    def test(self) -> str:
        """Measure the bits per byte of the held-out text; returns a sentence about it."""
        self.model.eval()
        losses = []
        for window in self.held_out:
            window = window.to(self.device)
            losses.append(self.model(window[:, :-1], window[:, 1:]))
        self.model.train()
        bits = self.mean(torch.stack(losses).mean()).item() / math.log(2)
        self.history.held_out.append((self.done, bits))
        last = self.history.losses[-self.options.eval_every :]
        trained = sum(last) / len(last) / math.log(2)
        return f"{bits:.3f} bits per byte on held-out text, {trained:.3f} lately in training"

    def save(self) -> None:
        """Write a checkpoint: model, optimizer, and what this rank needs besides."""
        cuda = self.device.type == "cuda"
        extra = {
            "rank": self.rank,
            "options": self.fixed(),
            "losses": self.history.losses,
            "held_out": self.history.held_out,
            "scheduler": self.scheduler.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(self.device) if cuda else None,
        }
        self.checkpoints.save(self.checkpoint_path, self.model, self.optimizer, extra=extra)

    def resume(self) -> None:
        """Go on where the checkpoint was written, bit for bit."""
        if not self.checkpoint_path.is_dir():
            raise ValueError(
                f"--resume: expected a checkpoint, got nothing at {self.checkpoint_path}. "
                "Check --out, or leave --resume out to start anew."
            )
        extra = self.checkpoints.load(self.checkpoint_path, self.model, self.optimizer)
        now = self.fixed()
        changed = [f"{k}={now[k]}, not {v}" for k, v in extra["options"].items() if now[k] != v]
        if changed:
            raise ValueError(
                f"--resume: expected the options of the checkpoint, got {'; '.join(changed)}. "
                "Give the same ones, or leave --resume out."
            )
        self.history = History(extra["losses"], extra["held_out"])
        self.scheduler.load_state_dict(extra["scheduler"])
        if extra["rank"] != self.rank:
            return  # more ranks than before: a new one keeps its own random numbers
        torch.set_rng_state(extra["random"])
        if extra["random_cuda"] is not None:
            torch.cuda.set_rng_state(extra["random_cuda"], self.device)

    def fixed(self) -> dict[str, Any]:
        """Return what must not change when training is resumed: options, and the text."""
        text = zlib.crc32(self.train_set.text.numpy().tobytes())
        return self.options.fixed() | {"checksum of the text": text}

# SPDX-License-Identifier: Apache-2.0
"""Turn files into batches of bytes: the same for the same seed, different on each rank."""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

HELD_OUT = 16  # one file in so many is never trained on
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes of other files to test on, each 1-D uint8, and their origin."""

    train: Tensor
    held_out: Tensor
    origin: str


def read_corpus(paths: Sequence[Path]) -> Corpus:
    """Read files (all files below a directory) and hold some of them out.

    Args:
        paths: Files and directories; none means the Python standard library's own source.

    Raises:
        ValueError: If a path does not exist or there is too little text.
    """
    if paths:
        files = [(path, file) for path in paths for file in files_below(path, "*")]
        origin = ", ".join(str(path) for path in paths)
    else:
        library = Path(sysconfig.get_path("stdlib"))
        files = [(library, file) for file in files_below(library, "*.py")]
        origin = "the Python standard library"
    train, held_out = bytearray(), bytearray()
    for top, file in files:
        # A checksum of the name decides, so that a new file moves no other one across.
        name = file.relative_to(top).as_posix() if file != top else file.name
        chosen = held_out if zlib.crc32(name.encode()) % HELD_OUT == 0 else train
        chosen += file.read_bytes()
    if not train or not held_out:  # a file or two: hold out the end of the text instead
        text = train + held_out
        cut = len(text) - len(text) // HELD_OUT
        train, held_out = text[:cut], text[cut:]
    if not held_out:
        raise ValueError(
            f"--data: expected at least {HELD_OUT} bytes of text, got {len(train)} bytes in "
            f"{len(files)} files of {origin}. Name files or directories that hold text."
        )
    return Corpus(as_tensor(train), as_tensor(held_out), f"{len(files)} files of {origin}")


def files_below(path: Path, pattern: str) -> list[Path]:
    """List a directory's files in a fixed order, or the file itself."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(
            f"--data: expected files or directories, got {str(path)!r}, which does not exist. "
            "Check the spelling, or leave --data out to train on Python's standard library."
        )
    found = (file for file in path.rglob(pattern) if file.is_file())
    return sorted(file for file in found if not SKIPPED & set(file.relative_to(path).parts))


def as_tensor(text: bytearray) -> Tensor:
    """View bytes as a uint8 tensor without a copy."""
    return torch.frombuffer(text, dtype=torch.uint8)


class Windows(Dataset[Tensor]):
    """Cut text into windows of `context` + 1 bytes: inputs, and the same shifted by one."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return max(0, (len(self.text) - 1) // self.context)

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return self.text[start : start + self.context + 1].long()


class ResumableSampler(DistributedSampler[Tensor]):
    """Give this rank its part of a shuffled epoch, from any position on."""

    def __init__(self, dataset: Dataset[Tensor], **options: Any) -> None:
        super().__init__(dataset, drop_last=True, **options)
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        return iter(list(super().__iter__())[self.position :])

    def __len__(self) -> int:
        return self.num_samples - self.position


def endless(
    dataset: Dataset[Tensor], sampler: ResumableSampler, batch: int, done: int
) -> Iterator[Tensor]:
    """Yield batches [batch, context + 1] for ever, as if `done` of them had been taken before.

    Each epoch is shuffled anew, from the sampler's seed and the epoch's number alone: the position
    is a function of `done`, and nothing else has to be saved.
    """
    per_epoch = sampler.num_samples // batch
    # A generator of its own, because a loader draws from torch's at every epoch.
    own = torch.Generator()
    loader = DataLoader(dataset, batch, sampler=sampler, drop_last=True, generator=own)
    epoch, taken = divmod(done, per_epoch)
    while True:
        sampler.set_epoch(epoch)
        sampler.position = taken * batch
        yield from loader
        epoch, taken = epoch + 1, 0

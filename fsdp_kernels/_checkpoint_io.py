# SPDX-License-Identifier: Apache-2.0
"""How ranks agree about a checkpoint, and how its directory appears and is replaced.

A checkpoint is written into a sibling of its path, `.<name>.saving-<token>`, and renamed when every
rank has finished. Where one is there already, it is first renamed to `.<name>.previous-<token>`:

===============================  ============================  =========================
a crash ...                      leaves at the path            and a load takes
===============================  ============================  =========================
before the first rename          the previous checkpoint       the path
between the two renames          nothing                       the newest complete sibling
after the second rename          the new checkpoint            the path
===============================  ============================  =========================

DCP writes its `.metadata` last, after every rank's files: a directory is complete when it has one.
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_kernels.comm.base import Comm

METADATA = ".metadata"


@dataclass(frozen=True)
class Peers:
    """The ranks of one model, for small agreements; every method is a blocking collective.

    Attributes:
        comm: The ranks.
        device: Where their collectives work.
    """

    comm: Comm
    device: torch.device

    @property
    def rank(self) -> int:
        """This rank within the group."""
        return self.comm.rank

    def check(self, message: str | None, error: type[Exception] = ValueError) -> None:
        """Raise the lowest rank's message on every rank, or nothing if no rank has one."""
        world = self.comm.world
        first = self._tensor([world if message is None else self.rank])
        self.comm.all_reduce(first, "min", label="fk.checkpoint.check").wait()
        source = int(first.item())
        if source < world:
            text = self.send((message or "").encode(), src=source).decode()
            raise error(text if source == self.rank else f"{text} (from rank {source})")

    def send(self, data: bytes, src: int = 0) -> bytes:
        """Return the bytes that rank `src` passed, on every rank."""
        length = self._tensor([len(data)])
        self.comm.broadcast(length, src=src, label="fk.checkpoint.send").wait()
        payload = torch.zeros(int(length.item()), dtype=torch.uint8, device=self.device)
        if self.rank == src and data:
            payload.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.comm.broadcast(payload, src=src, label="fk.checkpoint.send").wait()
        return payload.cpu().numpy().tobytes()

    def who(self, flag: bool) -> list[int]:
        """Return the ranks that passed True."""
        flags = torch.zeros(self.comm.world, dtype=torch.int64, device=self.device)
        flags[self.rank] = flag
        self.comm.all_reduce(flags, label="fk.checkpoint.who").wait()
        return [rank for rank, value in enumerate(flags.tolist()) if value]

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite a plain tensor by rank 0's."""
        copy = tensor.detach().contiguous()
        self.comm.broadcast(copy, label="fk.checkpoint.broadcast").wait()
        if copy.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(copy)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def stage(path: Path, peers: Peers) -> Path:
    """Make the directory that a checkpoint is written into, and agree on it.

    Raises:
        ValueError: On every rank, if something that is no checkpoint is at the path.
        RuntimeError: On every rank, if the directory cannot be made or not all ranks see it.
    """
    wrong, failed = None, None
    target = sibling(path, "saving", secrets.token_hex(4))
    if peers.rank == 0:
        wrong = _why_not_replace(path)
        if wrong is None:
            try:
                target.mkdir(parents=True)
            except OSError as error:
                failed = f"checkpoint.save: expected to make {target}, got {error}."
    peers.check(wrong)
    peers.check(failed, RuntimeError)
    target = Path(peers.send(os.fsencode(target)).decode(errors="surrogateescape"))
    seen = target.is_dir()
    peers.check(
        None
        if seen
        else f"checkpoint.save: expected a directory that every rank sees, got none at {target}. "
        "Save to a file system that all hosts share.",
        RuntimeError,
    )
    return target


def publish(staged: Path, path: Path) -> None:
    """Put a complete staged checkpoint at its path (rank 0 only); the previous one goes last."""
    _sync(staged)
    aside = sibling(path, "previous", staged.name.rsplit("-", 1)[1])
    replaces = path.exists()
    if replaces:
        os.rename(path, aside)
    try:
        os.rename(staged, path)
    except OSError:
        if replaces:
            os.rename(aside, path)
        raise
    _sync(path.parent)
    for leftover in (*_siblings(path, "previous"), *_siblings(path, "saving")):
        shutil.rmtree(leftover, ignore_errors=True)


def discard(staged: Path) -> None:
    """Remove a checkpoint that was not finished (rank 0 only)."""
    shutil.rmtree(staged, ignore_errors=True)


def resolve(path: Path, peers: Peers) -> Path:
    """Return the directory to load from, the same on every rank.

    Raises:
        ValueError: On every rank, if there is no complete checkpoint.
    """
    found: Path | None = None
    wrong = None
    if peers.rank == 0:
        found = _complete(path)
        if found is None:
            wrong = (
                f"checkpoint.load: expected a checkpoint at {path}, got "
                f"{'an incomplete one' if path.exists() else 'nothing there'}. "
                "Pass the path that checkpoint.save was given."
            )
        elif found != path:
            warnings.warn(
                f"checkpoint.load: a save was interrupted while it replaced {path}; loading "
                f"{found}, which is complete. The next save to the path tidies up.",
                stacklevel=4,
            )
    peers.check(wrong)
    return Path(peers.send(os.fsencode(found or path)).decode(errors="surrogateescape"))


def _complete(path: Path) -> Path | None:
    if path.exists():
        return path if (path / METADATA).is_file() else None
    candidates = [*_siblings(path, "previous"), *_siblings(path, "saving")]
    complete = [c for c in candidates if (c / METADATA).is_file()]
    return max(complete, key=lambda c: (c / METADATA).stat().st_mtime_ns, default=None)


def _why_not_replace(path: Path) -> str | None:
    if not path.exists() or (path / METADATA).is_file():
        return None
    if path.is_dir() and not any(path.iterdir()):
        return None
    what = "a directory with other files" if path.is_dir() else "a file"
    return (
        f"checkpoint.save: expected a new path or an earlier checkpoint, got {what} at {path}. "
        "Choose another path: this one would be deleted."
    )


def sibling(path: Path, kind: str, token: str) -> Path:
    """Return the name beside the path for what is being saved or was there before."""
    return path.with_name(f".{path.name}.{kind}-{token}")


def _siblings(path: Path, kind: str) -> list[Path]:
    prefix = f".{path.name}.{kind}-"
    if not path.parent.is_dir():
        return []
    return [p for p in path.parent.iterdir() if p.name.startswith(prefix) and p.is_dir()]


def _sync(directory: Path) -> None:
    """Make renames within a directory durable, where the file system can."""
    with suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def pack(value: Any, what: str) -> bytes:
    """Serialise a value such that loading it runs no code of its own.

    Raises:
        ValueError: If it holds more than tensors, numbers, strings and containers of them.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        unpack(buffer.getvalue())
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"checkpoint.save: expected {what} to hold tensors, numbers, strings and lists, tuples "
            f"and dicts of them, got something else ({reason}). Convert it, as in "
            "`torch.from_numpy(array)` or `.tolist()`."
        ) from error
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """Load what `pack` wrote, to the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def write(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())

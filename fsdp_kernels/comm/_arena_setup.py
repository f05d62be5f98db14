# SPDX-License-Identifier: Apache-2.0
"""Whether the ranks of a process group can share memory, and how they meet before they do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

PLACE = "/dev/shm"
_DEFAULT_TIMEOUT_S = 600.0
_Shared = TypeVar("_Shared")


class ArenaUnavailable(RuntimeError):
    """The ranks cannot share memory. Every rank raises it, with the same reason."""


@dataclass(frozen=True)
class Identity:
    """What tells whether two ranks see the same memory and the same processes."""

    refusal: str = ""
    host: tuple[str, ...] = ()
    user: int = -1
    process: tuple[int, int] = (0, 0)


def identity(module: Any) -> Identity:
    """Describe this rank.

    Args:
        module: The compiled CPU module; None where it was not built.
    """
    if module is None:
        return Identity("the C++ kernels are not built")
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        place, processes = os.stat(PLACE), os.stat("/proc/self/ns/pid")
    except OSError as error:
        return Identity(f"Linux with /proc and {PLACE} is needed: {error}")
    # Containers on one machine may have memory and processes of their own.
    host = (boot, f"{PLACE} {place.st_dev}", f"processes {processes.st_ino}")
    return Identity("", host, os.geteuid(), module.this_process())


def why_apart(known: Sequence[Identity]) -> str:
    """Return why ranks cannot share memory, the same on every rank; "" if they can."""
    first = known[0]
    for rank, one in enumerate(known):
        if one.refusal:
            return f"{one.refusal} (rank {rank})"
        if one.host != first.host:
            return f"ranks 0 and {rank} are on different hosts, or in different containers"
        if one.user != first.user:
            return f"ranks 0 and {rank} belong to different users ({first.user}, {one.user})"
    return ""


class Meeting:
    """A process group, for what must be known before any memory is shared.

    Args:
        group: None is the default one.
        where: Begins the text of every error.

    Attributes:
        group: The group itself.
        rank: This rank in it.
        world: Number of its ranks.
        timeout_s: The time limit of its collectives on the CPU.
    """

    def __init__(self, group: dist.ProcessGroup | None, where: str = "Arena") -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                f"{where}: expected torch.distributed to be initialised, got no process group. Run "
                "under torchrun and call torch.distributed.init_process_group first."
            )
        self.rank: int = dist.get_rank(group)
        self.world: int = dist.get_world_size(group)
        if self.rank < 0:
            raise RuntimeError(
                f"{where}: expected this rank to be in the group, got a group without it. Only "
                "members may create it."
            )
        resolved = group if group is not None else dist.group.WORLD
        assert resolved is not None  # is_initialized said so
        self.timeout_s = _timeout_of(resolved)
        self.group = resolved
        self._where = where

    def share(self, value: _Shared) -> list[_Shared]:
        """Return every rank's value, in rank order (collective)."""
        values: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(values, value, group=self.group)
        except RuntimeError as error:
            raise RuntimeError(
                f"{self._where}: expected all {self.world} ranks to meet, got on rank {self.rank}: "
                f"{error}. Another rank died or fell out of step: read its error first."
            ) from error
        return values


def _timeout_of(group: Any) -> float:
    """Return the time limit of a group's collectives on the CPU, in seconds."""
    # NOTE: private, and not every backend has options.
    with suppress(RuntimeError, AttributeError):
        limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
        return limit.total_seconds()
    return _DEFAULT_TIMEOUT_S

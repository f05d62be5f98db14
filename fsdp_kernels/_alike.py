# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks call `fully_shard` alike: a difference would hang, or mix up numbers."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fsdp_kernels.comm._arena_setup import Meeting
from fsdp_kernels.comm._grid import Grid
from fsdp_kernels.comm.base import Comm
from fsdp_kernels.comm.pick import Choice
from fsdp_kernels.trace import label


def agree_on_backend(where: str, grid: Grid, asked: str | None, choice: Choice) -> Choice:
    """Return the backend that all ranks take (collective).

    Where they were left to pick and picked differently, which depends on what each host has, it is
    the process group.

    Args:
        where: Begins the error's text.
        grid: The ranks.
        asked: The backend's name, or None.
        choice: What this rank would take.

    Raises:
        ValueError: They were asked for different ones, or lay the ranks out differently; on every
            rank that this one shares a group of the mesh with.
    """
    if not (grid.row_group or grid.column_group or grid.is_everybody):
        return choice  # a part of the ranks, for whom there is no group yet
    group = grid.row_group or grid.column_group
    answers = Meeting(group, where).share((asked, grid.rows, choice.name))
    (first, rows, picked), *others = answers
    for rank, (name, layout, _) in enumerate(others, 1):
        if name != first:
            raise ValueError(
                f"{where}: expected the same comm on every rank, got {first!r} on rank 0 and "
                f"{name!r} on rank {rank} of the group. Pass one name, or None, on all of them."
            )
        if layout != rows:
            raise ValueError(
                f"{where}: expected the same mesh and strategy on every rank, got a grid of ranks "
                f"{rows} on rank 0 and {layout} on rank {rank} of the group. Pass the same ones."
            )
    for rank, (_, _, name) in enumerate(others, 1):
        if name != picked:
            reason = f"rank 0 would pick {picked}, and rank {rank} {name}"
            return Choice("process_group", reason, lacking=True)
    return choice


def check_alike(
    where: str, comm: Comm, arguments: Mapping[str, Any], parameters: Sequence[str]
) -> None:
    """Raise on every rank unless all pass the same (collective).

    Args:
        where: Begins the error's text.
        comm: All ranks.
        arguments: By name; compared by what they print as.
        parameters: A line for each parameter to be sharded, unit by unit.

    Raises:
        ValueError: Something differs; the message has the first such thing, as it is here.
    """
    said = {name: repr(value) for name, value in arguments.items()}
    said["number of parameters"] = str(len(parameters))
    differs = _differs(comm, list(said.values()))
    for (name, value), differ in zip(said.items(), differs, strict=True):
        if differ:
            raise ValueError(_refusal(where, comm, f"{name} {value}"))
    for line, differ in zip(parameters, _differs(comm, parameters), strict=True):
        if differ:
            raise ValueError(_refusal(where, comm, f"parameter {line}"))


def _differs(comm: Comm, texts: Sequence[str]) -> list[bool]:
    """Which texts are not the same on all ranks; as many on each."""
    hashes = torch.tensor([zlib.crc32(text.encode()) for text in texts], dtype=torch.float64)
    words = comm.agree(torch.cat([hashes, -hashes]), label=label("agree", "fully_shard"))
    largest, smallest = words[: len(texts)], -words[len(texts) :]
    return (largest != smallest).tolist()


def _refusal(where: str, comm: Comm, here: str) -> str:
    return (
        f"{where}: expected the same call on every rank, got another one on another rank; here, on "
        f"rank {comm.rank}: {here}. Build the same model and pass the same arguments on all ranks."
    )

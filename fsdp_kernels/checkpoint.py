# SPDX-License-Identifier: Apache-2.0
"""State dicts of sharded models: whole ones in memory, sharded ones on disk.

A checkpoint directory holds what `torch.distributed.checkpoint` wrote (every tensor of model and
optimizer, by global geometry, so that its own tools read it), `common.pt` (rank 0: step counts and
parameter groups) and `rank<r>.pt` (that rank's `extra`, and what differs from rank 0's buffers and
values, such as the running statistics of a batch norm).
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from fsdp_kernels import _checkpoint_io as disk
from fsdp_kernels._full_state import Members, full_state_dict, load_full_state_dict
from fsdp_kernels._optim_names import NamedState, restore, targets, unfit

__all__ = ["full_state_dict", "load", "load_full_state_dict", "save"]

FORMAT = 1


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
) -> None:
    """Write a sharded checkpoint (collective): each rank its own part, to a shared file system.

    It is written beside the path and renamed when every rank has finished. If the path has an
    earlier checkpoint, that one stays loadable until the new one has taken its place, whenever
    the job dies.

    Args:
        path: A directory, new or an earlier checkpoint. Missing parents are made.
        model: A sharded model.
        optimizer: A sharded optimizer, or any `torch.optim` one over the model's parameters.
        extra: What else this rank needs to resume: tensors, numbers, strings, containers of them.

    Raises:
        ValueError: On every rank, before anything is written, if an argument is of no use.
        RuntimeError: On every rank, if any could not write, if parameters are of two steps, or if
            `step()` has not come yet (see `overlap_backward`); what was at the path is untouched.
    """
    where = "checkpoint.save"
    members = Members.of(model, where)
    members.check_whole(where)
    peers = members.peers
    target = Path(os.path.realpath(path))
    wrong, blobs, state = None, {}, {}
    try:
        named = None
        if optimizer is not None:
            named = NamedState.of(optimizer, members.first_names, where)
        state = _tensors(members, named)
        common = {"format": FORMAT, "world": peers.comm.world, "other": members.other}
        common |= {"optimizer": None if named is None else _described(optimizer, named)}
        blobs = {"common.pt": disk.pack(common, "the optimizer's state")}
        blobs |= {"extra": disk.pack(extra, "extra")}
    except ValueError as error:
        wrong = str(error)
    peers.check(wrong)
    own = {"extra": blobs.pop("extra"), **_differing(members, named)}
    blobs[f"rank{peers.rank}.pt"] = disk.pack(own, "the model's buffers")
    if peers.rank != 0:
        del blobs["common.pt"]
    staged = disk.stage(target, peers)
    try:
        _write(staged, members, state, blobs)
        _publish(staged, target, members)
    except BaseException:
        if peers.rank == 0:
            disk.discard(staged)
        raise


def _write(
    staged: Path, members: Members, state: dict[str, Any], blobs: Mapping[str, bytes]
) -> None:
    """Write this rank's files; DCP's metadata, which makes the checkpoint complete, comes last."""
    failed = None
    try:
        for name, blob in blobs.items():
            disk.write(staged / name, blob)
    except OSError as error:
        failed = f"checkpoint.save: expected to write {staged}, got {error}."
    members.peers.check(failed, RuntimeError)
    try:
        dcp_save(
            state,
            storage_writer=FileSystemWriter(staged),
            # Buffers are the same on all ranks or rank 0's: _differing() holds the others.
            planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
            process_group=_group(members),
        )
    except CheckpointException as error:
        raise RuntimeError(
            f"checkpoint.save: expected every rank to write, got {_reasons(error)}. "
            "What was at the path before is untouched."
        ) from error


def _publish(staged: Path, target: Path, members: Members) -> None:
    failed = None
    if members.peers.rank == 0:
        try:
            disk.publish(staged, target)
        except OSError as error:
            failed = f"checkpoint.save: expected to rename {staged} to {target}, got {error}."
    members.peers.check(failed, RuntimeError)


@torch.no_grad()
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> Any:
    """Load a sharded checkpoint in place (collective).

    With the same number of ranks training goes on bit for bit. With another number, parameters and
    optimizer state are the same values; buffers that differed between ranks become rank 0's, and a
    rank that did not exist then gets rank 0's `extra`, with a warning.

    Args:
        path: What `save` was given.
        model: The same model, sharded.
        optimizer: With the same groups; its hyper-parameters become the saved ones.

    Returns:
        This rank's `extra`.

    Raises:
        ValueError: On every rank and before anything is changed, if it does not fit.
        RuntimeError: On every rank, if it cannot be read.
    """
    where = "checkpoint.load"
    members = Members.of(model, where)
    peers = members.peers
    source = disk.resolve(Path(os.path.realpath(path)), peers)
    common, own, metadata = _read(source, members)
    wrong = None
    try:
        wrong = _unfit(members, optimizer, common, metadata)
    except ValueError as error:
        wrong = str(error)
    peers.check(wrong)

    saved = metadata.state_dict_metadata
    state: dict[str, Any] = {"model": _model_tensors(members, saved)}
    names = members.first_names
    if optimizer is not None:
        sharded = targets(optimizer, names, common["optimizer"]["sharded"])
        state["optimizer"] = _without_empty(sharded)
    try:
        dcp_load(state, storage_reader=FileSystemReader(source), process_group=_group(members))
    except CheckpointException as error:
        raise RuntimeError(
            f"checkpoint.load: expected to read {source}, got {_reasons(error)}. "
            "Model and optimizer may be loaded in part: do not train on."
        ) from error
    for name, value in own["buffers"].items():
        members.buffers[name].copy_(value)
    if optimizer is not None:
        values = common["optimizer"]["values"]
        for name, keys in own["values"].items():
            values.setdefault(name, {}).update(keys)
        groups = common["optimizer"]["groups"]
        restore(optimizer, names, NamedState(sharded, values, groups))
    if common["other"]:
        model.load_state_dict(common["other"], strict=False)
    return disk.unpack(own["extra"])


def _read(source: Path, members: Members) -> tuple[dict[str, Any], dict[str, Any], Metadata]:
    """Read everything but the tensors."""
    rank, world = members.peers.rank, members.peers.comm.world
    failed = None
    common: dict[str, Any] = {}
    own: dict[str, Any] = {}
    metadata: Metadata | None = None
    try:
        common = disk.unpack((source / "common.pt").read_bytes())
        mine = rank if rank < common["world"] else 0
        own = disk.unpack((source / f"rank{mine}.pt").read_bytes())
        metadata = FileSystemReader(source).read_metadata()
        if world != common["world"]:
            own = {"extra": own["extra"], "buffers": {}, "values": {}}
            if mine != rank:
                warnings.warn(
                    f"checkpoint.load: saved by {common['world']} ranks, loaded by {world}: rank "
                    f"{rank} gets rank 0's extra. Derive what must differ from the rank.",
                    stacklevel=4,
                )
    except (OSError, EOFError, KeyError, RuntimeError, pickle.UnpicklingError) as error:
        failed = f"checkpoint.load: expected to read {source}, got {type(error).__name__}: {error}."
    members.peers.check(failed, RuntimeError)
    assert metadata is not None
    return common, own, metadata


def _unfit(
    members: Members,
    optimizer: torch.optim.Optimizer | None,
    common: Mapping[str, Any],
    metadata: Metadata,
) -> str | None:
    """Say why a checkpoint does not fit model and optimizer, or None."""
    where = "checkpoint.load"
    if common["format"] != FORMAT:
        return (
            f"{where}: expected format {FORMAT}, got {common['format']}. "
            "Load it with the version of fsdp_kernels that wrote it."
        )
    saved = {
        key.removeprefix("model."): value
        for key, value in metadata.state_dict_metadata.items()
        if key.startswith("model.")
    }
    shapes = members.shapes()
    loaded = {id(value) for value in _model_tensors(members, metadata.state_dict_metadata).values()}
    everything = members.params | members.buffers
    missing = [
        name for name, value in everything.items() if value.numel() and id(value) not in loaded
    ]
    unexpected = [name for name in saved if name not in shapes]
    wrong = [
        f"{name} is {tuple(value.size)}, not {tuple(shapes[name])}"
        for name, value in saved.items()
        if isinstance(value, TensorStorageMetadata)
        and name in shapes
        and tuple(value.size) != tuple(shapes[name])
    ]
    parts = {"missing": missing, "unexpected": unexpected, "wrong": wrong}
    if any(parts.values()):
        got = "; ".join(f"{k}: {', '.join(v[:8])}" for k, v in parts.items() if v)
        return f"{where}: expected a checkpoint of this model, got {got}. Nothing was changed."
    if optimizer is None:
        return None
    if common["optimizer"] is None:
        return (
            f"{where}: expected a checkpoint with an optimizer, got one without. "
            "Leave the optimizer out to load the model alone."
        )
    return unfit(optimizer, members.first_names, common["optimizer"]["groups"], where)


def _tensors(members: Members, named: NamedState | None) -> dict[str, Any]:
    """Return what DCP writes: no empty tensors, since it would not find them again."""
    first = {name: value for value, name in members.first_names.items()}
    state: dict[str, Any] = {"model": {k: v for k, v in first.items() if v.numel()}}
    if named is not None:
        state["optimizer"] = _without_empty(named.sharded)
    return state


def _without_empty(sharded: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    kept = {
        name: {key: value for key, value in keys.items() if value.numel()}
        for name, keys in sharded.items()
    }
    return {name: keys for name, keys in kept.items() if keys}


def _model_tensors(members: Members, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the model's tensors by the names that they were saved under."""
    everything = members.params | members.buffers
    return {name: value for name, value in everything.items() if f"model.{name}" in saved}


def _described(optimizer: torch.optim.Optimizer | None, named: NamedState) -> dict[str, Any]:
    return {
        "class": type(optimizer).__name__,
        "groups": named.groups,
        "values": named.values,
        "sharded": {
            name: {key: value.dtype for key, value in keys.items()}
            for name, keys in named.sharded.items()
        },
    }


def _differing(members: Members, named: NamedState | None) -> dict[str, Any]:
    """Return this rank's buffers and optimizer values that are not bit for bit rank 0's."""
    values = {} if named is None else named.values
    items: dict[str, Any] = {f"b {name}": value for name, value in members.buffers.items()}
    items |= {f"v {n} {k}": value for n, keys in values.items() for k, value in keys.items()}
    digests = {key: _digest(value) for key, value in items.items()}
    reference = json.loads(members.peers.send(json.dumps(digests).encode()))
    differ = {key for key, digest in digests.items() if reference.get(key) != digest}
    return {
        "buffers": {
            name: value.detach().cpu().clone()
            for name, value in members.buffers.items()
            if f"b {name}" in differ
        },
        "values": {
            n: {k: value for k, value in keys.items() if f"v {n} {k}" in differ}
            for n, keys in values.items()
        },
    }


def _digest(value: Any) -> str:
    hasher = hashlib.sha256()
    if isinstance(value, Tensor):
        hasher.update(f"{value.dtype} {tuple(value.shape)}".encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        hasher.update(flat.view(torch.uint8).numpy().tobytes())
    else:
        hasher.update(repr(value).encode())
    return hasher.hexdigest()


def _group(members: Members) -> Any:
    """Return the process group of the model's ranks."""
    return members.peers.comm.process_group


def _reasons(error: CheckpointException) -> str:
    """Say what went wrong on which ranks, in one line."""
    return "; ".join(
        f"{type(cause).__name__}: {cause} (rank {rank})"
        for rank, (cause, _) in error.failures.items()
    )

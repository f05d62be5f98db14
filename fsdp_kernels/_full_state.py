# SPDX-License-Identifier: Apache-2.0
"""Whole state dicts in memory, for sharded models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_kernels import _checkpoint_io as disk
from fsdp_kernels._checkpoint_io import Peers
from fsdp_kernels.bucket import Bucket
from fsdp_kernels.flat_shard import FlatShard


@dataclass(frozen=True)
class Members:
    """What a sharded model's state dict is made of, each under all of its names.

    Attributes:
        params: Sharded parameters; a tied one is there once for each name.
        buffers: Persistent buffers and parameters that are not sharded, the live tensors.
        other: What `get_extra_state` returned.
        peers: The ranks.
    """

    params: dict[str, FlatShard]
    buffers: dict[str, Tensor]
    other: dict[str, Any]
    peers: Peers

    @classmethod
    def of(cls, model: nn.Module, where: str) -> Members:
        """List them, after cleaning up what a failed step left (collective then).

        Raises:
            TypeError: If it is no module.
            ValueError: If nothing in the model is sharded.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"{where}: expected a model that fully_shard sharded, got {type(model).__name__}. "
                "Pass the model itself."
            )
        params: dict[str, FlatShard] = {}
        buffers: dict[str, Tensor] = {}
        other: dict[str, Any] = {}
        for name, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, FlatShard):
                params[name] = value
            elif isinstance(value, Tensor):
                buffers[name] = value
            else:
                other[name] = value
        if not params:
            raise ValueError(
                f"{where}: expected a model that fully_shard sharded, got a "
                f"{type(model).__name__} without sharded parameters. Call fully_shard(model) first."
            )
        buckets = {id(p.bucket): p.bucket for p in params.values()}
        for runtime in {id(b.runtime): b.runtime for b in buckets.values()}.values():
            runtime.finish_failed()  # no collective comes before: others may still be in it
        first = next(iter(buckets.values()))
        return cls(params, buffers, other, Peers(first.comm.everyone, first.device))

    def check_whole(self, where: str) -> None:
        """Raise RuntimeError, on every rank, before a step is whole (collective)."""
        torn = None
        try:
            for runtime in {id(b.runtime): b.runtime for b in self.buckets}.values():
                runtime.stepping.check_saved(where)
        except RuntimeError as error:
            torn = str(error)
        self.peers.check(torn, RuntimeError)

    @property
    def buckets(self) -> list[Bucket]:
        """The distinct buckets, in the order of the names."""
        return list({id(p.bucket): p.bucket for p in self.params.values()}.values())

    @property
    def first_names(self) -> dict[Tensor, str]:
        """The first name of each tensor."""
        names: dict[Tensor, str] = {}
        for name, value in (self.params | self.buffers).items():
            names.setdefault(value, name)
        return names

    def shapes(self) -> dict[str, torch.Size]:
        """Global shape by name, of all tensors."""
        return {name: value.shape for name, value in (self.params | self.buffers).items()}


def full_state_dict(model: nn.Module, *, rank0_only: bool = True) -> dict[str, Any]:
    """Gather the whole model to the CPU (collective).

    Args:
        model: A sharded model, or a module that holds some.
        rank0_only: Whether ranks other than 0 get `{}`.

    Returns:
        What the unsharded model's `state_dict()` would be, in new CPU tensors: every name of a tied
        parameter is there, with one tensor. One bucket is whole on the device at a time.

    Raises:
        RuntimeError: On every rank, if parameters are of two steps, or `step()` has not come yet
            (see `overlap_backward`).
    """
    members = Members.of(model, "full_state_dict")
    members.check_whole("full_state_dict")
    wanted = members.peers.rank == 0 or not rank0_only
    whole: dict[FlatShard, Tensor] = {}
    for bucket in members.buckets:
        full = bucket.shard_master.new_empty(bucket.layout.full_numel)
        ticket = bucket.comm.all_gather(
            full, bucket.shard_master, label=f"fk.full_state_dict[{bucket.label}]"
        )
        ticket.wait()
        if wanted:
            for p, view in zip(bucket.params, bucket.split(full), strict=True):
                whole[p] = view.detach().to("cpu", copy=True)
    if not wanted:
        return {}
    result: dict[str, Any] = {}
    for name in model.state_dict():  # in the module's own order
        if name in members.params:
            result[name] = whole[members.params[name]]
        elif name in members.buffers:
            result[name] = members.buffers[name].detach().to("cpu", copy=True)
        else:
            result[name] = members.other[name]
    return result


@torch.no_grad()
def load_full_state_dict(model: nn.Module, sd: Mapping[str, Any]) -> None:
    """Load an unsharded model's state dict into a sharded model (collective).

    Args:
        model: A sharded model.
        sd: On every rank, or on rank 0 with `{}` on the others. Tensors of the global shapes, any
            device and dtype. Of a tied parameter's names one is enough.

    Raises:
        ValueError: On every rank and before anything is changed, if names or shapes do not fit.
    """
    where = "load_full_state_dict"
    members = Members.of(model, where)
    peers = members.peers
    have = peers.who(bool(sd))
    if have not in ([0], list(range(peers.comm.world))):
        raise ValueError(
            f"{where}: expected the state dict on every rank, or on rank 0 and {{}} on the others, "
            f"got it on ranks {have}. Load the file on rank 0 only."
        )
    peers.check(_unfit(members, sd, where) if sd else None)
    if len(have) == peers.comm.world:
        for name, p in members.params.items():
            if name in sd:
                p.copy_(sd[name])
        for name, buffer in members.buffers.items():
            buffer.copy_(sd[name])
        extra = {name: sd[name] for name in members.other}
    else:
        _scatter(members, sd)
        mine = {name: sd[name] for name in members.other} if sd else {}
        extra = disk.unpack(peers.send(disk.pack(mine, "extra state"))) if members.other else {}
    if extra:
        model.load_state_dict(extra, strict=False)


def _scatter(members: Members, sd: Mapping[str, Any]) -> None:
    """Send rank 0's tensors, a bucket at a time; every rank keeps its own part."""
    names: dict[FlatShard, str] = {}
    for name, p in members.params.items():
        if name in sd:
            names.setdefault(p, name)
    for bucket in members.buckets:
        full = bucket.shard_master.new_zeros(bucket.layout.full_numel)
        views = bucket.split(full)
        if sd:
            for p, view in zip(bucket.params, views, strict=True):
                if p in names:
                    view.copy_(sd[names[p]])
        bucket.comm.broadcast(full, label=f"fk.load_full_state_dict[{bucket.label}]").wait()
        ours = set(members.params.values())
        for p, view in zip(bucket.params, views, strict=True):
            if p in ours:
                p.copy_(view)
    for name, buffer in members.buffers.items():
        if sd:
            buffer.copy_(sd[name])
        members.peers.broadcast(buffer)


def _unfit(members: Members, sd: Mapping[str, Any], where: str) -> str | None:
    """Say what is wrong with a full state dict, or None."""
    shapes = members.shapes()
    named = {id(members.params[name]) for name in members.params if name in sd}
    missing = [
        name
        for name in (*shapes, *members.other)
        if name not in sd and id(members.params.get(name)) not in named
    ]
    unexpected = [name for name in sd if name not in shapes and name not in members.other]
    wrong = []
    for name, shape in shapes.items():
        value = sd.get(name)
        if name in sd and not isinstance(value, Tensor):
            wrong.append(f"{name} is a {type(value).__name__}")
        elif isinstance(value, FlatShard):
            wrong.append(f"{name} is sharded (use model.load_state_dict)")
        elif isinstance(value, Tensor) and value.shape != shape:
            wrong.append(f"{name} is {tuple(value.shape)}, not {tuple(shape)}")
    wrong += _torn_ties(members, sd) if not wrong else []
    if not (missing or unexpected or wrong):
        return None
    parts = {"missing": missing, "unexpected": unexpected, "wrong": wrong}
    got = "; ".join(f"{what}: {_listed(names)}" for what, names in parts.items() if names)
    return f"{where}: expected the state dict of this model, got {got}. Nothing was changed."


def _torn_ties(members: Members, sd: Mapping[str, Any]) -> list[str]:
    """Name tied parameters that come with two different values."""
    torn = []
    first: dict[FlatShard, str] = {}
    for name, p in members.params.items():
        if name in sd:
            other = first.setdefault(p, name)
            if sd[other] is not sd[name] and not torch.equal(sd[other], sd[name]):
                torn.append(f"{other} and {name} are one parameter but differ")
    return torn


def _listed(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more

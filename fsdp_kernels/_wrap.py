# SPDX-License-Identifier: Apache-2.0
"""Carrying out a plan: the communicator, the buckets, and the swap of parameters in place."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_kernels._alike import agree_on_backend, check_alike
from fsdp_kernels._unit_plan import Entry, Plan
from fsdp_kernels.bucket import Bucket
from fsdp_kernels.bucket_shards import Dtypes, Resources
from fsdp_kernels.comm import pick
from fsdp_kernels.comm._arena_setup import ArenaUnavailable, Meeting
from fsdp_kernels.comm._grid import Grid, connect
from fsdp_kernels.comm.base import Comm
from fsdp_kernels.comm.hybrid import HybridComm
from fsdp_kernels.comm.shared_memory import SharedMemoryComm
from fsdp_kernels.flat_shard import FlatShard
from fsdp_kernels.layout import BucketLayout, group_parameters
from fsdp_kernels.leaves import Site
from fsdp_kernels.strategy import ZERO3, Strategy
from fsdp_kernels.trace import label
from fsdp_kernels.unit import Unit


@dataclass(frozen=True)
class Options:
    """What all ranks must pass alike, beside mesh and comm."""

    policy: MixedPrecisionPolicy
    strategy: Strategy
    prefetch: int
    sync: bool

    def described(self, mesh: DeviceMesh | None) -> dict[str, Any]:
        """Return what each rank says of its arguments."""
        return {
            "strategy": self.strategy.name,
            "mp_policy": self.policy,
            "mesh": None if mesh is None else mesh.mesh.tolist(),
            "prefetch": self.prefetch,
            "sync_module_states": self.sync,
        }


logger = logging.getLogger("fsdp_kernels")
_told: set[str] = (
    set()
)  # reasons that have been given: units that are sharded one by one share them


# -- communication --------------------------------------------------------------------------------


def pick_comm(
    where: str,
    comm: str | Comm | None,
    mesh: DeviceMesh | None,
    plan: Plan,
    options: Options,
) -> Comm:
    """The backend that `comm` names, over the ranks of `mesh`; says on rank 0 which it is.

    One of ours over shared memory has all of it that the plan needs.

    Raises:
        ValueError: The ranks do not call alike, or an argument is wrong.
    """
    policy, strategy = options.policy, options.strategy

    def alike(made: Comm) -> None:
        check_alike(where, made.everyone, options.described(mesh), plan.described())

    if isinstance(comm, Comm):
        if strategy.replicates and comm.world > 1:
            raise ValueError(
                f"{where}: expected a backend's name with strategy 'replicate', got a "
                f"{type(comm).__name__} of {comm.world} ranks, which would shard. Name the "
                "backend, or pass a HybridComm whose shard group has one rank."
            )
        alike(comm)
        return comm
    if comm is not None and comm not in pick.NAMES:
        raise ValueError(
            f"{where}: expected comm to be None, {', '.join(map(repr, pick.NAMES))} or a Comm, got "
            f"{comm!r}. None picks the fastest that is there."
        )
    if not dist.is_initialized():
        raise RuntimeError(
            f"{where}: expected an initialised process group, got none. Call "
            "torch.distributed.init_process_group first, or start the program with torchrun."
        )
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{where}: expected mesh to be a DeviceMesh, got {type(mesh).__name__}. Make one with "
            "torch.distributed.device_mesh.init_device_mesh, or pass None for all ranks."
        )
    if mesh is not None and mesh.ndim > 2:
        raise ValueError(
            f"{where}: expected a 1-D mesh, or a 2-D one (replicate x shard), got {mesh.ndim}-D. "
            "Pass a slice of it, as in mesh['replicate', 'shard']."
        )
    grid = Grid.of(mesh, replicates=strategy.replicates)
    if comm is None:
        choice = pick.choose(plan.device.type, len(grid.rows[0]))
    else:
        choice = pick.Choice(comm, "as asked for")
    if plan.device.type == "cpu":
        choice = agree_on_backend(where, grid, comm, choice)
    refusal = ""
    try:
        made = connect(choice.name, grid, plan.device)
        inside = made.shard if isinstance(made, HybridComm) else made
        if isinstance(made, SharedMemoryComm):
            alike(made)  # first: what differs would seem to lack memory
        if isinstance(inside, SharedMemoryComm):
            inside.reserve(*_shared_bytes(plan, policy, inside.world))
    except ArenaUnavailable as error:  # the same on every rank that would share
        refusal = str(error)
        made = connect("process_group", grid, plan.device)
    if choice.name == "shared_memory" and made.everyone is not made and made.world > 1:
        # Rows that keep different things would fall out of step.
        refusals = Meeting(made.everyone.process_group).share(refusal)
        refusal = next(filter(None, refusals), "")
    if not isinstance(made, SharedMemoryComm):
        alike(made)  # here, where all rows come by, whatever each of them could share
    if refusal:
        if comm is not None:
            raise ArenaUnavailable(refusal)
        choice = pick.Choice("process_group", f"no shared memory: {refusal}", lacking=True)
        made = connect(choice.name, grid, plan.device)
    if made.everyone.rank == 0:
        name = made.name if strategy is ZERO3 else f"{strategy.name} with {made.name}"
        _say(where, f"{name} over {grid.size}", plan.device, choice)
    return made


def _say(where: str, what: str, device: torch.device, choice: pick.Choice) -> None:
    level = logging.WARNING if choice.lacking and choice.reason not in _told else logging.INFO
    _told.add(choice.reason)
    logger.log(level, "%s: %s ranks on %s (%s)", where, what, device, choice.reason)


def _shared_bytes(plan: Plan, policy: MixedPrecisionPolicy, world: int) -> tuple[list[int], int]:
    """Bytes of each bucket's full parameters, and of the largest full gradient bucket."""
    params, grads = [], [0]
    for entries in plan.owners.values():
        for group in bucket_groups(entries):
            dtypes = bucket_dtypes(group[0].param.dtype, policy)
            numel = _layout(group, dtypes, world).full_numel
            params.append(numel * dtypes.compute.itemsize)
            grads.append(numel * dtypes.reduce.itemsize)
    return params, max(grads)


def sync_buffers(module: nn.Module, comm: Comm) -> None:
    """Give every rank rank 0's buffers."""
    for name, buffer in module.named_buffers():
        data = buffer.detach()
        sent = data.contiguous()
        comm.broadcast(sent, src=0, label=label("broadcast", name)).wait()
        if sent.data_ptr() != data.data_ptr():
            data.copy_(sent)


# -- buckets, and the swap ------------------------------------------------------------------------


def build_units(
    plan: Plan,
    policy: MixedPrecisionPolicy,
    resources: Resources,
    strategy: Strategy,
    sync: bool,
) -> list[Unit]:
    """Make units and buckets, and turn the parameters into `FlatShard`s, bucket by bucket."""
    units = []
    for module, entries in plan.owners.items():
        groups = bucket_groups(entries)
        buckets = [_build_bucket(group, policy, resources, sync) for group in groups]
        unit = Unit(module, buckets, strategy)
        modules = {site_module for entry in entries for site_module, _ in entry.sites}
        unit.rnns = [m for m in modules if isinstance(m, nn.RNNBase)]
        units.append(unit)
        for group, bucket in zip(groups, buckets, strict=True):
            _swap(group, bucket)
        unit.sync_rnns()
    return units


def bucket_groups(entries: list[Entry]) -> list[list[Entry]]:
    """The parameters of each of a unit's buckets."""
    kinds = [(e.name, e.param.dtype, e.param.requires_grad) for e in entries]
    return [[entries[i] for i in indices] for indices in group_parameters(kinds).values()]


def _layout(entries: list[Entry], dtypes: Dtypes, world: int) -> BucketLayout:
    return BucketLayout.build(
        [e.name for e in entries],
        [e.param.numel() for e in entries],
        world=world,
        itemsize=dtypes.itemsize,
    )


def bucket_dtypes(own: torch.dtype, policy: MixedPrecisionPolicy) -> Dtypes:
    if not own.is_floating_point:
        return Dtypes(own, own, own)
    compute = policy.param_dtype or own
    return Dtypes(own, compute, policy.reduce_dtype or compute)


def _build_bucket(
    entries: list[Entry], policy: MixedPrecisionPolicy, resources: Resources, sync: bool
) -> Bucket:
    comm = resources.comm
    own = entries[0].param.dtype
    dtypes = bucket_dtypes(own, policy)
    layout = _layout(entries, dtypes, comm.world)
    full = torch.zeros(layout.full_numel, dtype=own, device=entries[0].param.device)
    with torch.no_grad():
        for entry, segment in zip(entries, layout.segments, strict=True):
            full[segment.start : segment.stop].view(entry.param.shape).copy_(entry.param)
    if sync:
        comm.broadcast(full, src=0, label=label("broadcast", entries[0].name)).wait()
    start, stop = layout.shard_range(comm.rank)
    shapes = [e.param.shape for e in entries]
    return Bucket(layout, shapes, dtypes, full[start:stop].clone(), resources)


def _swap(entries: list[Entry], bucket: Bucket) -> None:
    sites: list[Site] = []
    params: list[Any] = []
    for index, entry in enumerate(entries):
        fragment = bucket.layout.fragment(index, bucket.rank)
        local = bucket.shard_master[fragment.shard_start : fragment.shard_stop]
        param: Any = entry.param
        flat = FlatShard(local, bucket.geometry(index), bucket, param.requires_grad)
        flat.__dict__.update(param.__dict__)  # attributes that the user set
        flat._is_param = True
        torch.utils.swap_tensors(param, flat)  # type: ignore[no-untyped-call]
        params.append(param)
        sites.extend(Site(module, name, index) for module, name in entry.sites)
    bucket.adopt(params, sites)

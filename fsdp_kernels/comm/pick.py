# SPDX-License-Identifier: Apache-2.0
"""Which backend `comm=None` means and why, and backends by name."""

from __future__ import annotations

import logging
import weakref
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist

from fsdp_kernels import _ext
from fsdp_kernels.comm._arena_setup import Meeting
from fsdp_kernels.comm._peer_setup import CudaSide, PeerUnavailable
from fsdp_kernels.comm.base import Comm
from fsdp_kernels.comm.nccl import NcclComm
from fsdp_kernels.comm.peer import PeerMemory
from fsdp_kernels.comm.process_group import ProcessGroupComm
from fsdp_kernels.comm.shared_memory import SharedMemoryComm

logger = logging.getLogger("fsdp_kernels")

NAMES = ("process_group", "shared_memory", "nccl", "peer")

_OLDEST_NCCL, _NEWEST_TESTED_NCCL = 22700, 23099

# One communicator for each group and device, whatever the number of `fully_shard` calls: each costs
# two connections to every rank, and device memory. It lives as long as its group, which ends at the
# same point of every rank's program; by the garbage collector's clock, ranks would disagree on
# whether there is one.
_nccl_comms: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, NcclComm]] = (
    weakref.WeakKeyDictionary()
)
# The one over shared memory lives as long as a model uses it, since its memory only grows; ranks
# agree each time on whether there still is one.
_shared_comms: weakref.WeakKeyDictionary[
    dist.ProcessGroup, weakref.ReferenceType[SharedMemoryComm]
] = weakref.WeakKeyDictionary()
# So does the one over peers' memory. Ranks that do not reach each other are not asked again.
_peer_comms: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ReferenceType[PeerMemory]] = (
    weakref.WeakKeyDictionary()
)
_no_peers: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


class Choice(NamedTuple):
    """A backend's name, why it is that one, and whether a faster one is missing."""

    name: str
    reason: str
    lacking: bool = False


def choose(device_type: str, world: int = 2) -> Choice:
    """Return what `comm=None` means for tensors on a type of device. Loads libnccl for "cuda".

    Never `PeerMemory`: it has not run on a GPU yet, and is for those who ask for it by name.

    Args:
        device_type: Such as "cuda".
        world: Number of ranks. Whether they share a host is not known here.
    """
    if device_type == "cpu":
        return _choose_on_cpu(world)
    if device_type != "cuda":
        return Choice("process_group", f"the only backend for tensors on {device_type}")
    module = _ext.load("_nccl")
    if not isinstance(module, ModuleType):
        return Choice("process_group", f"the NCCL module is {module}", lacking=True)
    version = module.runtime_version()
    if version < _OLDEST_NCCL:
        reason = f"NCCL {dotted(version)} is loaded, {nccl_range(version)}"
        return Choice("process_group", reason, lacking=True)
    if not dist.is_available() or not dist.is_gloo_available():
        reason = "this torch has no gloo, which NcclComm joins the hosts with"
        return Choice("process_group", reason, lacking=True)
    return Choice("nccl", f"built, and NCCL {dotted(version)} is loaded")


def _choose_on_cpu(world: int) -> Choice:
    if world == 1:
        return Choice("process_group", "one rank has nothing to share")
    module = _ext.load("_cpu")
    if not isinstance(module, ModuleType):
        return Choice("process_group", f"the C++ module is {module}", lacking=True)
    return Choice("shared_memory", "built, for ranks of one host")


def dotted(version: int) -> str:
    """Spell NCCL's number (23007) as a version ("2.30.7")."""
    return f"{version // 10000}.{version % 10000 // 100}.{version % 100}"


def nccl_range(version: int) -> str:
    """Say whether NCCL's number lies in the range that `NcclComm` serves."""
    if version < _OLDEST_NCCL:
        return "too old: 2.27 or later is needed"
    if version > _NEWEST_TESTED_NCCL:
        return "newer than any that was tested (2.27 to 2.30)"
    return "in the tested range (2.27 to 2.30)"


def make(name: str, group: dist.ProcessGroup | None, device: torch.device) -> Comm:
    """Return the backend of a name over a group's ranks (collective).

    Args:
        name: One of `NAMES`.
        group: The ranks; None is the default group.
        device: Where the tensors are.

    Raises:
        RuntimeError: The backend is not there; the message says what to do.
    """
    if name == "process_group":
        return ProcessGroupComm(group)
    if name == "shared_memory":
        return _shared_memory(group, device)
    if name == "peer":
        return _peer(group, device)
    known = group if group is not None else dist.group.WORLD
    of_group = _nccl_comms.get(known, {}) if known is not None else {}
    made = of_group.get(device)
    if made is not None and made.failure is not None:
        # This rank alone may know, and a new one takes all of them.
        raise RuntimeError(
            f"comm={name!r}: expected the group's NcclComm to work, got one that has failed on "
            f"rank {made.rank}: {made.failure} To go on in this process, make a new one on every "
            "rank and pass it: fully_shard(..., comm=NcclComm(group))."
        )
    if made is None or made.closed:
        made = NcclComm(group, device=device)
        if known is not None:
            _nccl_comms.setdefault(known, {})[device] = made
    return made


def _peer(group: dist.ProcessGroup | None, device: torch.device) -> Comm:
    """Return `PeerMemory`; or, with one line of reason, what it would take gathers over."""
    side = CudaSide()
    side.resolve(device)  # first: what refuses this device should say which backend was asked for
    base = make(choose(device.type).name, group, device)
    known = group if group is not None else dist.group.WORLD
    assert known is not None  # the other communicator would have refused
    if known in _no_peers:
        return base
    if known in _peer_comms:
        made = _peer_comms[known]()
        # NOTE: as below, one rank may have dropped its last model later than another.
        if all(Meeting(group, "PeerMemory").share(made is not None and made.is_usable)):
            assert made is not None
            return made
    try:
        made = PeerMemory(group, device=device, base=base, side=side)
    except PeerUnavailable as error:  # the same on every rank
        _no_peers.add(known)
        if base.rank == 0:
            logger.warning("comm='peer': %s takes its place: %s", base.name, error)
        return base
    _peer_comms[known] = weakref.ref(made)
    return made


def _shared_memory(group: dist.ProcessGroup | None, device: torch.device) -> SharedMemoryComm:
    if device.type != "cpu":
        raise ValueError(
            f"SharedMemoryComm: expected tensors on the CPU, got them on {device}. Use comm=None, "
            "which picks."
        )
    known = group if group is not None else dist.group.WORLD
    if known is not None and known in _shared_comms:
        made = _shared_comms[known]()
        # NOTE: one rank may have dropped its last model later than another.
        if all(Meeting(group).share(made is not None and made.is_usable)):
            assert made is not None
            return made
    made = SharedMemoryComm(group)
    if known is not None:
        _shared_comms[known] = weakref.ref(made)
    return made

# SPDX-License-Identifier: Apache-2.0
"""What `PeerMemory` starts from: whether ranks reach each other, and memory that all map."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_kernels import _nvml, ops
from fsdp_kernels.comm._arena_setup import Meeting
from fsdp_kernels.comm._nccl_setup import current_cuda_device

_OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_MARK = 0x5EED_0000  # what a rank finds in a peer's memory at first, plus the peer's number


class PeerUnavailable(RuntimeError):
    """The ranks cannot address one another's memory. Every rank raises it, with one reason."""


@dataclass(frozen=True)
class Whereabouts:
    """What tells whether two ranks can reach each other's memory.

    Attributes:
        refusal: Why this rank cannot, whoever the others are; or "".
        host: Equal where ranks see the same processes and files.
        gpu: The device's UUID.
    """

    refusal: str = ""
    host: tuple[str, ...] = ()
    gpu: str = ""


class Region(Protocol):
    """Memory of one size on every rank, which each of them addresses.

    Attributes:
        multicast: An address at which the switches sum what lies at one offset on all ranks; or 0.
    """

    multicast: int

    def part(self, rank: int, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return [numel] of a rank's memory, from the byte `start`, a multiple of 16."""

    def barrier(self, channel: int, timeout_ms: int) -> None:
        """Let the current stream go on once those of all ranks have come here.

        What was queued before it on any rank is then done, and its writes are seen.
        """


class Side(Protocol):
    """What `PeerMemory` needs of torch on its device.

    Attributes:
        cuda: `torch.cuda`, or what looks like it: streams, events, the current stream.
    """

    cuda: Any

    def resolve(self, device: torch.device | str | None) -> torch.device:
        """Return the device with its index; refuse one that is not served."""

    def whereabouts(self, device: torch.device) -> Whereabouts:
        """Describe this rank."""

    def why_unlinked(self, gpu: str, others: Sequence[str]) -> str:
        """Return why this rank's GPU does not reach another one over NVLink; "" if it does."""

    def stream(self, device: torch.device) -> Any:
        """Make the stream of reductions."""

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """Return uint8 [nbytes] that peers may map later."""

    def rendezvous(self, memory: Tensor, group: dist.ProcessGroup) -> Region:
        """Map all ranks' memory, as much on each (collective)."""

    def reduce(self, peers: Sequence[Tensor], shard: Tensor, multicast: int) -> None:
        """Queue the sum of the peers' parts on the current stream; see `ops.reduce`.

        Args:
            peers: One for each rank.
            shard: Where it goes.
            multicast: The address at which switches sum those parts; 0: by pointers, in rank order.
        """


class SymmetricRegion:
    """A `Region` of torch's symmetric memory.

    Args:
        memory: This rank's own, an allocation by itself.
        handle: What torch's rendezvous returned for it.
    """

    def __init__(self, memory: Tensor, handle: Any) -> None:
        self._memory = memory
        self._handle = handle  # keeps the peers' memory mapped
        self.multicast = int(handle.multicast_ptr or 0)

    def part(self, rank: int, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a view of a rank's memory; this rank's own keeps it alive."""
        if rank == self._handle.rank:
            return self._memory[start : start + numel * dtype.itemsize].view(dtype)
        view: Tensor = self._handle.get_buffer(rank, (numel,), dtype, start // dtype.itemsize)
        return view

    def barrier(self, channel: int, timeout_ms: int) -> None:
        """Queue torch's barrier. NOTE: past its time limit it prints, and traps the device."""
        self._handle.barrier(channel, timeout_ms)


class CudaSide:
    """CUDA, over torch's symmetric memory."""

    cuda: Any = torch.cuda

    def resolve(self, device: torch.device | str | None) -> torch.device:
        """Return the device with its index."""
        return current_cuda_device("PeerMemory", device)

    def whereabouts(self, device: torch.device) -> Whereabouts:
        """Describe this rank; torch passes memory on by sockets in a folder, named by process."""
        refusal = why_no_symmetric_memory(device)
        try:
            with open("/proc/sys/kernel/random/boot_id") as file:
                boot = file.read().strip()
            spaces = [str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("pid", "mnt")]
        except OSError as error:
            return Whereabouts(f"Linux with /proc is needed: {error}")
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", "unknown")
        return Whereabouts(refusal, (boot, *spaces, str(os.geteuid())), f"GPU-{uuid}")

    def why_unlinked(self, gpu: str, others: Sequence[str]) -> str:
        """Ask NVML: to import memory of a GPU out of reach fails on some ranks, hangs on others."""
        if gpu in others and os.environ.get(_OVERLAP) != "1":
            return f"two ranks share {gpu}, which torch allows with {_OVERLAP}=1 only"
        return _nvml.why_unlinked(gpu, sorted(set(others) - {gpu}))

    def stream(self, device: torch.device) -> Any:
        """Make a stream of high priority."""
        return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """Allocate alone.

        `symm_mem.empty` may cut several tensors from one block. They then share the block's signal
        pad, and our barriers would meet those of whoever has the others.
        """
        from torch._C._distributed_c10d import _SymmetricMemory

        try:
            return _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
        except RuntimeError:
            torch.cuda.empty_cache()  # what torch keeps unused, the driver cannot give
            return _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)

    def rendezvous(self, memory: Tensor, group: dist.ProcessGroup) -> Region:
        """Map all ranks' memory (collective)."""
        from torch.distributed import _symmetric_memory as symmetric

        return SymmetricRegion(memory, symmetric.rendezvous(memory, group.group_name))

    def reduce(self, peers: Sequence[Tensor], shard: Tensor, multicast: int) -> None:
        """Queue the kernel on the current stream."""
        if multicast:
            ops.reduce_multicast(multicast, shard)
        else:
            ops.reduce(peers, shard)


def why_no_symmetric_memory(device: torch.device | str) -> str:
    """Return why this torch has no symmetric memory that serves here; "" if it has."""
    if not dist.is_available():
        return "this torch has no torch.distributed"
    try:
        from torch.distributed import _symmetric_memory as symmetric

        backend = symmetric.get_backend(torch.device(device))
    except (ImportError, AttributeError) as error:
        return f"this torch has no symmetric memory: {error}"
    if backend is None:
        return "this torch has no symmetric memory for CUDA"
    if backend != "CUDA":
        return (
            f"torch's symmetric memory is that of {backend}, and CUDA's own is needed: "
            "TORCH_SYMMMEM=CUDA"
        )
    return ""


def why_apart(known: Sequence[Whereabouts]) -> str:
    """Return why ranks cannot reach each other, the same on every rank; "" if they may."""
    for rank, one in enumerate(known):
        if one.refusal:
            return f"{one.refusal} (rank {rank})"
        if one.host != known[0].host:
            return (
                f"ranks 0 and {rank} are on different hosts, in different containers, or of "
                "different users"
            )
    return ""


def check_reach(side: Side, device: torch.device, meeting: Meeting) -> None:
    """Return if every rank can reach every other one's memory (collective).

    Raises:
        PeerUnavailable: One cannot; the message says which and why.
    """
    known = meeting.share(side.whereabouts(device))
    reason = why_apart(known)
    if reason:
        raise PeerUnavailable(_no(reason))
    others = [one.gpu for rank, one in enumerate(known) if rank != meeting.rank]
    _agree(meeting, side.why_unlinked(known[meeting.rank].gpu, others))


def connect(side: Side, nbytes: int, device: torch.device, meeting: Meeting) -> Region:
    """Allocate on every rank, map it on all, and read each peer's once (collective).

    Waits for the device: it is for the start, and for the rare time when more is needed.

    Raises:
        PeerUnavailable: It failed on some rank; nothing is kept then.
    """
    group = meeting.group
    memory: Tensor | None = None
    region: Region | None = None
    reason = ""
    try:
        memory = side.allocate(nbytes, device)
    except RuntimeError as error:
        reason = f"no {nbytes} bytes of symmetric memory: {_first_line(error)}"
    _agree(meeting, reason)  # before the rendezvous, where a rank that has none would be missed
    assert memory is not None
    try:
        region = side.rendezvous(memory, group)
        region.part(meeting.rank, 0, 1, torch.int64).fill_(_MARK + meeting.rank).item()
    except RuntimeError as error:
        reason = f"torch's rendezvous failed: {_first_line(error)}"
    _agree(meeting, reason)
    assert region is not None
    _agree(meeting, _why_unreadable(region, meeting))
    return region


def _why_unreadable(region: Region, meeting: Meeting) -> str:
    """Read from every peer what it has written."""
    for peer in range(meeting.world):
        try:
            found = region.part(peer, 0, 1, torch.int64).item()
        except RuntimeError as error:
            return f"the memory of rank {peer} cannot be read: {_first_line(error)}"
        if found != _MARK + peer:
            return f"the memory of rank {peer} holds {found}, where it wrote {_MARK + peer}"
    return ""


def _agree(meeting: Meeting, reason: str) -> None:
    """Raise on every rank where one has a reason."""
    for rank, theirs in enumerate(meeting.share(reason)):
        if theirs:
            raise PeerUnavailable(_no(f"{theirs} (rank {rank})"))


def _no(reason: str) -> str:
    return (
        "PeerMemory: expected ranks that address one another's memory (one host, GPUs linked by "
        f"NVLink), got: {reason}. Use comm=None."
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)

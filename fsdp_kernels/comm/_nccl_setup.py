# SPDX-License-Identifier: Apache-2.0
"""What `NcclComm` starts from: its options, torch's side of the device, and how ranks meet."""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fsdp_kernels import _ext
from fsdp_kernels.comm._groups import Hosts, timeout_of
from fsdp_kernels.streams import CudaStreams, Streams

_CTA_POLICIES = {"default": 0, "efficiency": 1, "zero": 2}  # NCCL's numbers
REGISTRATIONS = ("none", "local", "symmetric")  # least first
_ID_BYTES = 128


@dataclass(frozen=True)
class NcclOptions:
    """How `NcclComm` uses NCCL; equal on every rank.

    Attributes:
        min_ctas: Fewest thread blocks of a collective; 0 leaves it to NCCL.
        max_ctas: Most thread blocks; 0 leaves it to NCCL. Fewer leave more of the device to
            computation that runs beside.
        gather_cta_policy: Of gathers alone. "efficiency" lets them use fewer blocks where
            bandwidth allows; "zero" lets copy engines do them where NCCL (2.28 or later) can, and
            needs `registration="symmetric"`.
        blocking: Use blocking communicators: a call to NCCL may then last until the watchdog
            aborts. Otherwise NCCL launches each collective from a thread that it makes for that.
        timeout_s: Seconds that a collective may take before it is an error; None takes the process
            group's.
        registration: What is done with the memory of full buckets, whose shards come from torch's
            allocator. "local" registers it with NCCL: gathers in rings within one host then write
            it without a copy, and NVLink switches can sum what reductions send; between hosts NCCL
            needs the shard registered too, so it changes nothing there. "symmetric" makes windows
            of full parameters, which ranks of an NVLink domain address directly; of gradients,
            which ranks pack in orders of their own, it does what "local" does. "none" leaves all
            memory alone.
    """

    min_ctas: int = 0
    max_ctas: int = 0
    gather_cta_policy: Literal["default", "efficiency", "zero"] = "default"
    blocking: bool = False
    timeout_s: float | None = None
    registration: Literal["local", "symmetric", "none"] = "local"

    def __post_init__(self) -> None:
        for name in ("min_ctas", "max_ctas"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 0:
                _refuse(name, "a number from 0", getattr(self, name), "0 leaves it to NCCL.")
        if self.max_ctas and self.min_ctas > self.max_ctas:
            _refuse("min_ctas", f"at most max_ctas={self.max_ctas}", self.min_ctas, "")
        if self.gather_cta_policy not in _CTA_POLICIES:
            _refuse("gather_cta_policy", f"one of {[*_CTA_POLICIES]}", self.gather_cta_policy, "")
        if self.registration not in REGISTRATIONS:
            _refuse("registration", f"one of {[*REGISTRATIONS]}", self.registration, "")
        if self.timeout_s is not None and not 0 < self.timeout_s < float("inf"):
            _refuse("timeout_s", "finite seconds above 0", self.timeout_s, "None: the group's.")
        if self.gather_cta_policy == "zero" and self.registration != "symmetric":
            _refuse(
                "gather_cta_policy",
                "'zero' only with registration='symmetric'",
                f"'zero' with {self.registration!r}",
                "Copy engines move symmetric memory only.",
            )

    @property
    def cta_policy_code(self) -> int:
        """NCCL's number of `gather_cta_policy`; -1 leaves the setting alone."""
        return _CTA_POLICIES[self.gather_cta_policy] or -1


def _refuse(name: str, expected: str, got: object, advice: str) -> None:
    raise ValueError(f"NcclOptions.{name}: expected {expected}, got {got}. {advice}".rstrip())


# -- torch's side of the device -------------------------------------------------------------------


class TorchSide(Protocol):
    """What `NcclComm` needs of torch on the device that a compiled module serves."""

    def resolve(self, device: torch.device | str | None) -> torch.device:
        """Return the device with its index; refuse one that the module does not serve."""

    def current_stream(self, device: torch.device) -> Callable[[], int]:
        """Return a function that tells the handle of torch's current stream."""

    def streams(self, native: Any, device: torch.device) -> Streams:
        """Return the streams of a communicator."""

    def tensor(self, buffer: Any, device: torch.device) -> torch.Tensor:
        """Return uint8 [nbytes] over memory that a communicator allocated, and owns it."""

    def empty_cache(self) -> None:
        """Give the device back what torch's allocator keeps unused."""


def current_cuda_device(where: str, device: torch.device | str | None) -> torch.device:
    """Return the device with its index; `where` begins the error of one that is not there.

    Raises:
        ValueError: It is no CUDA device.
        RuntimeError: There is none, or it is not the current one.
    """
    wanted = torch.device("cuda" if device is None else device)
    if wanted.type != "cuda":
        raise ValueError(
            f"{where}: expected a CUDA device, got {wanted}. Move the model there before "
            "sharding it, or use comm='process_group'."
        )
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"{where}: expected a CUDA device, got a torch that finds none. Use "
            "comm='process_group', which serves CPU tensors."
        )
    current = torch.cuda.current_device()
    if wanted.index not in (None, current):
        # Elsewhere, every call would make a context on the current device and keep it.
        raise RuntimeError(
            f"{where}: expected {wanted} to be the current device, got cuda:{current}. Call "
            f"torch.cuda.set_device({wanted.index}) first, one device for each rank."
        )
    return torch.device("cuda", current)


class CudaSide:
    """The torch side of CUDA."""

    def resolve(self, device: torch.device | str | None) -> torch.device:
        """Return the device with its index."""
        return current_cuda_device("NcclComm", device)

    def current_stream(self, device: torch.device) -> Callable[[], int]:
        """Return a function that tells the handle of torch's current stream."""
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return partial(torch._C._cuda_getCurrentRawStream, device.index)

    def streams(self, native: Any, device: torch.device) -> Streams:
        """Return the communicator's own two streams, and torch's events."""
        return CudaStreams(
            torch.cuda.ExternalStream(native.gather_stream, device),  # type: ignore[no-untyped-call]
            torch.cuda.ExternalStream(native.reduce_stream, device),  # type: ignore[no-untyped-call]
            current=self.current_stream(device),
            device=device,
        )

    def tensor(self, buffer: Any, device: torch.device) -> torch.Tensor:
        """Return a tensor that keeps the buffer alive."""
        tensor = torch.as_tensor(buffer, device=device)
        assert tensor.data_ptr() == buffer.ptr, "torch copied it: to which NCCL would not write"
        return tensor

    def empty_cache(self) -> None:
        """Give the device back what torch's allocator keeps unused."""
        torch.cuda.empty_cache()


# -- how the ranks meet ---------------------------------------------------------------------------

_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()


class Meeting:
    """Where the ranks of one `NcclComm` find each other: the store of their process group.

    Holds no reference to the group, which may end before the communicator does.

    Attributes:
        side: Torch's side of the device.
        device, rank, world, timeout_s: See `NcclComm`.
        out_of_memory: What the module raises where there is no memory.
        name: The communicator's, equal on every rank: ranks make their communicators in one order.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device | str | None,
        options: NcclOptions,
        module: Any,
    ) -> None:
        known = _member(group)
        self._module = _built_module() if module is None else module
        self.out_of_memory: type[RuntimeError] = self._module.OutOfMemoryError
        self._options = options
        self.side: TorchSide = getattr(self._module, "torch_side", None) or CudaSide()
        self.device = self.side.resolve(device)
        self.rank: int = dist.get_rank(known)
        self.world: int = dist.get_world_size(known)
        self.timeout_s = options.timeout_s or timeout_of(known, self.device.type, "cpu")
        self.name = f"fk{next(_counts.setdefault(known, itertools.count()))}"
        self._store: Any = distributed_c10d._get_process_group_store(known)
        self._digest = ""

    def connect(self) -> Any:
        """Return the module's `Communicator`, with its communicator for gathers (collective)."""
        options, unique_id = self._options, self._receive_id("gather")
        self._digest = hashlib.sha256(unique_id).hexdigest()[:16]
        made = self._module.Communicator(
            self.rank,
            self.world,
            unique_id,
            device=self.device.index or 0,
            name=self.name,
            timeout_s=self.timeout_s,
            init_timeout_s=self.timeout_s,
            blocking=options.blocking,
            min_ctas=options.min_ctas,
            max_ctas=options.max_ctas,
            cta_policy=options.cta_policy_code,
            registration=options.registration,
        )
        self._forget_id("gather")
        return made

    def open_reductions(self, native: Any) -> None:
        """Make the communicator of reductions (collective)."""
        native.open_reductions(self._receive_id("reduce"))
        self._forget_id("reduce")

    def join_hosts(self, failure: Callable[[], str | None]) -> Hosts | None:
        """Join the hosts (collective); None for one that is alone.

        Args:
            failure: What has failed on this rank, or None.
        """
        if self.world == 1:
            return None
        # The id is new in each run: what an earlier one left in a store of files is not found.
        key = f"{self._key('hosts')}/{self._digest}"
        store = distributed_c10d.PrefixStore(key, self._store)
        return Hosts(self.rank, self.world, store, self.timeout_s, failure)

    def _receive_id(self, purpose: str) -> bytes:
        """Hand rank 0's unique id to every rank, with the options, which must be equal."""
        key, options = self._key(purpose), repr(self._options)
        if self.rank == 0:
            unique_id: bytes = self._module.unique_id()
            self._store.set(key, unique_id + options.encode())
            return unique_id
        try:
            self._store.wait([key], timedelta(seconds=self.timeout_s))
            value: bytes = self._store.get(key)
        except RuntimeError as error:
            raise RuntimeError(
                f"NcclComm: expected rank 0's id '{key}' within {self.timeout_s:g} s, got none on "
                f"rank {self.rank}: {error}. Make communicators in the same order on every rank; "
                "if rank 0 failed, read its error first."
            ) from error
        theirs = value[_ID_BYTES:].decode()
        if theirs != options:
            raise ValueError(
                f"NcclComm: expected rank 0's options on every rank, {theirs}, got {options} on "
                f"rank {self.rank}. Pass equal NcclOptions."
            )
        return value[:_ID_BYTES]

    def _forget_id(self, purpose: str) -> None:
        """Delete an id once all have come: a later group over the same store must not find it."""
        if self.rank == 0:
            with suppress(RuntimeError):  # not every store can delete
                self._store.delete_key(self._key(purpose))

    def _key(self, purpose: str) -> str:
        return f"fsdp_kernels/{self.name}/{purpose}"


def _member(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group, resolved; refuse one that does not exist or lacks this rank."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "NcclComm: expected torch.distributed to be initialised, got no process group. Run "
            "under torchrun and call torch.distributed.init_process_group first."
        )
    if dist.get_rank(group) < 0:
        raise RuntimeError(
            "NcclComm: expected this rank to be in the group, got a group without it. Only members "
            "may create it."
        )
    resolved = group if group is not None else dist.group.WORLD
    assert resolved is not None  # is_initialized said so
    return resolved


def _built_module() -> Any:
    module = _ext.nccl()
    if module is None:
        raise RuntimeError(
            "NcclComm: expected the NCCL module, got an installation without it. Build with "
            "FSDP_KERNELS_CUDA=require (`fsdp-kernels env` says what there is), or use "
            "comm='process_group'."
        )
    return module

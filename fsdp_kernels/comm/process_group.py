# SPDX-License-Identifier: Apache-2.0
"""Collectives over `torch.distributed`: any device, any backend, several hosts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fsdp_kernels.comm._checks import (
    check_contiguous,
    check_op,
    check_reducible,
    check_shards,
    check_src,
)
from fsdp_kernels.comm._group_ticket import Scratch, SumTicket, WorkTicket, unheld
from fsdp_kernels.comm._groups import twin
from fsdp_kernels.comm.base import (
    Comm,
    DoneTicket,
    PlacedParams,
    ReduceName,
    Ticket,
    collective_error,
)
from fsdp_kernels.streams import CudaStreams, HostStreams, Streams

# torch 2.13 renamed both and warns at the old names; older ones have only those. Nothing else in
# the package may name either.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Dtypes that every backend moves as they are; all others travel as bytes. A view costs about a
# microsecond a tensor, so the common ones go without.
_MOVABLE = frozenset(
    {
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
    }
)


class ProcessGroupComm:
    """A `Comm` over a `torch.distributed` process group, which stays its creator's.

    Reduce-scatters run on a second group of the same ranks, once `prepare_reductions` has made it.

    On CPU tensors over gloo, reductions are an all-to-all and a local sum in rank order: gloo's own
    reduce-scatter is an all-reduce of a copy, which moves twice the bytes.

    Args:
        group: The process group; `None` is the default one.

    Raises:
        RuntimeError: `torch.distributed` is not initialised, or this rank is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "ProcessGroupComm: expected torch.distributed to be initialised, got no process "
                "group. Run under torchrun and call torch.distributed.init_process_group first."
            )
        self.name = "process_group"
        self.rank: int = dist.get_rank(group)
        self.world: int = dist.get_world_size(group)
        if self.rank < 0:
            raise RuntimeError(
                "ProcessGroupComm: expected this rank to be in the group, got a group without it. "
                "Only members may create it."
            )
        resolved = group if group is not None else dist.group.WORLD
        assert resolved is not None  # is_initialized said so
        # NOTE: weak. Gloo's threads end with the group, and must not outlive the destruction of the
        # group because a model does: one that lets a tensor go while Python ends kills the process.
        self._group_of = _weakly(resolved)
        self._reduce_group_of = _weakly(None)
        self.symmetric = False
        self._gloo_on_cpu = _backend_of(resolved, "cpu") == "gloo"
        self._joins_hosts = _backend_of(resolved, "cpu") != ""
        self._scratch = Scratch()
        self._device = torch.device("cuda")  # until tensors have come

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group itself, as long as it was not destroyed; see `Comm`."""
        return self._group_of()

    @property
    def everyone(self) -> Comm:
        """This communicator itself; see `Comm`."""
        return self

    def streams(self, device: torch.device) -> Streams:
        """Return streams without roles: torch orders its own against the current one."""
        if device.type != "cuda":
            return HostStreams()
        self._device = device
        current = partial(torch._C._cuda_getCurrentRawStream, device.index)
        return CudaStreams(current=current, device=device)

    def allocate(self, nbytes: int, device: torch.device, *, collective: bool) -> torch.Tensor:
        """Return memory of torch's own allocator; see `Comm`."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def place_params(self, nbytes: int, device: torch.device) -> PlacedParams | None:
        """Nothing is shared; see `Comm`."""
        return None

    def grads_buffer(self, numel: int, dtype: torch.dtype, *, label: str) -> torch.Tensor | None:
        """Any memory does; see `Comm`."""
        return None

    def grouped(self) -> AbstractContextManager[object]:
        """Change nothing: torch groups only collectives of one kind."""
        return nullcontext()

    def prepare_reductions(self, largest_bytes: int = 0) -> None:
        """Make the group that reduce-scatters run on from now on (collective); see `Comm`."""
        group = self._group_of()
        if group is not None and self._reduce_group_of() is None and self.world > 1:
            try:
                self._reduce_group_of = _weakly(twin(group))
            except RuntimeError as error:  # a rank that ended before its first backward, say
                raise collective_error("meeting", "fk.reduce", self, error) from error

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, *, label: str) -> Ticket:
        """Fill `full` with every rank's `shard`, in rank order; see `Comm`."""
        check_shards(full, shard, self.world, label)
        group = self._open_group(label)
        full = full.data  # an alias with a version counter of its own: gloo and copy_ would bump it
        if self._is_local(full):
            if full.data_ptr() != shard.data_ptr():
                full.copy_(shard)
            return DoneTicket(label)
        if full.dtype not in _MOVABLE:
            full, shard = full.view(torch.uint8), shard.view(torch.uint8)
        try:
            work = _all_gather(self._lent(full), self._lent(shard), group=group, async_op=True)
        except RuntimeError as error:
            raise collective_error("all_gather", label, self, error) from error
        return WorkTicket(label, "all_gather", self, work, (full, shard))

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, *, label: str, lend: bool = False
    ) -> Ticket:
        """Fill `shard` with this rank's slot of the sum of every rank's `full`; see `Comm`."""
        check_shards(full, shard, self.world, label)
        check_reducible(full, "sum", label)
        group = self._open_group(label)
        group = self._reduce_group_of() or group
        if self._is_local(full):
            if full.data_ptr() != shard.data_ptr():
                shard.copy_(full)
            return DoneTicket(label)
        try:
            if self._gloo_on_cpu and not full.is_cuda:
                parts = self._scratch.take(full)
                work = dist.all_to_all_single(
                    unheld(parts), unheld(full), group=group, async_op=True
                )
                return SumTicket(label, self, work, (parts, shard, full), self._scratch)
            shard, full = _as_real(shard), _as_real(full)
            work = _reduce_scatter(shard, full, group=group, async_op=True)
        except RuntimeError as error:
            raise collective_error("reduce_scatter", label, self, error) from error
        return WorkTicket(label, "reduce_scatter", self, work, (shard, full))

    def all_reduce(self, tensor: torch.Tensor, op: ReduceName = "sum", *, label: str) -> Ticket:
        """Replace `tensor` by its sum, maximum or minimum over the ranks; see `Comm`."""
        check_op(op, label)
        check_contiguous(tensor, label)
        check_reducible(tensor, op, label)
        group = self._open_group(label)
        if self._is_local(tensor):
            return DoneTicket(label)
        tensor = _as_real(tensor)
        try:
            work = dist.all_reduce(self._lent(tensor), op=_OPS[op], group=group, async_op=True)
        except RuntimeError as error:
            raise collective_error("all_reduce", label, self, error) from error
        return WorkTicket(label, "all_reduce", self, work, (tensor,))

    def broadcast(self, tensor: torch.Tensor, *, src: int = 0, label: str) -> Ticket:
        """Replace `tensor` by that of rank `src` of the group; see `Comm`."""
        check_src(src, self.world, label)
        check_contiguous(tensor, label)
        group = self._open_group(label)
        if self._is_local(tensor):
            return DoneTicket(label)
        if tensor.dtype not in _MOVABLE:
            tensor = tensor.detach().reshape(-1).view(torch.uint8)
        try:
            work = dist.broadcast(self._lent(tensor), group=group, group_src=src, async_op=True)
        except RuntimeError as error:
            raise collective_error("broadcast", label, self, error) from error
        return WorkTicket(label, "broadcast", self, work, (tensor,))

    def agree(self, words: torch.Tensor, *, label: str) -> torch.Tensor:
        """Return the maximum over the ranks of words that the host holds; see `Comm`."""
        group = self._open_group(label)
        on_device = not self._joins_hosts and _backend_of(group, "cuda") != ""
        moved = words.to(self._device) if on_device else words.clone()
        self.all_reduce(moved, "max", label=label).wait()
        return moved.cpu()

    def barrier(self, label: str) -> None:
        """Return once every rank has called this."""
        group = self._open_group(label)
        try:
            dist.barrier(group=group)
        except RuntimeError as error:
            raise collective_error("barrier", label, self, error) from error

    def close(self) -> None:
        """Let the group go, without destroying it: it belongs to whoever made it."""
        self._group_of = self._reduce_group_of = _weakly(None)
        self._scratch = Scratch()

    def _lent(self, tensor: torch.Tensor) -> torch.Tensor:
        return unheld(tensor) if self._gloo_on_cpu and tensor.is_cpu else tensor

    def _is_local(self, tensor: torch.Tensor) -> bool:
        # Nothing to move: a group of one on CPU, or an empty bucket (the same on all ranks). A
        # group of one on a device still goes through the backend, which orders the streams.
        return tensor.numel() == 0 or (self.world == 1 and tensor.is_cpu)

    def _open_group(self, label: str) -> dist.ProcessGroup:
        group = self._group_of()
        if group is None:
            raise RuntimeError(
                f"{label}: expected an open communicator, got one that was closed, or whose "
                "process group was destroyed. Create a new ProcessGroupComm."
            )
        return group


def _weakly(group: dist.ProcessGroup | None) -> Callable[[], dist.ProcessGroup | None]:
    return (lambda: None) if group is None else weakref.ref(group)


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    # Sums of complex numbers are sums of their parts, and not every backend knows complex dtypes.
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _backend_of(group: dist.ProcessGroup, device: str) -> str:
    """Return the name of the backend that serves a device type in a group, or ""."""
    config = str(dist.get_backend_config(group))
    for part in config.split(","):
        kind, _, backend = part.rpartition(":")
        if kind in (device, ""):
            return backend
    return ""

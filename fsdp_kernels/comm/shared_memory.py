# SPDX-License-Identifier: Apache-2.0
"""Ranks of one host that share memory: gathers copy nothing, reductions read where peers wrote."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_kernels.comm._arena import Arena, PrivateView, error_of
from fsdp_kernels.comm._arena_setup import ArenaUnavailable
from fsdp_kernels.comm._checks import check_contiguous, check_op, check_reducible, check_shards
from fsdp_kernels.comm._grad_buckets import SLOTS, GradBuckets
from fsdp_kernels.comm.base import Comm, PlacedParams, ReduceName, Ticket
from fsdp_kernels.comm.process_group import ProcessGroupComm
from fsdp_kernels.streams import Streams

logger = logging.getLogger("fsdp_kernels")

_SMALL = 4096  # bytes that travel through the arena; what is larger takes the process group
_SUMMED = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})


class SharedMemoryComm:
    """A `Comm` of CPU ranks on one host, over memory that all of them have mapped.

    Full parameters lie in one place for all ranks, each shard where its owner writes it: a gather
    waits and copies nothing, and the host holds one copy of them instead of one for each rank.
    Each rank packs its gradients into a bucket of its own that all can read, and sums its shard
    from everybody's, in rank order, so that results are the same bits on every run.
    `docs/shared_memory.md` says who may write and read what, when.

    Small messages travel through the same memory; everything else over the process group.

    Args:
        group: The process group; `None` is the default one. All its ranks on one host.
        timeout_s: Seconds that one wait may take; `None` takes the group's limit.

    Raises:
        ArenaUnavailable: The ranks cannot share memory, or there is too little: use
            `ProcessGroupComm`. Every rank raises it.
        RuntimeError: `torch.distributed` is not initialised, or this rank is not in the group.
    """

    name = "shared_memory"
    symmetric = False

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        self._group = ProcessGroupComm(group)
        self.rank = self._group.rank
        self.world = self._group.world
        self._arena = Arena(group, timeout_s=timeout_s)
        self._closed = False
        self._grads: GradBuckets | None = None
        self._asked_grads = 0  # the largest bucket that was asked for, given or not

    @property
    def is_usable(self) -> bool:
        """Whether it is open and no rank has failed."""
        return not self._closed and self._arena.failure is None

    @property
    def grads_nbytes(self) -> int:
        """Bytes of this rank's gradient buckets; 0 before they are made."""
        return 0 if self._grads is None else SLOTS * self._grads.nbytes

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group that it was made over; see `Comm`."""
        return self._group.process_group

    # -- memory and order -------------------------------------------------------------------------

    @property
    def everyone(self) -> Comm:
        """This communicator itself; see `Comm`."""
        return self

    def streams(self, device: torch.device) -> Streams:
        """Return streams without roles: the host's order is the order; see `Comm`."""
        return self._group.streams(device)

    def allocate(self, nbytes: int, device: torch.device, *, collective: bool) -> Tensor:
        """Return private memory; see `Comm`."""
        return self._group.allocate(nbytes, device, collective=collective)

    def grouped(self) -> AbstractContextManager[object]:
        """Change nothing; see `Comm`."""
        return self._group.grouped()

    def place_params(self, nbytes: int, device: torch.device) -> PlacedParams | None:
        """Give one bucket's full parameters a place that all ranks share; see `Comm`."""
        self._check_open("fk.place")
        if device.type != "cpu" or self.world == 1 or nbytes == 0:
            return None
        return _Placed(self._arena, nbytes)

    def reserve(self, params_nbytes: Sequence[int], largest_grads: int) -> None:
        """Take the memory of buckets that are placed next, in one piece (collective).

        Args:
            params_nbytes: Of each bucket's full parameters.
            largest_grads: Bytes of the largest full gradient bucket. The memory for it must be
                there; it is taken when the first reduction comes, by the root of all units.

        Raises:
            ArenaUnavailable: There is too little; the message says how much is needed and there.
        """
        self._check_open("fk.place")
        if self.world > 1:
            params = sum(self._arena.param_nbytes(nbytes) for nbytes in params_nbytes if nbytes)
            spare = self._arena.grad_nbytes(largest_grads, SLOTS)
            self._arena.reserve(params, spare_nbytes=spare)

    def prepare_reductions(self, largest_bytes: int = 0) -> None:
        """Make gradient buckets of at least so many bytes; see `Comm`.

        Without the memory for them, reductions take the process group.
        """
        self._check_open("fk.reduce")
        if self.world > 1 and largest_bytes > self._asked_grads:
            self._asked_grads = largest_bytes
            try:
                self._arena.reserve(self._arena.grad_nbytes(largest_bytes, SLOTS))
                self._grads = GradBuckets(self._arena, largest_bytes)
            except ArenaUnavailable as error:
                if self.rank == 0:
                    logger.warning("fk.reduce: gradients take the process group: %s", error)
        if self._grads is None or self._grads.nbytes < self._asked_grads:
            self._group.prepare_reductions()

    def grads_buffer(self, numel: int, dtype: torch.dtype, *, label: str) -> Tensor | None:
        """Return this rank's bucket for the reduction that comes next; see `Comm`."""
        grads = self._grads
        if grads is None or dtype not in _SUMMED or not 0 < numel * dtype.itemsize <= grads.nbytes:
            return None
        return grads.begin(numel, dtype, label)

    # -- collectives ------------------------------------------------------------------------------

    def all_gather(self, full: Tensor, shard: Tensor, *, label: str) -> Ticket:
        """Fill a buffer that has no shared place; see `Comm`."""
        self._check_open(label)
        return self._group.all_gather(full, shard, label=label)

    def reduce_scatter(
        self, shard: Tensor, full: Tensor, *, label: str, lend: bool = False
    ) -> Ticket:
        """Fill `shard` with this rank's slot of the sum of every rank's `full`; see `Comm`."""
        check_shards(full, shard, self.world, label)
        check_reducible(full, "sum", label)
        self._check_open(label)
        buffer = self.grads_buffer(full.numel(), full.dtype, label=label) if full.is_cpu else None
        if buffer is None:
            return self._group.reduce_scatter(shard, full, label=label)
        if buffer.data_ptr() != full.data_ptr():
            buffer.copy_(full)
        assert self._grads is not None  # they gave the buffer
        return self._grads.post(shard, label)

    def all_reduce(self, tensor: Tensor, op: ReduceName = "sum", *, label: str) -> Ticket:
        """Replace `tensor` by its sum, maximum or minimum over the ranks; see `Comm`."""
        check_op(op, label)
        check_contiguous(tensor, label)
        check_reducible(tensor, op, label)
        self._check_open(label)
        if not tensor.is_cpu or tensor.nbytes > _SMALL or self.world == 1:
            return self._group.all_reduce(tensor, op, label=label)
        tensor.copy_(self._combined(tensor, op, "all_reduce", label))
        return _Done(label)

    def broadcast(self, tensor: Tensor, *, src: int = 0, label: str) -> Ticket:
        """Replace `tensor` by that of rank `src` of the group; see `Comm`."""
        self._check_open(label)
        return self._group.broadcast(tensor, src=src, label=label)

    def agree(self, words: Tensor, *, label: str) -> Tensor:
        """Return the maximum over the ranks of words that the host holds; see `Comm`."""
        self._check_open(label)
        if self.world == 1:
            return words.clone()
        return self._combined(words, "max", "agree", label)

    def barrier(self, label: str) -> None:
        """Return once every rank has called this."""
        self._check_open(label)
        self._combined(torch.zeros(1, dtype=torch.uint8), "max", "barrier", label)

    def close(self) -> None:
        """Let the group go; whoever waits for more from this rank gets an error."""
        if not self._closed:
            self._closed = True
            self._arena.close()
            self._group.close()

    def _combined(self, tensor: Tensor, op: str, operation: str, label: str) -> Tensor:
        """Return the sum, maximum or minimum over the ranks, in rank order on all of them."""
        try:
            rows = self._arena.exchange(tensor.detach(), label=label, operation=operation)
        except RuntimeError as error:
            raise error_of(error) from error
        combined = rows[0]
        for row in rows[1:]:
            combined = _COMBINE[op](combined, row)
        return combined

    def _check_open(self, label: str) -> None:
        if self._closed:
            raise RuntimeError(
                f"{label}: expected an open communicator, got one that was closed. "
                "Create a new SharedMemoryComm."
            )


_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


class _Done(Ticket):
    """A collective that was through when it was called."""

    __slots__ = ()

    def _finish(self) -> None:
        pass


class _Placed:
    """One bucket's full parameters; see `PlacedParams`.

    Attributes:
        full: uint8 [nbytes], copy on write: a mistaken write stays this rank's own.
        shard: uint8 [nbytes / world], what this rank publishes.
    """

    def __init__(self, arena: Arena, nbytes: int) -> None:
        self._area = area = arena.allocate(nbytes)
        self._view = area.private_view(0, nbytes)
        self._epochs = arena.param_epochs()
        self.full = self._view.tensor
        part = nbytes // arena.world
        self._start = arena.rank * part
        self.shard = area.tensor[self._start : self._start + part]

    def view_shard(self) -> PrivateView:
        """Show `shard` at another address; what is written there no peer sees."""
        return self._area.private_view(self._start, self.shard.numel())

    def gather(self, *, label: str) -> Ticket:
        """Say that this rank's shard is in place; the ticket waits for everybody's."""
        self._epochs.gather(label)
        return _Waiting(label, self._epochs.wait_ready)

    def wait_released(self, *, label: str) -> None:
        """Return once no rank reads the last gather any more."""
        try:
            self._epochs.wait_released(label)
        except RuntimeError as error:
            raise error_of(error) from error

    def release(self) -> None:
        """Say that this rank does not read the last gather any more."""
        self._epochs.release()

    def revert(self) -> bool:
        """Forget what this rank wrote into `full`; whether it wrote anything."""
        written = self._view.is_written()
        if written:
            self._view.revert()
        return written

    def leave(self) -> None:
        """Leave `full`, as it is, to whoever holds a view of it, and show the bytes anew."""
        self.full.data.copy_(self.full.clone())  # now every page is a copy; no version is counted
        self._view = self._area.private_view(0, self.full.numel())
        self.full = self._view.tensor


class _Waiting(Ticket):
    """A collective whose result is in place once a wait returns."""

    __slots__ = ("_wait",)

    def __init__(self, label: str, wait: Callable[[str], None]) -> None:
        super().__init__(label)
        self._wait: Callable[[str], None] | None = wait

    def _finish(self) -> None:
        wait, self._wait = self._wait, None
        assert wait is not None
        try:
            wait(self.label)
        except RuntimeError as error:
            raise error_of(error) from error

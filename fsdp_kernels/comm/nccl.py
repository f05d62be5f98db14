# SPDX-License-Identifier: Apache-2.0
"""Collectives over NCCL communicators and streams of our own, for CUDA on one host or many."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from fsdp_kernels import trace
from fsdp_kernels.comm._checks import (
    check_contiguous,
    check_op,
    check_reducible,
    check_shards,
    check_src,
)
from fsdp_kernels.comm._nccl_end import close, end_with, log_messages
from fsdp_kernels.comm._nccl_memory import NcclMemory
from fsdp_kernels.comm._nccl_setup import Meeting, NcclOptions
from fsdp_kernels.comm._nccl_ticket import NcclTicket
from fsdp_kernels.comm.base import Comm, PlacedParams, ReduceName, Ticket, collective_error
from fsdp_kernels.streams import Streams

if TYPE_CHECKING:
    from fsdp_kernels.comm._groups import Hosts

_DEFAULT_OPTIONS = NcclOptions()

# NCCL's name of each dtype, and how many of its elements one of ours is: sums of complex numbers
# are sums of their parts.
_DTYPES: dict[torch.dtype, tuple[str, int]] = {
    torch.float32: ("float32", 1),
    torch.bfloat16: ("bfloat16", 1),
    torch.float16: ("float16", 1),
    torch.float64: ("float64", 1),
    torch.complex64: ("float32", 2),
    torch.complex128: ("float64", 2),
    torch.int32: ("int32", 1),
    torch.int64: ("int64", 1),
    torch.uint8: ("uint8", 1),
    torch.int8: ("int8", 1),
}


class NcclComm:
    """A `Comm` over NCCL: gathers and reductions each on a communicator and a stream of their own.

    Every collective waits for what the current stream has when it is issued, and runs beside what
    comes after; `Ticket.wait` makes the current stream wait for it. A watchdog thread notices a
    collective that fails or outlasts the time limit, aborts, and from then on every call raises the
    first error. What the hosts must agree on (`agree`, `barrier`) travels over gloo connections of
    their own, so that it does not wait for the device.

    Making one is collective, and every rank makes its communicators in the same order.

    Args:
        group: The process group whose ranks take part; `None` is the default one. Its store is
            where the ranks meet; no collective runs on it.
        device: The CUDA device of this rank's tensors; `None` is the current one.
        options: The same on every rank.
        module: The compiled module; tests pass a simulation.

    Attributes:
        device: Where every tensor must be.
        timeout_s: Seconds that a collective may take.

    Raises:
        RuntimeError: No process group, or one without this rank; no CUDA device; the module was not
            built; the other ranks did not come. The message says which.
        ValueError: The options differ from rank 0's.
    """

    name = "nccl"

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        options: NcclOptions = _DEFAULT_OPTIONS,
        module: Any = None,
    ) -> None:
        self._meeting = meeting = Meeting(group, device, options, module)
        known = group if group is not None else dist.group.WORLD
        assert known is not None  # it has been met in
        self._known = weakref.ref(known)  # communicators are kept for as long as their group lives
        self.device = meeting.device
        self.rank = meeting.rank
        self.world = meeting.world
        self.timeout_s = meeting.timeout_s
        native = self._native = meeting.connect()
        self.current_stream: Callable[[], int] = meeting.side.current_stream(self.device)
        self._streams = meeting.side.streams(native, self.device)
        self._in_group: list[NcclTicket] | None = None
        self._hosts: Hosts | None = None
        try:
            self._hosts = meeting.join_hosts(lambda: native.failure)
            self._memory = NcclMemory(meeting, native, options.registration, self._largest)
        except BaseException as error:
            native.abort(f"it could not be made ({error})")  # the others must not wait for it
            native.close()
            raise
        self.symmetric = self._memory.symmetric
        end_with(self, native, self._hosts)

    def _largest(self, mine: float) -> float:
        words = torch.tensor([mine], dtype=torch.float64)
        return self.agree(words, label="NcclComm").item()

    # -- memory, streams, order -------------------------------------------------------------------

    @property
    def everyone(self) -> Comm:
        """This communicator itself; see `Comm`."""
        return self

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._native is None

    @property
    def failure(self) -> str | None:
        """The first error of the communicator, which every later call raises, or None."""
        failure: str | None = None if self._native is None else self._native.failure
        return failure

    def streams(self, device: torch.device) -> Streams:
        """Return the streams that the collectives run on."""
        return self._streams

    def allocate(self, nbytes: int, device: torch.device, *, collective: bool) -> torch.Tensor:
        """Return memory that NCCL has registered, where it can; see `Comm`."""
        self._open("allocate", device)
        return self._memory.allocate(nbytes, collective=collective)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The one that the ranks met in; see `Comm`."""
        return None if self._native is None else self._known()

    def place_params(self, nbytes: int, device: torch.device) -> PlacedParams | None:
        """Nothing is shared; see `Comm`."""
        return None

    def grads_buffer(self, numel: int, dtype: torch.dtype, *, label: str) -> torch.Tensor | None:
        """Any memory does; see `Comm`."""
        return None

    def prepare_reductions(self, largest_bytes: int = 0) -> None:
        """Make the communicator that reduce-scatters run on from now on; see `Comm`."""
        native = self._native
        if native is None or native.has_reductions:
            return
        self._meeting.open_reductions(native)
        log_messages(self._native)

    @contextmanager
    def grouped(self) -> Iterator[None]:
        """Collect collectives and issue them as one NCCL group for each communicator."""
        native = self._open("grouped", self.device)
        native.begin_group()
        tickets = self._in_group = []
        try:
            yield
        except BaseException:
            native.cancel_group()
            for ticket in tickets:
                ticket.cancel()
            raise
        finally:
            self._in_group = None
        stream = self.current_stream()
        try:
            native.end_group(stream)
        except RuntimeError:
            for ticket in tickets:
                ticket.cancel()
            raise
        if trace.recording():
            self._log_issued(stream, tickets)

    # -- collectives ------------------------------------------------------------------------------

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, *, label: str) -> Ticket:
        """Fill `full` with every rank's `shard`, in rank order; see `Comm`."""
        check_shards(full, shard, self.world, label)
        what = full.data_ptr(), shard.data_ptr(), shard.nbytes
        return self._issue("all_gather", label, (full, shard), *what)

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, *, label: str, lend: bool = False
    ) -> Ticket:
        """Fill `shard` with this rank's slot of the sum of every rank's `full`; see `Comm`."""
        check_shards(full, shard, self.world, label)
        check_reducible(full, "sum", label)
        dtype, parts = _DTYPES[full.dtype]
        what = shard.data_ptr(), full.data_ptr(), shard.numel() * parts, dtype
        ticket = self._issue("reduce_scatter", label, (shard, full), *what)
        increment_version(shard)
        return ticket

    def all_reduce(self, tensor: torch.Tensor, op: ReduceName = "sum", *, label: str) -> Ticket:
        """Replace `tensor` by its sum, maximum or minimum over the ranks; see `Comm`."""
        check_op(op, label)
        check_contiguous(tensor, label)
        check_reducible(tensor, op, label)
        dtype, parts = _DTYPES[tensor.dtype]
        what = tensor.data_ptr(), tensor.numel() * parts, dtype, op
        ticket = self._issue("all_reduce", label, (tensor,), *what)
        increment_version(tensor)
        return ticket

    def broadcast(self, tensor: torch.Tensor, *, src: int = 0, label: str) -> Ticket:
        """Replace `tensor` by that of rank `src` of the group; see `Comm`."""
        check_src(src, self.world, label)
        check_contiguous(tensor, label)
        what = tensor.data_ptr(), tensor.nbytes, src
        ticket = self._issue("broadcast", label, (tensor,), *what)
        increment_version(tensor)
        return ticket

    def _issue(
        self, operation: str, label: str, tensors: tuple[torch.Tensor, ...], *what: int | str
    ) -> Ticket:
        """Call the module's collective; `tensors` live until its ticket was waited on."""
        module = self._open(label, tensors[0].device)
        stream = self.current_stream()
        try:
            native = getattr(module, operation)(label, *what, stream)
        except RuntimeError as error:
            raise self.failed(operation, label, error) from error
        ticket = NcclTicket(self, operation, native, tensors, stream)
        if self._in_group is not None:
            self._in_group.append(ticket)
        elif trace.recording():
            self._log_issued(stream, [ticket])
        return ticket

    def agree(self, words: torch.Tensor, *, label: str) -> torch.Tensor:
        """Return the maximum over the ranks of words that the host holds; see `Comm`."""
        self._check_healthy("agree", label)
        agreed = words.clone()
        if self._hosts is not None and agreed.numel():
            with self._naming("agree", label):
                self._hosts.largest(agreed)
        return agreed

    def barrier(self, label: str) -> None:
        """Return once every rank has called this; what is queued on the device may still run."""
        self._check_healthy("barrier", label)
        if self._hosts is not None:
            with self._naming("barrier", label):
                self._hosts.barrier()

    @contextmanager
    def _naming(self, operation: str, label: str) -> Iterator[None]:
        """Turn what the hosts' channel raises into an error of this call, or the first one."""
        try:
            yield
        except RuntimeError as error:
            failure = self.failure
            if failure is not None:
                raise self.failed(operation, label, RuntimeError(failure)) from error
            raise collective_error(operation, label, self, error) from error

    # -- the end ----------------------------------------------------------------------------------

    def abort(self, why: str) -> None:
        """Stop what is under way on this rank, without waiting; every later call raises.

        Args:
            why: What the errors of later calls say.
        """
        if self._native is not None:
            self._native.abort(why)

    def close(self) -> None:
        """Finish what is under way, then let communicators, streams and the watchdog go."""
        native, self._native = self._native, None
        if native is not None:
            self._streams.close()
            close(self)
            self._hosts = None

    # -- inside -----------------------------------------------------------------------------------

    def _log_issued(self, stream: int, tickets: list[NcclTicket]) -> None:
        """Log what was issued together; what had nothing to move was not enqueued."""
        roles = {self._native.gather_stream: "gather", self._native.reduce_stream: "reduce"}
        issued = [
            trace.Issued(t.label, roles[t.native.stream], t.native.started_id, t.native.event_id)
            for t in tickets
            if t.native.event_id
        ]
        if issued:
            trace.collectives(trace.compute_stream(stream), issued)

    def _open(self, label: str, device: torch.device) -> Any:
        native = self._native
        if native is None:
            self._refuse_closed(label)
        if device != self.device:
            raise ValueError(
                f"{label}: expected tensors on {self.device}, got {device}. Make the NcclComm with "
                "the device that the model is on, one device for each rank."
            )
        return native

    def _check_healthy(self, operation: str, label: str) -> None:
        if self._native is None:
            self._refuse_closed(label)
        failure = self._native.failure
        if failure is not None:
            raise self.failed(operation, label, RuntimeError(failure))

    def _refuse_closed(self, label: str) -> NoReturn:
        raise RuntimeError(
            f"{label}: expected an open communicator, got one that was closed. "
            "Create a new NcclComm."
        )

    def failed(self, operation: str, label: str, error: RuntimeError) -> RuntimeError:
        """The error to raise: the module's own, or this call's where an earlier one had failed."""
        text = str(error)
        if text != self.failure or text.startswith(f"{label}: "):
            return RuntimeError(text)
        return RuntimeError(
            f"{label}: expected {operation} to complete on all {self.world} ranks (nccl), got on "
            f"rank {self.rank} an earlier failure: {text}"
        )

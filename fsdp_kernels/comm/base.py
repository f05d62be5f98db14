# SPDX-License-Identifier: Apache-2.0
"""What every communication backend offers: the `Comm` protocol and its tickets."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from fsdp_kernels import trace
from fsdp_kernels.streams import Streams
from triton_ops._fragments import FragmentTable

ReduceName = Literal["sum", "max", "min"]


class Ticket(ABC):
    """A collective under way. It must be waited on, and keeps its tensors alive until then.

    Attributes:
        label: What the collective is for, such as `fk.gather[layers.3/0]`.
    """

    __slots__ = ("_pending", "label")

    def __init__(self, label: str) -> None:
        self.label = label
        self._pending = True
        if trace.recorders and not isinstance(self, DoneTicket):
            trace.moment("issue", label)

    def wait(self) -> None:
        """Make the current stream wait for the collective (on CPU: block); then let its tensors go.

        Waiting again does nothing.

        Raises:
            RuntimeError: The collective failed; the message names label, operation and rank.
        """
        if self._pending:
            self._pending = False  # before the wait: a failed one must not also warn
            self._finish()
            if trace.recorders:
                trace.moment("done", self.label)

    def peers(self) -> Sequence[torch.Tensor] | None:
        """Of a reduction, this rank's part of every rank's buffer instead of their sum.

        For whoever sums them in a kernel that does more, on the current stream. They may be read
        until `wait`, or until the next reduction, before which the caller waits. The wait then sums
        nothing: the target stays as it is.

        Returns:
            1-D [shard_numel] each, in rank order; or None: only `wait` gives the sum.
        """
        return None

    def wait_measured(self, table: FragmentTable) -> torch.Tensor | None:
        """`wait` for a reduction; return what `ops.norm` would say of its target, where it is free.

        Args:
            table: The fragments whose elements count.

        Returns:
            float64 [2]: squared norm, number of non-finite elements; or None: not measured.
        """
        self.wait()
        return None

    @abstractmethod
    def _finish(self) -> None:
        """Wait once and drop every tensor reference, also on failure."""

    def __del__(self) -> None:
        if getattr(self, "_pending", False):
            warnings.warn(
                f"{self.label}: expected every ticket to be waited on, got one dropped unwaited. "
                "Its tensors may still be in use: keep the ticket and call wait().",
                ResourceWarning,
                stacklevel=2,
            )


class DoneTicket(Ticket):
    """A collective that needed no other rank, or was through when it was called."""

    __slots__ = ()

    def _finish(self) -> None:
        pass


class CopyOnWrite(Protocol):
    """Shared bytes, with what this rank writes to them kept to itself.

    Attributes:
        tensor: uint8 [nbytes]; always at the same address.
    """

    tensor: torch.Tensor

    def revert(self) -> None:
        """Forget what was written: the shared bytes show again."""
        ...

    def is_written(self) -> bool:
        """Whether anything was written since `revert`."""
        ...


class PlacedParams(Protocol):
    """The full parameters of one bucket, in memory that all ranks share.

    Attributes:
        full: uint8 [nbytes], to be read between a gather's wait and `release`. What is written to
            it stays this rank's own, and hides what others write, until `revert`.
        shard: uint8 [nbytes / world]: this rank's place, which the others read. To be written after
            `wait_released`, before the next gather.
    """

    full: torch.Tensor
    shard: torch.Tensor

    def view_shard(self) -> CopyOnWrite:
        """Show `shard` at another address, where this rank may write without a peer's seeing it."""
        ...

    def gather(self, *, label: str) -> Ticket:
        """Publish this rank's shard; the ticket waits for everybody's."""
        ...

    def wait_released(self, *, label: str) -> None:
        """Return once no rank reads what the last gather published."""
        ...

    def release(self) -> None:
        """Say that this rank reads it no more; again does nothing."""
        ...

    def revert(self) -> bool:
        """Forget what was written to `full`; whether anything was."""
        ...

    def leave(self) -> None:
        """Leave `full`, as it is now, to whoever holds views of it, and become another one.

        For a rank that still reads it: before `release`.
        """
        ...


@runtime_checkable
class Comm(Protocol):
    """A group of ranks that move flat buffers.

    Every rank calls the same operations in the same order. All tensors are plain and contiguous;
    `full` and `shard` are 1-D with `full.numel() == world * shard.numel()`. Collectives start after
    the work already queued on the current stream. Labels appear in errors.

    Attributes:
        name: The backend's name, such as "process_group".
        rank: This rank within the group.
        world: Number of ranks in the group.
        symmetric: Whether peers address one another's full buffers, so that a gather must fill the
            same pool slot on every rank.
        everyone: All ranks that train the model, which gradients are the mean over: itself, unless
            these ranks share one of several replicas.
        process_group: A process group of the same ranks, for what torch sends by itself, such as
            distributed checkpoints; None after `close`.
    """

    name: str
    rank: int
    world: int
    symmetric: bool

    @property
    def everyone(self) -> Comm:
        """See the class."""
        ...

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """See the class."""
        ...

    def streams(self, device: torch.device) -> Streams:
        """Return the streams that the collectives on a device's tensors run on."""
        ...

    def allocate(self, nbytes: int, device: torch.device, *, collective: bool) -> torch.Tensor:
        """Return uint8 [nbytes], undefined content, for full parameters or full gradients.

        Args:
            nbytes: Number of bytes.
            device: Where.
            collective: Whether every rank allocates the same at this point of its program.
        """
        ...

    def place_params(self, nbytes: int, device: torch.device) -> PlacedParams | None:
        """Give one bucket's full parameters a place that all ranks share (collective).

        Returns:
            The place; or None: gathers then fill buffers of the caller's.
        """
        ...

    def grads_buffer(self, numel: int, dtype: torch.dtype, *, label: str) -> torch.Tensor | None:
        """Return memory for the full gradients that are reduced next, undefined content.

        The next `reduce_scatter` may be given it, and then sends no copy. It must be the next: all
        ranks ask for it at the same point of their sequence of reductions.

        Returns:
            1-D [numel]; or None: any memory does.
        """
        ...

    def grouped(self) -> AbstractContextManager[object]:
        """Return a context in which gathers and reductions are collected and issued together.

        They start when it is left, after the work queued on the current stream by then; tickets
        may be waited on afterwards. An exception inside drops all of them.
        """
        ...

    def prepare_reductions(self, largest_bytes: int = 0) -> None:
        """Give reduce-scatters an order of their own from now on (collective; again does nothing).

        Ranks that finish units in different orders issue gathers and reductions in different
        sequences; in one order the two would be paired with one another. A root calls this before
        its first reduction.

        Args:
            largest_bytes: Of the largest full gradient bucket; the same on every rank.
        """
        ...

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, *, label: str) -> Ticket:
        """Fill `full` with every rank's `shard`, in rank order.

        Moves bytes, so any dtype and any NaN arrives unchanged. `shard` may be `full`'s own slot.
        `full`'s version counter stays: whoever refills a buffer that autograd saved must know why.
        """
        ...

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, *, label: str, lend: bool = False
    ) -> Ticket:
        """Fill `shard` with this rank's slot of the sum of every rank's `full`.

        Only sums: averages round differently by path, so factors belong to whoever reads the sum.

        Args:
            shard: 1-D [full.numel() / world].
            full: 1-D; it may lie in what `grads_buffer` gave.
            label: See the class.
            lend: The ticket will be asked for `peers`, so the sum need not begin before `wait`.
                Ranks may differ in it.
        """
        ...

    def all_reduce(self, tensor: torch.Tensor, op: ReduceName = "sum", *, label: str) -> Ticket:
        """Replace `tensor`, of any shape, by its sum, maximum or minimum over the ranks."""
        ...

    def broadcast(self, tensor: torch.Tensor, *, src: int = 0, label: str) -> Ticket:
        """Replace `tensor`, of any shape and dtype, by that of rank `src` of the group."""
        ...

    def agree(self, words: torch.Tensor, *, label: str) -> torch.Tensor:
        """Return the maximum over the ranks of float64 `words` that the host holds, to the host.

        Waits for the other ranks' hosts; for the device only where no channel joins the hosts.
        """
        ...

    def barrier(self, label: str) -> None:
        """Return once every rank has called this."""
        ...

    def close(self) -> None:
        """Let the group go. Closing again does nothing; any other call then raises."""
        ...


def collective_error(operation: str, label: str, comm: Comm, error: BaseException) -> RuntimeError:
    """Return the error of a collective that failed, to be raised `from` the backend's own.

    Args:
        operation: The collective's name, such as "all_gather".
        label: What it was for.
        comm: The backend, for rank and world.
        error: What the backend raised.
    """
    return RuntimeError(
        f"{label}: expected {operation} to complete on all {comm.world} ranks ({comm.name}), "
        f"got on rank {comm.rank}: {error}. If a peer closed its connection or a time limit "
        "passed, another rank died or fell out of step: read the first error of the other ranks."
    )

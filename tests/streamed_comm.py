# SPDX-License-Identifier: Apache-2.0
"""Streams without a device: a stand-in for `torch.cuda`, and a `Comm` with streams of its own.

The data moves at once, on the host. What streams, events and waits there are goes into the log of
whoever records, so that the happens-before checker sees what a device would be free to reorder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes as _unwatched

from fsdp_kernels import trace
from fsdp_kernels.comm.base import Comm, PlacedParams, ReduceName, Ticket
from fsdp_kernels.streams import CudaStreams, Streams


class Stream:
    """A stream of `Cuda`, told apart by its handle."""

    def __init__(self, cuda: Cuda, handle: int) -> None:
        self.cuda = cuda
        self.cuda_stream = handle

    def wait_event(self, event: Event) -> None:
        assert event.stream is not None, "waits for an event that was never recorded"


class Event:
    """An event of `Cuda`."""

    def __init__(self) -> None:
        self.stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.stream = stream


class Cuda:
    """As much of `torch.cuda` as the streams use, and streams that a test switches between."""

    Event = Event

    def __init__(self) -> None:
        self.current = self.ambient = Stream(self, 1)
        self._made = 1
        self.leaf_streams: dict[int, Stream] = {}

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self.current

    def stream(self) -> Stream:
        """Make another compute stream."""
        self._made += 1
        return Stream(self, self._made)

    def go(self, stream: Stream, source: Stream) -> None:
        """Make a stream the current one, after what another one has queued."""
        self.follow(stream, source)
        self.current = stream

    def follow(self, stream: Stream, other: Stream) -> None:
        """What `stream.wait_stream(other)` does."""
        if stream is not other:
            self.wait(stream, self.mark(other))

    def mark(self, stream: Stream) -> int:
        """Record an event; its number in the log."""
        event = trace.new_event()
        if trace.recording():
            trace.recorded(trace.compute_stream(stream.cuda_stream), event)
        return event

    def wait(self, stream: Stream, event: int) -> None:
        """What `stream.wait_event(event)` does."""
        if trace.recording():
            trace.waited(trace.compute_stream(stream.cuda_stream), event)

    def note_leaf(self, _: Tensor) -> None:
        """Note that the current stream has brought a leaf its gradient."""
        self.leaf_streams[self.current.cuda_stream] = self.current

    def rest(self) -> None:
        """Do what autograd does at the end of a backward, before it calls what was queued.

        Its caller's stream waits for those on which leaves have got gradients, and for no others.
        """
        self.current = self.ambient
        for stream in self.leaf_streams.values():
            self.follow(self.ambient, stream)
        self.leaf_streams.clear()


class _Hop(torch.autograd.Function):
    """Goes on on another stream, forward and, the other way round, backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cuda: Cuda, to: Stream, source: Stream) -> Tensor:
        ctx.cuda, ctx.to, ctx.source = cuda, to, source
        cuda.go(to, source)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.cuda.go(ctx.source, ctx.to)
        return grad, None, None, None


def hop(x: Tensor, cuda: Cuda, to: Stream, source: Stream | None = None) -> Tensor:
    """Let what comes after `x`, which was made on `source`, run on another stream.

    Its backward too: autograd runs an operation's backward on the stream of its forward, after what
    the stream that the gradient comes from has queued.
    """
    source = source or cuda.current
    hopped: Tensor = _Hop.apply(x, cuda, to, source)  # type: ignore[no-untyped-call]
    return hopped


class _Join(torch.autograd.Function):
    """Goes on on one stream after several; backward begins all of them at this point."""

    @staticmethod
    def forward(ctx: Any, shared: list[int], cuda: Cuda, home: Stream, *branches: Any) -> Any:
        ctx.shared, ctx.cuda, ctx.home = shared, cuda, home
        tensors, streams = branches[::2], branches[1::2]
        for stream in streams:
            cuda.follow(home, stream)
        cuda.current = home
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.shared[:] = [ctx.cuda.mark(ctx.home)]
        return None, None, None, *(part for grad in grads for part in (grad, None))


class _Branch(torch.autograd.Function):
    """The end of a branch: its backward waits for where `_Join` was, and for nothing later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shared: list[int], cuda: Cuda, stream: Stream) -> Tensor:
        ctx.shared, ctx.cuda, ctx.stream = shared, cuda, stream
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.cuda.wait(ctx.stream, *ctx.shared)
        ctx.cuda.current = ctx.stream
        return grad, None, None, None


def join(made: Sequence[tuple[Tensor, Stream]], cuda: Cuda, home: Stream) -> tuple[Tensor, ...]:
    """Let what was made on several streams go on on one; backward runs them side by side."""
    shared: list[int] = []
    apply: Any = _Branch.apply  # type: ignore[no-untyped-call]
    ends = [(apply(x, shared, cuda, stream), stream) for x, stream in made]
    joined: Any = _Join.apply(shared, cuda, home, *(part for end in ends for part in end))  # type: ignore[no-untyped-call]
    return joined  # type: ignore[no-any-return]


class _Start(torch.autograd.Function):
    """Stands after the loss: backward begins on the stream that the loss was made on."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, cuda: Cuda) -> Tensor:
        ctx.cuda, ctx.stream = cuda, cuda.current
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        torch.autograd.Variable._execution_engine.queue_callback(ctx.cuda.rest)
        ctx.cuda.go(ctx.stream, ctx.cuda.current)
        return grad, None


def backward(loss: Tensor, cuda: Cuda) -> None:
    """Run backward as autograd does with streams: it ends on the caller's, after all others."""
    start: Tensor = _Start.apply(loss, cuda)  # type: ignore[no-untyped-call]
    start.backward()  # type: ignore[no-untyped-call]


class StreamedComm:
    """A `Comm` that runs on streams of its own, over one that moves the data.

    Args:
        inner: Moves the data.
        cuda: Where the current stream is.
    """

    name = "streamed"
    symmetric = False

    @property
    def everyone(self) -> Comm:
        return self

    def __init__(self, inner: Comm, cuda: Cuda) -> None:
        self._inner = inner
        self.cuda = cuda
        self.rank, self.world = inner.rank, inner.world
        self._events = iter(range(1, 1 << 40))
        self._reduces = "gather"  # until it has a stream of its own
        self._group: list[tuple[StreamedTicket, str]] | None = None

    def streams(self, device: torch.device) -> Streams:
        return CudaStreams(Stream(self.cuda, 1001), Stream(self.cuda, 1002), self.cuda)

    def allocate(self, nbytes: int, device: torch.device, *, collective: bool) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    @contextmanager
    def _grouped(self) -> Iterator[None]:
        self._group = []
        try:
            yield
            group = self._group
        finally:
            self._group = None
        self._issue(group)

    def grouped(self) -> AbstractContextManager[object]:
        return self._grouped()

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        return self._inner.process_group

    def place_params(self, nbytes: int, device: torch.device) -> PlacedParams | None:
        return None

    def grads_buffer(self, numel: int, dtype: torch.dtype, *, label: str) -> Tensor | None:
        return None

    def prepare_reductions(self, largest_bytes: int = 0) -> None:
        self._inner.prepare_reductions(largest_bytes)
        self._reduces = "reduce"

    def all_gather(self, full: Tensor, shard: Tensor, *, label: str) -> Ticket:
        with _unwatched():
            inner = self._inner.all_gather(full, shard, label=label)
        return self._add("gather", inner)

    def reduce_scatter(
        self, shard: Tensor, full: Tensor, *, label: str, lend: bool = False
    ) -> Ticket:
        with _unwatched():
            inner = self._inner.reduce_scatter(shard, full, label=label)
        return self._add(self._reduces, inner)

    def all_reduce(self, tensor: Tensor, op: ReduceName = "sum", *, label: str) -> Ticket:
        with _unwatched():
            inner = self._inner.all_reduce(tensor, op, label=label)
        return self._add("gather", inner)

    def broadcast(self, tensor: Tensor, *, src: int = 0, label: str) -> Ticket:
        with _unwatched():
            inner = self._inner.broadcast(tensor, src=src, label=label)
        return self._add("gather", inner)

    def agree(self, words: Tensor, *, label: str) -> Tensor:
        return self._inner.agree(words, label=label)

    def barrier(self, label: str) -> None:
        self._inner.barrier(label)

    def close(self) -> None:
        self._inner.close()

    def _add(self, stream: str, inner: Ticket) -> Ticket:
        ticket = StreamedTicket(self, inner)
        if self._group is None:
            self._issue([(ticket, stream)])
        else:
            self._group.append((ticket, stream))
        return ticket

    def _issue(self, group: list[tuple[StreamedTicket, str]]) -> None:
        started = next(self._events)
        ends = {stream: next(self._events) for _, stream in group}
        for ticket, stream in group:
            ticket.event = ends[stream]
        if trace.recording() and group:
            issued = [trace.Issued(t.label, s, started, t.event) for t, s in group]
            trace.collectives(self.current(), issued)

    def current(self) -> str:
        return trace.compute_stream(self.cuda.current.cuda_stream)


class StreamedTicket(Ticket):
    """A collective of a `StreamedComm`."""

    __slots__ = ("_comm", "_inner", "event")

    def __init__(self, comm: StreamedComm, inner: Ticket) -> None:
        super().__init__(inner.label)
        self._comm = comm
        self._inner = inner
        self.event = 0

    def _finish(self) -> None:
        with _unwatched():
            self._inner.wait()
        if trace.recording():
            trace.waited(self._comm.current(), self.event)

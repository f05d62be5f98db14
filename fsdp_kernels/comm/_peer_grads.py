# SPDX-License-Identifier: Apache-2.0
"""Gradient slots that all ranks address, and the reductions that read them.

Each rank has two slots. Reduction number n uses slot n mod 2 on every rank, since all ranks reduce
in one order. On the device, of each rank:

    compute stream   wait consumed(n - 2) · pack into the own slot · posted(n)
    reduce stream    wait posted(n) · barrier POSTED · sum all ranks' parts · done(n)
                     · barrier CONSUMED · consumed(n)
    compute stream   wait done(n), in the ticket's wait

The first barrier: all ranks have packed. The second: all have read, so that each may pack into the
slot again. Both run on the reduce stream, which no gather waits for, and each has a channel of its
own in the region's signal pad. The host queues all that and waits for nothing.

A caller that wants to read the slots itself has the sum put off (`lend`). Then:

    reduce stream    wait posted(n) · barrier POSTED · ready(n)
    compute stream   wait ready(n), in the ticket's peers · the caller's kernel · done(n)
    reduce stream    wait done(n), in the ticket's wait · barrier CONSUMED · consumed(n)

One that waits without having asked for the peers gets the sum, which is then queued there.

*The order of barriers* on the reduce stream must be one on all ranks, though they may wait for a
ticket at different points, and differ in what they put off. It follows from the order of reductions
alone: the slot of number n is given back (barrier CONSUMED) before number n + 1 is posted; inside a
group, whose reductions are posted one after the other, only before its slot is needed, or after the
last of them. Where the rule asks for it, what was put off is summed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fsdp_kernels import trace
from fsdp_kernels.comm._peer_log import LoggedReduction
from fsdp_kernels.comm._peer_setup import Region, Side
from fsdp_kernels.comm._peer_ticket import PeerTicket, Reduction
from fsdp_kernels.comm.base import Ticket

SLOTS = 2
POSTED, CONSUMED = 0, 1  # channels of the barriers
_ALIGN = 128  # bytes: where a slot begins
_SWITCHED = frozenset({torch.float32, torch.bfloat16, torch.float16})  # that switches can sum
_WORD = 16  # bytes that they sum at a time


class Owner(Protocol):
    """The communicator that the slots belong to.

    Attributes:
        rank, world, timeout_s: See `PeerMemory`.
        device: Where every tensor is.
    """

    rank: int
    world: int
    timeout_s: float
    device: torch.device

    def failed(self, label: str, error: RuntimeError) -> RuntimeError:
        """Return the error to raise for what the device said."""
        ...


def slot_nbytes(nbytes: int) -> int:
    """Round up to where the next slot may begin."""
    return -(-nbytes // _ALIGN) * _ALIGN


class PeerGrads:
    """Every rank's gradient slots, and the reductions under way.

    Args:
        owner: For ranks, time limits and errors.
        side: Streams, events and the kernel.
        region: `SLOTS` slots of `nbytes` on every rank.
        nbytes: Of a slot.
        stream: The stream of reductions.
        multicast: Let switches sum where they can, in an order of their own.
    """

    def __init__(
        self,
        owner: Owner,
        side: Side,
        region: Region,
        nbytes: int,
        stream: Any,
        *,
        multicast: bool = False,
    ) -> None:
        self.nbytes = nbytes
        self._owner = owner
        self._side = side
        self._region = region
        self._stream = stream
        self._multicast = region.multicast if multicast else 0
        self._timeout_ms = int(owner.timeout_s * 1000)
        self._next = 0  # number of the next reduction
        self._consumed: list[tuple[Any, int] | None] = [None] * SLOTS
        self._views: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}
        self._under_way: deque[Reduction] = deque()  # not seen to be done, oldest first
        self._held: deque[Reduction] = deque()  # their slots are not given back, oldest first
        self._group: int | None = None  # number of its first reduction, while one is open

    @property
    def sums_in_switches(self) -> bool:
        """Whether switches sum what they can."""
        return self._multicast != 0

    def begin(self, numel: int, dtype: torch.dtype, label: str) -> Tensor:
        """Return this rank's slot of the next reduction; again before `post`: the same."""
        slot = self._next % SLOTS
        try:
            current = self._side.cuda.current_stream(self._owner.device)
            if self._group is None or self._group == self._next:
                self.give_back_all(current)
            elif len(self._held) == SLOTS:
                self._give_back(self._held[0], current)
            consumed = self._consumed[slot]
            if consumed is not None:
                current.wait_event(consumed[0])
        except RuntimeError as error:
            raise self._owner.failed(label, error) from error
        if trace.recording() and consumed is not None and consumed[1]:
            trace.waited(trace.compute_stream(current.cuda_stream), consumed[1])
        return self._region.part(self._owner.rank, slot * self.nbytes, numel, dtype)

    def post(self, shard: Tensor, label: str, *, lend: bool = False) -> Ticket:
        """Queue the sum, over all ranks' slots, of this rank's part.

        Args:
            shard: Where it goes.
            label: What it is for.
            lend: Put it off: the ticket is asked for the peers. Not where switches sum, whose order
                of addition is another one.
        """
        cuda, stream = self._side.cuda, self._stream
        try:
            self._forget_done()
            current = cuda.current_stream(self._owner.device)
            reduction = self._reduction(shard, label, current)
            posted = cuda.Event()
            posted.record(current)
            stream.wait_event(posted)
            with cuda.stream(stream):
                self._region.barrier(POSTED, self._timeout_ms)
            put_off = lend and not reduction.multicast
            if put_off:
                reduction.ready = cuda.Event()
                reduction.ready.record(stream)
            if trace.recording():
                compute = trace.compute_stream(current.cuda_stream)
                slot = reduction.slot
                reduction.logged = LoggedReduction.post(label, slot, compute, ready=put_off)
            if not put_off:
                self._sum(reduction)
            self._next += 1
            self._under_way.append(reduction)
            self._held.append(reduction)
            if self._group is None:
                self._give_back_read()
        except RuntimeError as error:
            raise self._owner.failed(label, error) from error
        return PeerTicket(label, self, reduction)

    @contextmanager
    def grouped(self) -> Iterator[None]:
        """Give back the slots of the reductions inside after the last of them."""
        self._group = self._next
        try:
            yield
        finally:
            self._group = None
            try:
                self._give_back_read()
            except RuntimeError as error:
                raise self._owner.failed(self._held[0].label, error) from error

    def give_back_all(self, current: Any) -> None:
        """Let all ranks pack into every slot again; sum first what nobody has read."""
        if self._held:
            self._give_back(self._held[-1], current)

    def lend(self, reduction: Reduction) -> list[Tensor] | None:
        """Return the parts, to be read on the current stream until `finish`; or None."""
        if reduction.done is not None:
            return None
        if not reduction.lent:
            current = self._side.cuda.current_stream(self._owner.device)
            try:
                current.wait_event(reduction.ready)
            except RuntimeError as error:
                raise self._owner.failed(reduction.label, error) from error
            reduction.lent = True
            if trace.recording() and reduction.logged is not None:
                reduction.logged.lend(trace.compute_stream(current.cuda_stream))
        return reduction.parts

    def finish(self, reduction: Reduction, stream: Any = None) -> None:
        """Make a stream wait for the sum; or take back what was lent, which it has read.

        Args:
            reduction: What was posted.
            stream: None: the current one.
        """
        try:
            if stream is None:
                stream = self._side.cuda.current_stream(self._owner.device)
            if reduction.done is None:
                self._give_back(reduction, stream)
            if not reduction.lent:
                stream.wait_event(reduction.done)
        except RuntimeError as error:
            raise self._owner.failed(reduction.label, error) from error
        finally:
            reduction.shard = None
        if trace.recording() and reduction.logged is not None and not reduction.lent:
            trace.waited(trace.compute_stream(stream.cuda_stream), reduction.logged.done)

    def oldest(self) -> str:
        """Return the label of the first reduction that was not seen to be done; or ""."""
        return self._under_way[0].label if self._under_way else ""

    # -- inside -----------------------------------------------------------------------------------

    def _reduction(self, shard: Tensor, label: str, compute: Any) -> Reduction:
        numel, dtype, slot = shard.numel(), shard.dtype, self._next % SLOTS
        key = slot, numel, dtype
        parts = self._views.get(key)
        start = slot * self.nbytes + self._owner.rank * shard.nbytes
        if parts is None:
            world = range(self._owner.world)
            parts = [self._region.part(rank, start, numel, dtype) for rank in world]
            self._views[key] = parts
        multicast = self._multicast
        if multicast and dtype in _SWITCHED and shard.nbytes % _WORD == 0:
            multicast += start
        else:
            multicast = 0
        return Reduction(label, slot, shard, parts, multicast, compute)

    def _sum(self, reduction: Reduction) -> None:
        """Queue the kernel."""
        cuda, shard = self._side.cuda, reduction.shard
        assert shard is not None
        with cuda.stream(self._stream):
            self._side.reduce(reduction.parts, shard, reduction.multicast)
        reduction.done = cuda.Event()
        reduction.done.record(self._stream)
        increment_version(shard)
        if trace.recording() and reduction.logged is not None:
            reduction.logged.sum()

    def _give_back(self, reduction: Reduction, current: Any) -> None:
        """Give back the slots of a reduction and of older ones, and of others that are read."""
        while self._held and reduction in self._held:
            self._give_back_oldest(current)
        if self._group is None:
            self._give_back_read()

    def _give_back_read(self) -> None:
        while self._held and self._held[0].done is not None:
            self._give_back_oldest(None)

    def _give_back_oldest(self, current: Any) -> None:
        """Queue the second barrier, after the sum or after what the current stream has read."""
        cuda, stream, reduction = self._side.cuda, self._stream, self._held[0]
        logged = reduction.logged if trace.recording() else None
        if reduction.done is None and reduction.lent:
            reduction.done = cuda.Event()
            reduction.done.record(current)
            stream.wait_event(reduction.done)
            if logged is not None:
                logged.read(trace.compute_stream(current.cuda_stream))
        elif reduction.done is None:
            self._sum(reduction)
        with cuda.stream(stream):
            self._region.barrier(CONSUMED, self._timeout_ms)
        consumed = cuda.Event()
        consumed.record(stream)
        self._consumed[reduction.slot] = consumed, 0 if logged is None else logged.give_back()
        self._held.popleft()

    def _forget_done(self) -> None:
        under_way = self._under_way
        while under_way and under_way[0].done is not None and under_way[0].done.query():
            under_way.popleft()

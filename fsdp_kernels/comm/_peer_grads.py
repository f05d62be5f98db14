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
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fsdp_kernels import trace
from fsdp_kernels.comm._peer_setup import Region, Side
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
        self._under_way: deque[tuple[str, Any]] = deque()  # not seen to be done, oldest first

    @property
    def sums_in_switches(self) -> bool:
        """Whether switches sum what they can."""
        return self._multicast != 0

    def begin(self, numel: int, dtype: torch.dtype, label: str) -> Tensor:
        """Return this rank's slot of the next reduction; again before `post`: the same."""
        slot = self._next % SLOTS
        consumed = self._consumed[slot]
        if consumed is not None:
            event, number = consumed
            try:
                current = self._side.cuda.current_stream(self._owner.device)
                current.wait_event(event)
            except RuntimeError as error:
                raise self._owner.failed(label, error) from error
            if trace.recording():
                trace.waited(trace.compute_stream(current.cuda_stream), number)
        return self._region.part(self._owner.rank, slot * self.nbytes, numel, dtype)

    def post(self, shard: Tensor, label: str) -> Ticket:
        """Queue the sum, over all ranks' slots, of this rank's part."""
        cuda, stream = self._side.cuda, self._stream
        slot = self._next % SLOTS
        posted, done, consumed = cuda.Event(), cuda.Event(), cuda.Event()
        try:
            self._forget_done()
            current = cuda.current_stream(self._owner.device)
            posted.record(current)
            stream.wait_event(posted)
            with cuda.stream(stream):
                self._region.barrier(POSTED, self._timeout_ms)
                self._sum(slot, shard)
                done.record(stream)
                self._region.barrier(CONSUMED, self._timeout_ms)
                consumed.record(stream)
        except RuntimeError as error:
            raise self._owner.failed(label, error) from error
        increment_version(shard)
        self._next += 1
        self._under_way.append((label, done))
        numbers = self._log(label, current) if trace.recording() else (0, 0)
        self._consumed[slot] = consumed, numbers[1]
        return PeerTicket(label, self._owner, self._side, (done, numbers[0], current), shard)

    def oldest(self) -> str:
        """Return the label of the first reduction that was not seen to be done; or ""."""
        return self._under_way[0][0] if self._under_way else ""

    def _sum(self, slot: int, shard: Tensor) -> None:
        """Queue the kernel."""
        numel, dtype = shard.numel(), shard.dtype
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
        self._side.reduce(parts, shard, multicast)

    def _forget_done(self) -> None:
        while self._under_way and self._under_way[0][1].query():
            self._under_way.popleft()

    def _log(self, label: str, current: Any) -> tuple[int, int]:
        """Note the reduction as one access, and its events; return their numbers."""
        started, done, consumed = trace.new_event(), trace.new_event(), trace.new_event()
        compute = trace.compute_stream(current.cuda_stream)
        trace.collectives(compute, [trace.Issued(label, "reduce", started, done)])
        trace.recorded("reduce", consumed)
        return done, consumed


class PeerTicket(Ticket):
    """A reduction over peers' memory.

    Args:
        label: See `Ticket`.
        owner: For errors.
        side: For the current stream.
        queued: The event at its end, the event's number in recorded schedules or 0, and the stream
            that it was issued on.
        shard: What it writes.
    """

    __slots__ = ("_owner", "_queued", "_shard", "_side")

    def __init__(
        self, label: str, owner: Owner, side: Side, queued: tuple[Any, int, Any], shard: Tensor
    ) -> None:
        super().__init__(label)
        self._owner = owner
        self._side = side
        self._queued: tuple[Any, int, Any] | None = queued
        self._shard: Tensor | None = shard

    def _finish(self) -> None:
        self._wait_on(self._side.cuda.current_stream(self._owner.device))

    def _wait_on(self, stream: Any) -> None:
        queued, self._queued = self._queued, None
        assert queued is not None
        done, number, _ = queued
        try:
            stream.wait_event(done)
        except RuntimeError as error:
            raise self._owner.failed(self.label, error) from error
        finally:
            self._shard = None
        if trace.recording() and number:
            trace.waited(trace.compute_stream(stream.cuda_stream), number)

    def __del__(self) -> None:
        queued = getattr(self, "_queued", None)
        if getattr(self, "_pending", False) and queued is not None:
            # As in `NcclTicket`: its memory may be allocated again at once.
            with suppress(RuntimeError):
                self._wait_on(queued[2])
            super().__del__()

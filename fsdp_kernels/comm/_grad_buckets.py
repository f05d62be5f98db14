# SPDX-License-Identifier: Apache-2.0
"""Gradient buckets that all ranks of one host read, and the reductions over them.

Each rank packs into a bucket of its own and says so; whoever wants a sum reads its part of every
rank's bucket, in rank order, and says when it has read. `docs/shared_memory.md` says who may write
and read what, when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp_kernels import ops
from fsdp_kernels.comm._arena import Arena, error_of
from fsdp_kernels.comm.base import Ticket
from triton_ops._fragments import FragmentTable

SLOTS = 2  # gradient buckets of each rank, used in turn


class GradBuckets:
    """Every rank's gradient buckets, used in turn, and the reductions that read them.

    Attributes:
        nbytes: Of one bucket.
    """

    def __init__(self, arena: Arena, nbytes: int) -> None:
        self.nbytes = nbytes
        self._rank = arena.rank
        self._world = arena.world
        self._epochs = arena.grad_epochs(SLOTS)
        self._slots = [arena.allocate_each(nbytes) for _ in range(SLOTS)]
        # As many as buckets differ in size: to make them costs more than to sum a small bucket.
        self._views: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}
        self._parts: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}
        self._posted: deque[_SumTicket] = deque()  # not summed yet, oldest first

    def begin(self, numel: int, dtype: torch.dtype, label: str) -> Tensor:
        """Return this rank's bucket of the next reduction; again before `post`: the same."""
        if len(self._posted) == SLOTS:
            self._posted[0].sum()  # all ranks are at this point, or will be
        try:
            slot = self._epochs.begin(label)
        except RuntimeError as error:
            raise error_of(error) from error
        return self._buckets(slot, numel, dtype)[self._rank]

    def post(self, shard: Tensor, label: str) -> Ticket:
        """Show what was written to the peers; the ticket sums this rank's part into `shard`."""
        self._epochs.post()
        ticket = _SumTicket(label, self, shard)
        self._posted.append(ticket)
        return ticket

    def lend(self, shard: Tensor, label: str) -> list[Tensor]:
        """Return this rank's part of every rank's bucket, in the oldest reduction that was posted.

        To be read until `consume`.
        """
        try:
            slot = self._epochs.wait_posted(label)
        except RuntimeError as error:
            self._posted.popleft()  # nothing can be summed then
            raise error_of(error) from error
        return self._own_parts(slot, shard.numel(), shard.dtype)

    def consume(self) -> None:
        """Say that this rank has read what it wants of the oldest reduction."""
        self._posted.popleft()
        self._epochs.consume()

    def sum_before(self, ticket: _SumTicket) -> None:
        """Finish the reductions that were posted before one."""
        while ticket in self._posted and self._posted[0] is not ticket:
            self._posted[0].sum()

    def _buckets(self, slot: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Every rank's bucket of so many elements in a slot, in rank order."""
        key = slot, numel, dtype
        found = self._views.get(key)
        if found is None:
            nbytes = numel * dtype.itemsize
            found = [area.tensor[:nbytes].view(dtype) for area in self._slots[slot]]
            self._views[key] = found
        return found

    def _own_parts(self, slot: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """This rank's shard, of so many elements, in every rank's bucket."""
        key = slot, numel, dtype
        found = self._parts.get(key)
        if found is None:
            own = slice(self._rank * numel, (self._rank + 1) * numel)
            found = [full[own] for full in self._buckets(slot, numel * self._world, dtype)]
            self._parts[key] = found
        return found


class _SumTicket(Ticket):
    """A reduction: this rank's part is summed when it is waited on, or its memory is needed."""

    __slots__ = ("_buckets", "_measured", "_peers", "_shard", "_table")

    def __init__(self, label: str, buckets: GradBuckets, shard: Tensor) -> None:
        super().__init__(label)
        self._buckets = buckets
        self._shard: Tensor | None = shard
        self._peers: list[Tensor] | None = None
        self._table: FragmentTable | None = None
        self._measured: Tensor | None = None

    def wait_measured(self, table: FragmentTable) -> Tensor | None:
        """Measure the blocks of the sum while they are in cache; see `Ticket`."""
        self._table = table
        self.wait()
        return self._measured

    def peers(self) -> Sequence[Tensor] | None:
        """The ranks' buckets themselves, until `wait`; see `Ticket`."""
        if self._shard is not None and self._peers is None:
            self._buckets.sum_before(self)
            self._peers = self._buckets.lend(self._shard, self.label)
        return self._peers

    def _finish(self) -> None:
        self._buckets.sum_before(self)
        self.sum()

    def sum(self) -> None:
        """Sum now, unless whoever has the peers did."""
        shard, self._shard = self._shard, None
        peers, self._peers = self._peers, None
        if shard is None:
            return
        summed = peers is not None
        peers = peers or self._buckets.lend(shard, self.label)
        try:
            if not summed:
                self._measured = ops.reduce(peers, shard, table=self._table)
        finally:
            self._buckets.consume()

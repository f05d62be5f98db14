# SPDX-License-Identifier: Apache-2.0
"""When gradients are reduced, and what the ranks agree on at the end of a backward.

Reductions start in one fixed order, the reverse of rank 0's first forward: a unit that is ready
early waits its turn, one that no gradient reached sends zeros at the end. Ranks that finish units
in different orders would otherwise mix two units' gradients without an error.

NOTE: inside a backward nothing waits for a reduction. Another rank may start it only at the end of
its backward (a parameter that it did not use never arrives there), and until then it may need a
gather of ours, which a waiting host would not issue. Finished ones are polled for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_kernels.bucket import Bucket
from fsdp_kernels.comm.base import Comm
from fsdp_kernels.schedule import Order
from fsdp_kernels.trace import label
from fsdp_kernels.unit import Unit


class Reductions:
    """The reductions of one root's units.

    Attributes:
        agreed: bool [number of parameters], on the device: which have a gradient on any rank. The
            buckets hold slices of it.
    """

    def __init__(
        self, units: Sequence[Unit], buckets: Sequence[Bucket], comm: Comm, forward: Order
    ) -> None:
        self._units = units
        self._buckets = buckets
        self._comm = comm
        self._forward = forward
        self._order: list[Unit] | None = None
        self._next = 0
        self._running: list[Unit] = []
        self._left_over = False
        self._sequence = 0
        self.agreed = torch.zeros(0, dtype=torch.bool)

    def share_agreement(self, device: torch.device) -> None:
        """Lay the buckets' bits side by side, after units were adopted; the order is void then."""
        parts = [bucket.grads.agreed for bucket in self._buckets]
        self.agreed = torch.cat([torch.zeros(0, dtype=torch.bool, device=device), *parts])
        sizes = [part.numel() for part in parts]
        for bucket, agreed in zip(self._buckets, torch.split(self.agreed, sizes), strict=True):
            bucket.grads.agreed = agreed
        self._order = None

    # -- during a backward ---------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Agree on the order, once, and start at its beginning."""
        self._next = 0
        if self._order is None and any(unit.sync for unit in self._units):
            self._order = self._agree_on_order()

    def order(self) -> Sequence[Unit]:
        """The agreed order; before there is one, any."""
        return self._order or self._units

    def reduce_in_turn(self) -> None:
        """Start every reduction whose turn has come."""
        order = self._order or []
        while self._next < len(order) and order[self._next].released:
            unit = order[self._next]
            self._next += 1
            if unit.reduces_now() and unit.reduced_buckets():
                self._poll()
                unit.reduce()
                self._running.append(unit)

    def finish(self, unit: Unit) -> None:
        """Wait for one unit's reduction, which was started before."""
        self._running.remove(unit)
        unit.finish_reduce()

    def end_backward(self) -> None:
        """Wait for all reductions, add what came late, and agree on what was used."""
        for unit in list(self._running):
            self.finish(unit)
        for unit in self.order():
            if unit.late:
                self._reduce_late(unit)
        synced = [unit for unit in self._units if unit.reduces_now()]
        if synced:
            self._agree_on_used(synced)
        self._left_over = any(unit.has_pending for unit in self._units)

    def reduce_left_over(self) -> None:
        """Reduce what backwards under `no_sync` left (collective, if there is anything).

        Gradients that one rank alone has accumulated are never shown, stepped with or lost.
        """
        if not self._left_over:
            return
        self._left_over = False
        if self._order is None:
            self._order = self._agree_on_order()
        left = [unit for unit in self._order if unit.has_pending]
        for unit in left:
            unit.reduce()
            unit.finish_reduce()
        self._agree_on_used(left)

    def abandon(self) -> None:
        """After a failure: nothing is under way or left over; the units drop their gradients."""
        self._running.clear()
        self._left_over = False

    def _poll(self) -> None:
        while self._running and self._running[0].reduce_is_done():
            self.finish(self._running[0])

    @staticmethod
    def _reduce_late(unit: Unit) -> None:
        """Add what a re-entrant checkpoint's second backward brought to a unit reduced before."""
        unit.pack()
        if unit.reduces_now():
            unit.reduce()
            unit.finish_reduce()

    # -- what the ranks agree on ---------------------------------------------------------------

    def _agree_on_order(self) -> list[Unit]:
        self._comm.prepare_reductions()
        visited = self._forward.first_visits()[::-1]
        seen = set(visited)
        rest = [unit.position for unit in reversed(self._units) if unit.position not in seen]
        order = torch.tensor([*visited, *rest], dtype=torch.int64, device=self.agreed.device)
        self._comm.broadcast(order, label=label("agree", "reduction order")).wait()
        return [self._units[position] for position in order.tolist()]

    def _agree_on_used(self, units: Sequence[Unit]) -> None:
        """One small all-reduce: which parameters any rank used; whether all ranks are in step."""
        reduced = {bucket for unit in units for bucket in unit.buckets}
        self._sequence = (self._sequence + 1) % 4096
        bits: list[float] = []
        for bucket in self._buckets:
            pending = bucket.grads.pending
            bits.extend(pending if bucket in reduced else [False] * len(pending))
        words = torch.tensor(
            [*bits, self._sequence, self._sequence**2],
            dtype=torch.float64,
            device=self.agreed.device,
        )
        self._comm.all_reduce(words, label=label("agree", "used parameters")).wait()
        self.agreed |= words[:-2] > 0
        for bucket in reduced:
            bucket.grads.reduced()
        if words.device.type == "cpu":
            self._check_sequence(words[-2].item(), words[-1].item())

    def _check_sequence(self, total: float, squares: float) -> None:
        """All ranks sent the same number if and only if its variance is zero."""
        comm = self._comm
        if total**2 != squares * comm.world:
            raise RuntimeError(
                f"backward on rank {comm.rank}: expected every rank in backward {self._sequence}, "
                f"got a mean of {total / comm.world:g}. Run the same number of forwards and "
                "backwards on every rank."
            )

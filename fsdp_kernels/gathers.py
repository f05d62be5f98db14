# SPDX-License-Identifier: Apache-2.0
"""Which units are full: gathering them in time, prefetching, freeing, and who owns which memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp_kernels import trace
from fsdp_kernels.bucket import Bucket
from fsdp_kernels.comm.base import Comm
from fsdp_kernels.reductions import Reductions
from fsdp_kernels.schedule import Order
from fsdp_kernels.trace import label
from fsdp_kernels.unit import Unit


class Gathers:
    """The gathers of one root's units.

    Attributes:
        prefetch_units: How many units are gathered ahead.
        in_backward: Whether the gathers issued now belong to a backward.
    """

    def __init__(
        self, units: Sequence[Unit], reductions: Reductions, comm: Comm, *, single: bool
    ) -> None:
        self._units = units
        self._comm = comm
        self._single = single
        self._reductions = reductions
        self._owners: dict[int, Bucket] = {}
        self.prefetch_units = 1
        self.in_backward = False

    def claim(self, bucket: Bucket) -> None:
        """Note which bucket a slot's storage holds."""
        pointer = bucket.slot_pointer()
        if pointer:  # a bucket of empty parameters has no memory
            self._owners[pointer] = bucket

    def disclaim(self, bucket: Bucket) -> None:
        """Forget a bucket's slot."""
        self._owners.pop(bucket.slot_pointer(), None)

    def owner_of(self, tensor: Tensor) -> Bucket | None:
        """The bucket whose full buffer a tensor is a view of, or None."""
        try:
            return self._owners.get(tensor.untyped_storage().data_ptr())
        except RuntimeError:  # sparse tensors and wrappers have no memory of their own
            return None

    def carries(self, unit: Unit) -> bool:
        """Whether a unit stays full from forward to backward, since a free would free no memory.

        On all ranks or none: over two levels, not every shard group needs to share memory.
        """
        return unit.is_placed() and self._comm.everyone is self._comm

    def ensure_full(self, unit: Unit) -> None:
        """Make a unit's parameters readable, and let its modules see them."""
        if unit.carried and self.in_backward:
            self._begin_turn(unit)
        if not unit.is_sharded() and not unit.is_current():
            unit.free()  # edited since it was gathered
        if unit.is_full():
            unit.show()
            for bucket in unit.buckets:
                bucket.use()
                bucket.leaves.follow_requires_grad()
            return
        if unit.is_sharded():
            self._gather(unit)
        unit.wait()

    def _begin_turn(self, unit: Unit) -> None:
        """Do for a unit that is full since its forward what goes with a gather in backward.

        Edited since, it is refused: all ranks would have to gather it, and only this one may know.
        """
        unit.check_carried()
        unit.carried = False
        self._reductions.before_gather(unit, in_backward=True)

    def is_ready(self, unit: Unit) -> bool:
        """Whether `ensure_full` has nothing to do for a unit that this backward came to before."""
        return (
            unit.is_full()
            and not unit.is_hidden()
            and unit.is_current()
            and self._single  # among several streams, each that comes by must wait for the gather
            and not trace.recorders
        )

    def prefetch(self, order: Order) -> None:
        """Issue the gathers of the units that an order expects next."""
        for position in order.upcoming(self.prefetch_units):
            unit = self._units[position]
            if unit.is_sharded() and not unit.stepped:  # what was stepped, backward has done with
                self._gather(self._units[position])

    def is_expecting(self, order: Order) -> bool:
        """Whether an order expects gathers that were not issued yet."""
        units = self._units
        return any(
            units[i].is_sharded() and not units[i].stepped for i in order.upcoming(len(order.last))
        )

    def renew(self) -> None:
        """Let go of what was kept and any rank needs to gather (collective where units keep).

        Edits are known to the rank that made them, and all ranks must issue the same gathers.
        """
        buckets = [bucket for unit in self._units for bucket in unit.buckets if bucket.keeps]
        if not buckets or self._comm.world == 1:
            return
        words = torch.tensor([not b.has_kept() for b in buckets], dtype=torch.float64)
        words = self._comm.agree(words, label=label("agree", "kept parameters"))
        for bucket, stale in zip(buckets, words.tolist(), strict=True):
            if stale:
                bucket.let_go()

    def _gather(self, unit: Unit) -> None:
        if self.in_backward:
            unit.check_kept()
        self._reductions.before_gather(unit, self.in_backward)
        unit.gather()

    def free_all(self) -> None:
        """Free every unit; a fault is raised after all are free."""
        fault: RuntimeError | None = None
        for unit in self._units:
            if not unit.is_sharded():
                try:
                    unit.free()
                except RuntimeError as error:
                    fault = fault or error
        if fault is not None:
            raise fault

    def free_kept(self) -> None:
        """Free what an earlier forward left full for a backward that did not come.

        Whether it is still current depends on edits on this rank alone, and all ranks must gather.
        """
        for unit in self._units:
            if unit.is_hidden() and unit.is_idle():
                unit.free()

    def free_after_forward(self, grad: bool) -> None:
        """Free what was prefetched in vain; without gradients, everything."""
        for unit in self._units:
            if not unit.is_sharded() and (not grad or not unit.is_full()):
                unit.free()

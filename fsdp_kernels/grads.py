# SPDX-License-Identifier: Apache-2.0
"""The gradients' half of a bucket: how they are packed, reduced and used up.

Autograd leaves each parameter's gradient in its leaf. Packing moves all of a bucket's into one flat
`full_grads` in the reduce dtype; under `no_sync` that buffer stays and the next packing adds to it.
The reduce-scatter sums it over the ranks; what a rank keeps of that is in `shard_grads.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsdp_kernels import ops, trace
from fsdp_kernels.accesses import (
    FULL_GRADS,
    LEAF_GRADS,
    REDUCED,
    SHARD_GRADS,
    announce,
    drop,
    hold,
    note,
    note_leaf_grads_gone,
)
from fsdp_kernels.comm.base import Ticket
from fsdp_kernels.pool import Slot
from fsdp_kernels.shard_grads import ShardGrads
from fsdp_kernels.streams import Place, Users
from fsdp_kernels.trace import emit, label, span

if TYPE_CHECKING:
    from fsdp_kernels.bucket import Bucket

_WIDE = (torch.float32, torch.float64)  # a sum over ranks is not rounded to anything narrower


class BucketGrads(ShardGrads):
    """Gradients of one bucket on one rank.

    Attributes:
        slot: What the full gradients lie in, from the first packing to the end of the reduction.
        target: What the reduction under way writes: `shard_grads`, or memory of its own.
        target_generation: Which `shard_grads` that is; 0 for memory of its own.
        unpacked: Whether a leaf may hold a gradient: one has come since the last packing.
        arrived: Per parameter, whether its gradient came in the present backward.
        pending: Per parameter, whether it has a gradient that was not reduced yet.
        left_over: Whether a backward under `no_sync` left gradients that are still to be reduced;
            the same on every rank, whichever parameters each of them used.
        users: The compute streams on which the leaves' gradients have come.
    """

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        n = len(bucket.shapes)
        self.starts = [segment.start for segment in bucket.layout.segments]
        self.unpacked = False
        self.arrived = [False] * n
        self.pending = [False] * n
        self.left_over = False
        self.users = Users()
        self.slot: Slot | None = None
        self.full_grads: Tensor | None = None
        self.target: Tensor | None = None
        self.target_generation = 0
        self._target_home: Place | None = None  # the streams that the memory came from
        self._ticket: Ticket | None = None

    # -- pack and reduce --------------------------------------------------------------------------

    def has_unpacked(self) -> bool:
        """Whether any leaf holds a gradient."""
        return self.unpacked and any(leaf.grad is not None for leaf in self.bucket.leaves)

    def pack(self, into: Tensor | None = None) -> None:
        """Move the leaves' gradients into `full_grads`, adding to what `no_sync` left there.

        Args:
            into: What `full_grads` becomes where there is none yet; None: a slot of the pool.
        """
        bucket = self.bucket
        leaves = bucket.leaves
        grads = [leaf.grad for leaf in leaves]
        self._check_dense(grads)
        accumulate = self.full_grads is not None
        streams = bucket.resources.streams
        if self.full_grads is None:
            self.full_grads = into
        if self.full_grads is None:
            numel, dtype = bucket.layout.full_numel, bucket.dtypes.reduce
            self.slot = bucket.resources.grads.take(bucket.label, numel * dtype.itemsize)
            streams.wait("compute", self.slot.freed)
            self.full_grads = self.slot.view(numel, dtype)
        if trace.recorders and not accumulate:
            hold(bucket, FULL_GRADS)
        if not streams.single:
            self.users.join(streams)
        note(bucket, "pack", LEAF_GRADS, FULL_GRADS)
        with span("pack", bucket.unit.name, bucket.index):
            ops.pack(grads, self.starts, self.full_grads, accumulate=accumulate)
        if not streams.single:
            self.users.release(streams)  # before the leaves' memory goes back where it came from
        if trace.recorders:
            note_leaf_grads_gone(bucket)
        for i, grad in enumerate(grads):
            if grad is not None:
                leaves[i].grad = None
                self.pending[i] = True
        self.unpacked = False

    def _check_dense(self, grads: list[Tensor | None]) -> None:
        for name, grad in zip(self.bucket.names, grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                raise ValueError(
                    f"parameter '{name}': expected a dense gradient, got layout {grad.layout}. "
                    "Build the module with sparse=False."
                )

    def reduce(self, *, lend: bool = False) -> None:
        """Issue the reduction of everything pending, zeros where no gradient came.

        Args:
            lend: `lend` will be asked for the ranks' gradients.
        """
        bucket = self.bucket
        self.left_over = False
        numel, dtypes = bucket.layout.shard_numel, bucket.dtypes
        name = label("reduce", bucket.unit.name, bucket.index)
        if self.full_grads is None:
            self.pack(bucket.comm.grads_buffer(bucket.layout.full_numel, dtypes.reduce, label=name))
        elif self.has_unpacked():
            self.pack()
        assert self.full_grads is not None
        if not self.present and dtypes.own == dtypes.reduce:
            self.target = self.storage()
            self.target_generation = self.generation
            self._target_home = self.home
            if trace.recorders:
                hold(bucket, SHARD_GRADS)
        else:
            self.target = self.full_grads.new_empty(numel)
            self.target_generation = 0
            self._target_home = bucket.resources.streams.here()
            if trace.recorders:
                hold(bucket, REDUCED)
            note(bucket, "allocate", writes=REDUCED)
        emit("reduce", bucket.unit.name, bucket.index)
        announce(bucket, name, FULL_GRADS, REDUCED)
        # Said only where it is so: a `Comm` of the user's need not know it.
        options = {"lend": True} if lend and self._may_lend() else {}
        with span("reduce", bucket.unit.name, bucket.index):
            self._ticket = bucket.comm.reduce_scatter(
                self.target, self.full_grads, label=name, **options
            )

    def reduced(self, used: Sequence[bool]) -> None:
        """Note that what was pending has been reduced and that `agreed` has these bits too."""
        self.pending = [False] * len(self.pending)
        self.mark_used(used)

    def leave_over(self) -> None:
        """Note that a backward ended that did not reduce this bucket."""
        self.left_over = self.left_over or self.bucket.leaves.count_trainable() > 0

    def finish(self) -> None:
        """Wait for the reduction and add it to what is there already."""
        ticket, target = self._ticket, self.target
        if ticket is None:
            return
        assert target is not None
        self._ticket = None
        table, squares = self.norm_table, None
        try:
            if table is None or target is not self.shard_grads:
                ticket.wait()
            else:
                squares = ticket.wait_measured(table)
        finally:
            self._release_full()
        self.add(target, squares)
        self._let_target_go()

    # -- steps in backward ------------------------------------------------------------------------

    def is_reducing(self) -> bool:
        """Whether a reduction is under way."""
        return self._ticket is not None

    def lend(self) -> Sequence[Tensor] | None:
        """This rank's part of every rank's gradients, for a step that sums them itself.

        None where the step would not see the bits that `finish` leaves, or the ranks' memory cannot
        be read. To be read until `take`.
        """
        if self._ticket is None or not self._may_lend():
            return None
        peers = self._ticket.peers()
        if peers is not None:
            self.scale = 1.0 / self.bucket.comm.everyone.world
        return peers

    def _may_lend(self) -> bool:
        own = self.bucket.dtypes.own
        return not self.present and own == self.bucket.dtypes.reduce and own in _WIDE

    def known_used(self) -> list[bool]:
        """Which parameters have a gradient, of those that this rank knows of."""
        used = self.host_used() if self.present else [False] * len(self.pending)
        return [a or b for a, b in zip(self.pending, used, strict=True)]

    def take(self) -> None:
        """Forget the gradients, which a step has used up; their memory goes."""
        try:
            self.discard()
        finally:
            self.present = True  # or has been, as peers' memory
            self.drop()
            if self.shard_grads is not None:
                self.let_go()
            self.taken = True

    def abandon(self) -> None:
        """Forget every gradient after a failed backward; what is under way writes elsewhere."""
        self.unpacked = True  # it may have failed before it could tell us of one
        self.drop()
        if self._ticket is not None:
            self.disown()

    def discard(self) -> None:
        """Wait for a reduction whose result nobody wants."""
        ticket, self._ticket = self._ticket, None
        try:
            if ticket is not None:
                ticket.wait()
        finally:
            self._release_full()
            self._let_target_go()

    def _let_target_go(self) -> None:
        if self.target is not None and self.target is not self.shard_grads:
            # It may have been read on another stream than the one that it goes back to.
            self.bucket.resources.streams.precede(self._target_home)
            if trace.recorders:
                drop(self.bucket, REDUCED)
            note(self.bucket, "let go", writes=REDUCED, place=self._target_home)
        self.target = None

    def _release_full(self) -> None:
        if trace.recorders and self.full_grads is not None:
            drop(self.bucket, FULL_GRADS)
        if self.slot is not None:
            self.bucket.resources.grads.give_back(self.slot)
        self.slot = self.full_grads = None

    def _drop_unreduced(self) -> None:
        if self.unpacked:
            for leaf in self.bucket.leaves:
                leaf.grad = None
            self.unpacked = False
        self.users.places.clear()
        self.pending = [False] * len(self.pending)
        self.left_over = False
        if self._ticket is None:
            self._release_full()

    # -- what the user does to p.grad -------------------------------------------------------------

    def set_grad(self, index: int, value: Tensor | None) -> None:
        """See `Bucket.set_grad`."""
        self.bucket.runtime.recover()
        self.check_there()
        if value is None:
            self._drop_pending(index)
            if self.clear(index) and not any(self.pending):
                self.drop()
        else:
            shown = self.check_grad(index, value)
            self._drop_pending(index)
            self.put(index, shown)

    def _drop_pending(self, index: int) -> None:
        self.bucket.leaves[index].grad = None
        if self.pending[index] and self.full_grads is not None and self._ticket is None:
            segment = self.bucket.layout.segments[index]
            self.full_grads[segment.start : segment.stop].zero_()
            note(self.bucket, "clear", writes=FULL_GRADS)
        self.pending[index] = False

    def drop(self) -> None:
        """Forget every gradient, reduced or pending."""
        self.left_over = False
        if not self.present and self.full_grads is None and not self.has_unpacked():
            return
        if trace.recorders and (self.present or self.target is self.shard_grads is not None):
            drop(self.bucket, SHARD_GRADS)
        self._drop_unreduced()
        self.forget()

    def zero(self) -> None:
        """What `zero_grad(set_to_none=False)` does: gradients stay and become zero."""
        for leaf in self.bucket.leaves:
            if leaf.grad is not None:
                leaf.grad.zero_()
        if self.full_grads is not None and self._ticket is None:
            self.full_grads.zero_()
            note(self.bucket, "zero", writes=FULL_GRADS)
        super().zero()

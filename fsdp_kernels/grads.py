# SPDX-License-Identifier: Apache-2.0
"""The gradients' half of a bucket: pack, reduce, accumulate, and what `p.grad` shows.

Autograd leaves each parameter's gradient in its leaf. Packing moves all of a bucket's into one flat
`full_grads` in the reduce dtype; under `no_sync` that buffer stays and the next packing adds to it.
The reduce-scatter sums it over the ranks into `shard_grads`. The factor that makes a mean of the
sum is not applied there: the Adam kernel reads it, and whoever reads `p.grad` first has it applied
to the whole bucket, once.
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
from fsdp_kernels.flat_shard import HINT, FlatShard
from fsdp_kernels.pool import Slot
from fsdp_kernels.streams import Place, Users
from fsdp_kernels.trace import emit, label, span

if TYPE_CHECKING:
    from fsdp_kernels.bucket import Bucket

_WIDE = (torch.float32, torch.float64)  # a sum over ranks is not rounded to anything narrower


class BucketGrads:
    """Gradients of one bucket on one rank.

    Attributes:
        shard_grads: 1-D [shard_numel], own dtype, or None; its contents count only while `present`.
        generation: Number of the memory that `shard_grads` is; recorded schedules tell by it.
        present: Whether `shard_grads` holds a sum.
        slot: What the full gradients lie in, from the first packing to the end of the reduction.
        target: What the reduction under way writes: `shard_grads`, or memory of its own.
        target_generation: Which `shard_grads` that is; 0 for memory of its own.
        scale: What turns `shard_grads` into the mean over ranks: 1/ranks, or 1.0 once it has been
            applied.
        arrived: Per parameter, whether its gradient came in the present backward.
        pending: Per parameter, whether it has a gradient that was not reduced yet.
        left_over: Whether a backward under `no_sync` left gradients that are still to be reduced;
            the same on every rank, whichever parameters each of them used.
        users: The compute streams on which the leaves' gradients have come.
        agreed: bool [n_params] on the device, a slice of the runtime's: used by any rank since the
            last `drop`.
        taken: Whether a step in backward has used the gradients up, and the optimizer's `step()`
            has not come yet.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        n = len(bucket.shapes)
        self.starts = [segment.start for segment in bucket.layout.segments]
        self.shard_grads: Tensor | None = None
        self.generation = 0
        self.present = False
        self.scale = 1.0
        self.arrived = [False] * n
        self.pending = [False] * n
        self.left_over = False
        self.agreed: Tensor = torch.zeros(n, dtype=torch.bool, device=bucket.device)
        self._cleared: set[int] = set()
        self._host_used = [False] * n  # what `agreed` holds
        self._views: list[FlatShard] | None = None
        self.slot: Slot | None = None
        self.full_grads: Tensor | None = None
        self._ticket: Ticket | None = None
        self.target: Tensor | None = None
        self._home: Place | None = None  # the streams that the memory came from
        self._target_home: Place | None = None
        self.users = Users()
        self.target_generation = 0
        self.taken = False

    # -- pack and reduce --------------------------------------------------------------------------

    def has_unpacked(self) -> bool:
        """Whether any leaf holds a gradient."""
        return any(leaf.grad is not None for leaf in self.bucket.leaves)

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

    def _check_dense(self, grads: list[Tensor | None]) -> None:
        for name, grad in zip(self.bucket.names, grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                raise ValueError(
                    f"parameter '{name}': expected a dense gradient, got layout {grad.layout}. "
                    "Build the module with sparse=False."
                )

    def reduce(self) -> None:
        """Issue the reduction of everything pending, zeros where no gradient came."""
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
            self.target = self._storage()
            self.target_generation = self.generation
            self._target_home = self._home
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
        with span("reduce", bucket.unit.name, bucket.index):
            self._ticket = bucket.comm.reduce_scatter(self.target, self.full_grads, label=name)

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
        try:
            ticket.wait()
        finally:
            self._release_full()
        mean = 1.0 / self.bucket.comm.everyone.world
        self._apply_cleared()
        if not self.present:
            storage = self._storage()
            if storage is not target:
                storage.copy_(target)
                note(self.bucket, "accumulate", REDUCED, SHARD_GRADS)
                if trace.recorders:
                    hold(self.bucket, SHARD_GRADS)
            self.scale = mean
        else:
            assert self.shard_grads is not None
            self.shard_grads.add_(target, alpha=1.0 if self.scale == mean else mean)
            note(self.bucket, "accumulate", REDUCED, SHARD_GRADS)
        self._let_target_go()
        self.present = True
        self._cleared.clear()

    # -- steps in backward ------------------------------------------------------------------------

    def is_reducing(self) -> bool:
        """Whether a reduction is under way."""
        return self._ticket is not None

    def lend(self) -> Sequence[Tensor] | None:
        """This rank's part of every rank's gradients, for a step that sums them itself.

        None where the step would not see the bits that `finish` leaves, or the ranks' memory cannot
        be read. To be read until `take`.
        """
        own, reduced = self.bucket.dtypes.own, self.bucket.dtypes.reduce
        if self._ticket is None or self.present or own != reduced or own not in _WIDE:
            return None
        peers = self._ticket.peers()
        if peers is not None:
            self.scale = 1.0 / self.bucket.comm.everyone.world
        return peers

    def known_used(self) -> list[bool]:
        """Which parameters have a gradient, of those that this rank knows of."""
        used = self.host_used() if self.present else [False] * len(self.pending)
        return [a or b for a, b in zip(self.pending, used, strict=True)]

    def has_used(self) -> bool:
        """Whether any parameter has a reduced gradient."""
        return self.present and any(self.host_used())

    def take(self) -> None:
        """Forget the gradients, which a step has used up; their memory goes."""
        try:
            self.discard()
        finally:
            self.present = True  # or has been, as peers' memory
            self.drop()
            if self.shard_grads is not None:
                self.bucket.resources.streams.precede(self._home)
                note(self.bucket, "let go", writes=SHARD_GRADS, place=self._home)
                self.shard_grads = None
            self.taken = True

    def check_there(self) -> None:
        """Refuse to look at gradients that a step in backward has used up, until `step()`."""
        if self.taken:
            raise RuntimeError(
                f"bucket '{self.bucket.label}': expected step() after backward, got a look at its "
                "gradients, which backward has stepped with (overlap_backward=True). To read, "
                "clip, unscale or drop gradients before the step, pass overlap_backward=False."
            )

    def abandon(self) -> None:
        """Forget every gradient after a failed backward; what is under way writes elsewhere."""
        self.drop()
        if self._ticket is not None:
            self.shard_grads = self._views = None

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

    def _storage(self) -> Tensor:
        if self.shard_grads is None:
            bucket = self.bucket
            # Padding is reduced too (packing zeroes it), but zeros now keep it finite whatever is
            # read first.
            self.shard_grads = torch.zeros(
                bucket.layout.shard_numel, dtype=bucket.dtype, device=bucket.device
            )
            self.generation += 1
            self._home = bucket.resources.streams.here()
            note(bucket, "allocate", writes=SHARD_GRADS)
        return self.shard_grads

    def _release_full(self) -> None:
        if trace.recorders and self.full_grads is not None:
            drop(self.bucket, FULL_GRADS)
        if self.slot is not None:
            self.bucket.resources.grads.give_back(self.slot)
        self.slot = self.full_grads = None

    def _drop_unreduced(self) -> None:
        for leaf in self.bucket.leaves:
            leaf.grad = None
        self.users.places.clear()
        self.pending = [False] * len(self.pending)
        self.left_over = False
        if self._ticket is None:
            self._release_full()

    # -- which parameters have a gradient ---------------------------------------------------------

    def reduced(self, used: Sequence[bool]) -> None:
        """Note that what was pending has been reduced and that `agreed` has these bits too."""
        self.pending = [False] * len(self.pending)
        self._host_used = [a or b for a, b in zip(self._host_used, used, strict=True)]

    def used(self) -> Tensor:
        """bool [n_params], on the device."""
        self._apply_cleared()
        return self.agreed

    def host_used(self) -> list[bool]:
        """The same on the host."""
        self._apply_cleared()
        return self._host_used

    def _apply_cleared(self) -> None:
        """Make single parameters whose gradient was set to None lose it on the device too."""
        if not self._cleared or not self.present:
            return
        for i in self._cleared:
            self.agreed[i] = self._host_used[i] = False
            fragment = self.bucket.params[i].fragment
            if self.shard_grads is not None:
                self.shard_grads[fragment.shard_start : fragment.shard_stop].zero_()
                note(self.bucket, "clear", writes=SHARD_GRADS)
        self._cleared.clear()

    # -- what p.grad shows ------------------------------------------------------------------------

    def grad(self, index: int) -> FlatShard | None:
        """The mean gradient of one parameter, an alias of `shard_grads`, or None."""
        self.bucket.runtime.finish()
        self.check_there()
        if not self.present or index in self._cleared:
            return None
        if not self._host_used[index]:
            return None
        self.apply_scale()
        note(self.bucket, "show", SHARD_GRADS)
        return self._exported()[index]

    def apply_scale(self) -> None:
        """Turn the sum into the mean, once."""
        if self.scale != 1.0 and self.shard_grads is not None:
            self.shard_grads.mul_(self.scale)
            note(self.bucket, "scale", writes=SHARD_GRADS)
            self.scale = 1.0

    def set_grad(self, index: int, value: Tensor | None) -> None:
        """See `Bucket.set_grad`."""
        self.bucket.runtime.recover()
        self.check_there()
        param = self.bucket.params[index]
        if value is None:
            self._clear(index)
            return
        if not isinstance(value, FlatShard) or not value.geometry.matches(param.geometry):
            got = type(value).__name__
            raise TypeError(
                f"parameter '{self.bucket.names[index]}': expected a gradient that is None or a "
                f"FlatShard of the same parameter, got {got} of shape "
                f"{tuple(getattr(value, 'shape', ()))}. {HINT}"
            )
        self._clear_pending(index)
        storage = self._storage()
        if not self.present:
            storage.zero_()
            self._forget_used()
            self.present = True
            if trace.recorders:
                hold(self.bucket, SHARD_GRADS)
        else:
            self.apply_scale()
            self._apply_cleared()
        self.scale = 1.0
        fragment = param.fragment
        held = storage[fragment.shard_start : fragment.shard_stop]
        if value._local.data_ptr() != held.data_ptr() or value.dtype != held.dtype:
            held.copy_(value._local)
            note(self.bucket, "set", writes=SHARD_GRADS)
        self.agreed[index] = self._host_used[index] = True

    def _clear_pending(self, index: int) -> None:
        self.bucket.leaves[index].grad = None
        if self.pending[index] and self.full_grads is not None and self._ticket is None:
            segment = self.bucket.layout.segments[index]
            self.full_grads[segment.start : segment.stop].zero_()
            note(self.bucket, "clear", writes=FULL_GRADS)
        self.pending[index] = False

    def _clear(self, index: int) -> None:
        self._clear_pending(index)
        if self.present:
            self._cleared.add(index)
        if not any(self.pending) and (not self.present or len(self._cleared) == len(self.pending)):
            self.drop()

    def _exported(self) -> list[FlatShard]:
        if self._views is None:
            storage = self._storage()
            self._views = [
                FlatShard(storage[f.shard_start : f.shard_stop], param.geometry)
                for param in self.bucket.params
                for f in (param.fragment,)
            ]
        return self._views

    def drop(self) -> None:
        """Forget every gradient, reduced or pending; memory shown to someone is never reused."""
        self.left_over = False
        if not self.present and self.full_grads is None and not self.has_unpacked():
            return
        if trace.recorders and (self.present or self.target is self.shard_grads is not None):
            drop(self.bucket, SHARD_GRADS)
        self._drop_unreduced()
        if self._views is not None:
            self.bucket.resources.streams.precede(self._home)
            note(self.bucket, "let go", writes=SHARD_GRADS, place=self._home)
            self.shard_grads = self._views = None
        self.present = False
        self.scale = 1.0
        self._cleared.clear()
        self._forget_used()

    def _forget_used(self) -> None:
        self.agreed.fill_(False)
        self._host_used = [False] * len(self._host_used)

    def zero(self) -> None:
        """What `zero_grad(set_to_none=False)` does: gradients stay and become zero."""
        for leaf in self.bucket.leaves:
            if leaf.grad is not None:
                leaf.grad.zero_()
        if self.full_grads is not None and self._ticket is None:
            self.full_grads.zero_()
            note(self.bucket, "zero", writes=FULL_GRADS)
        if self.present and self.shard_grads is not None:
            self.shard_grads.zero_()
            note(self.bucket, "zero", writes=SHARD_GRADS)

# SPDX-License-Identifier: Apache-2.0
"""One bucket: the flat storage of a unit's parameters of one dtype and one `requires_grad`.

The rank keeps its shard (`bucket_shards.py`). Gathering fills a pool slot from all ranks' shards;
the leaves that the forward reads (`leaves.py`) become views of it.
"""

from __future__ import annotations

import sys
import warnings

import torch
from torch import Tensor

from fsdp_kernels import trace
from fsdp_kernels.accesses import (
    FULL_PARAMS,
    SHARD_MASTER,
    SHARD_PARAMS,
    announce,
    drop,
    hold,
    note,
)
from fsdp_kernels.bucket_shards import BucketShards, Dtypes, Resources
from fsdp_kernels.comm.base import DoneTicket, PlacedParams, Ticket
from fsdp_kernels.flat_shard import FlatShard, Geometry
from fsdp_kernels.grads import BucketGrads
from fsdp_kernels.layout import BucketLayout
from fsdp_kernels.leaves import Leaves, Site
from fsdp_kernels.pool import Slot
from fsdp_kernels.streams import Users
from fsdp_kernels.trace import emit, label, span


def _slot_of(placed: PlacedParams) -> Slot:
    """The slot whose buffer a bucket's full parameters have for themselves."""
    slot = Slot(placed.full, None, "placed params")
    slot.own_holders = slot.holders()
    return slot


class Bucket(BucketShards):
    """The storage of one bucket, on one rank.

    Attributes:
        full_params: 1-D [full_numel], compute dtype, while gathered; filled on the gather stream,
            owned by the pool.
        params: The registered `FlatShard`s, in segment order.
        users: The compute streams that read `full_params`, or what is kept of them.
        wanted: What every saved view in a graph holds, so that they are counted without a count.
        keeps: Whether full parameters stay in their slot from one gather to the next.
        slot: What `full_params` lies in, while gathered.
        leaves: What the forward reads while gathered.
        grads: The gradients' half of the bucket.
    """

    def __init__(
        self,
        layout: BucketLayout,
        shapes: list[torch.Size],
        dtypes: Dtypes,
        shard: Tensor,
        resources: Resources,
    ) -> None:
        super().__init__(layout, dtypes, shard, resources)
        self.shapes = shapes
        self._home = None if self.placed is None else _slot_of(self.placed)
        self.params: list[FlatShard] = []
        self.full_params: Tensor | None = None
        self.slot: Slot | None = None
        self._ticket: Ticket | None = None
        self.users = Users()
        self._gathered_version = (-1, -1)
        self.keeps = False
        self._kept: Slot | None = None
        self.wanted = object()
        self._unwanted = sys.getrefcount(self.wanted)
        self.leaves = Leaves(shapes, dtypes.compute, shard.device)
        self.grads = BucketGrads(self)

    def geometry(self, index: int) -> Geometry:
        """Where one parameter lies."""
        return Geometry(
            self.names[index], self.shapes[index], self.layout, index, self.resources.comm
        )

    def adopt(self, params: list[FlatShard], sites: list[Site]) -> None:
        """Take the registered parameters and the places where they are registered."""
        self.params = params
        self.leaves.adopt(params, sites)

    def move_to(self, resources: Resources) -> None:
        """Share another root's pools and communicator; the bucket is sharded and idle."""
        if resources is not self.resources:
            self.let_go()
        self.resources = resources
        for param in self.params:
            param.geometry.comm = resources.comm

    # -- gather, wait, free -----------------------------------------------------------------------

    def gather(self) -> None:
        """Issue the gather into a pool slot; `wait()` makes the parameters readable."""
        layout, dtype, streams = self.layout, self.dtypes.compute, self.resources.streams
        if self.publish_edits():
            note(self, "cast", SHARD_MASTER, SHARD_PARAMS)
        name = label("gather", self.unit.name, self.index)
        if self._kept is not None:
            if self.has_kept():
                self._reuse(self._kept)
                return
            self.let_go()
        slot = self._home
        if slot is not None:
            self._revert_writes()
        else:
            slot = self.resources.params.take(self.label, layout.full_numel * dtype.itemsize)
        self.slot = slot
        self.full_params = slot.view(layout.full_numel, dtype)
        streams.wait("gather", slot.freed)
        emit("gather", self.unit.name, self.index)
        if trace.recorders:
            hold(self, FULL_PARAMS)
        announce(self, name, SHARD_PARAMS, FULL_PARAMS)
        self._gathered_version = self.version
        with span("gather", self.unit.name, self.index):
            if self.placed is not None:
                self._ticket = self.placed.gather(label=name)
            else:
                comm = self.resources.comm
                self._ticket = comm.all_gather(self.full_params, self.shard_params, label=name)

    def _revert_writes(self) -> None:
        """Let what was written to the full parameters behind torch's back not hide a new value."""
        assert self.placed is not None
        if self._gathered_version != self.version and self.placed.revert():
            warnings.warn(
                f"bucket '{self.label}': expected no in-place change of gathered parameters, got "
                "one, through `.data` or NumPy: it was made on this rank's temporary copy and is "
                "lost. Edit inside `with model.full_params():`.",
                stacklevel=3,
            )

    def _leave_to_holders(self, slot: Slot) -> None:
        """Let a view that somebody holds stay what it is, when others may write what it shows."""
        assert self.placed is not None
        self.placed.leave()
        self._home = _slot_of(self.placed)
        self.resources.params.warn_held(self.label)

    def wait(self) -> None:
        """Make the current stream wait for the gather; show the modules the full parameters."""
        assert self._ticket is not None
        assert self.slot is not None
        ticket, self._ticket = self._ticket, None
        ticket.wait()
        self.leaves.fill(self._views(self.slot))
        self.use()
        self.leaves.show()

    def use(self) -> None:
        """Make the full parameters, which some stream has waited for, readable on this one too."""
        streams = self.resources.streams
        if not streams.single and self.users.add(streams):
            self.users.join(streams)
        if trace.recorders:
            note(self, "use", FULL_PARAMS)

    def free(self) -> None:
        """Hide the full parameters and give the slot back, or keep it.

        Raises:
            RuntimeError: Somebody edited a gathered parameter in place; the edit would be lost.
        """
        if self.slot is None:
            return
        if self._ticket is not None:
            ticket, self._ticket = self._ticket, None
            ticket.wait()
        else:
            self.leaves.hide()
            self.leaves.empty()
        if self.placed is not None:
            self._release(self.placed, self.slot)
            return
        if self.keeps:
            self._kept, self.slot, self.full_params = self.slot, None, None
        else:
            self._give_back(self.slot)
        self._check_leaves()

    def _give_back(self, slot: Slot) -> None:
        self._end_use()
        self.slot = self.full_params = None
        self.resources.params.give_back(slot)

    def _release(self, placed: PlacedParams, slot: Slot) -> None:
        self._end_use()
        self.slot = self.full_params = None
        try:
            self._check_leaves()
            if slot.holders() > slot.own_holders:
                self._leave_to_holders(slot)
        finally:
            placed.release()

    def _end_use(self) -> None:
        if self.users.places:
            self.users.join(self.resources.streams)
            self.users.places.clear()
        emit("free", self.unit.name, self.index)
        if trace.recorders:
            drop(self, FULL_PARAMS)
        note(self, "free", FULL_PARAMS)

    # -- keeping the full parameters from one gather to the next ----------------------------------

    def keep(self) -> None:
        """Let a free keep what was gathered for the next gather, as long as nobody changed it.

        Alone in its group, a rank's shard is the full parameters: they need no memory beside it.
        """
        self.keeps = self.placed is None  # what ranks share is not copied, so it needs no keeping
        if self.comm.world == 1:
            # An alias with a version counter of its own: leaves have theirs.
            own = self.shard_params.data.view(torch.uint8)
            self._kept = Slot(own, self.resources.streams.here(), f"shard params {self.names[0]}")

    def has_kept(self) -> bool:
        """Whether the next gather needs nothing but what was kept."""
        if self._kept is None:
            return False
        return self.comm.world == 1 or self.is_current()

    def has_stale(self) -> bool:
        """Whether what was kept was changed on this rank since it was gathered."""
        return self._kept is not None and not self.has_kept()

    def _reuse(self, slot: Slot) -> None:
        self._gathered_version = self.version
        if trace.recorders and self.comm.world > 1:
            hold(self, FULL_PARAMS)  # since its gather, which may have been before the recording
        self.slot = slot
        self.full_params = slot.view(self.layout.full_numel, self.dtypes.compute)
        self._ticket = DoneTicket(label("gather", self.unit.name, self.index))

    def let_go(self) -> None:
        """Give what was kept back; the next gather fills a slot anew."""
        if self._kept is not None and self.comm.world > 1:
            self.slot, self._kept = self._kept, None
            self._give_back(self.slot)

    # -- what is gathered -------------------------------------------------------------------------

    def is_current(self) -> bool:
        """Whether the gathered parameters still are what the shards say."""
        return self._gathered_version == self.version

    def is_wanted(self) -> bool:
        """Whether a graph holds views of the parameters for its backward."""
        return sys.getrefcount(self.wanted) > self._unwanted

    def slot_pointer(self) -> int:
        """Address of the slot's storage: how a saved tensor is recognised as a view of it."""
        return 0 if self.slot is None else self.slot.pointer

    def slot_view(self, dtype: torch.dtype) -> Tensor:
        """The whole slot in another dtype, for saved tensors that reinterpret the bytes."""
        assert self.slot is not None
        return self.slot.view(self.slot.buffer.numel() // dtype.itemsize, dtype)

    def _check_leaves(self) -> None:
        changed = self.leaves.find_changed()
        if changed is None:
            return
        self.let_go()
        if self.placed is not None:
            self.placed.revert()
        fate = "it was made on this rank's temporary copy and is lost"
        if self._kept is not None:  # alone in its group, so it was made on the shard
            if self.shard_params is self.shard_master:
                self.edited()  # so that graphs made before raise, and optimizers' masters follow
                fate = (
                    "this rank has the parameter for itself, so the parameter itself has the new "
                    "values, and training would go on from them; other replicas have only what "
                    "was done there"
                )
            else:
                self.compute_stale()
        raise RuntimeError(
            f"parameter '{self.names[changed]}': expected no in-place change while its unit "
            f"was gathered, got one: {fate}. Edit inside `with model.full_params():`."
        )

    def _views(self, slot: Slot) -> list[Tensor]:
        views: list[Tensor] | None = slot.views.get(self)
        if views is None:
            full = slot.view(self.layout.full_numel, self.dtypes.compute)
            views = self.split(full)
            slot.keep(self, views)
        return views

    def split(self, full: Tensor) -> list[Tensor]:
        """Views of a full flat buffer, one per parameter, in the parameters' shapes."""
        return [
            full[segment.start : segment.stop].view(shape)
            for segment, shape in zip(self.layout.segments, self.shapes, strict=True)
        ]

    # -- the gradients' half, by the names that the rest of the package uses ----------------------

    @property
    def shard_grads(self) -> Tensor | None:
        """1-D [shard_numel], own dtype: what `grad_scale` turns into the mean; None without any."""
        return self.grads.shard_grads if self.grads.present else None

    @property
    def grad_scale(self) -> float:
        """What `shard_grads` must be multiplied by to be the mean over ranks."""
        return self.grads.scale

    def grad(self, index: int) -> FlatShard | None:
        """The gradient of one parameter, or None where no rank used it."""
        return self.grads.grad(index)

    def set_grad(self, index: int, value: Tensor | None) -> None:
        """Replace one parameter's gradient; None also drops what is pending under `no_sync`."""
        self.grads.set_grad(index, value)

    def used(self) -> Tensor:
        """bool [n_params], on the device: which parameters have a gradient on any rank."""
        return self.grads.used()

    def drop_grads(self) -> None:
        """What `zero_grad(set_to_none=True)` does to every parameter of the bucket."""
        self.grads.drop()

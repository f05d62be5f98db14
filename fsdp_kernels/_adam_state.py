# SPDX-License-Identifier: Apache-2.0
"""What a sharded optimizer keeps of one bucket: flat moments, and a master where one is needed."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsdp_kernels.accesses import (
    FULL_GRADS,
    SHARD_GRADS,
    SHARD_MASTER,
    SHARD_PARAMS,
    STEPPED,
    note,
)
from fsdp_kernels.flat_shard import FlatShard
from triton_ops._common import AdamShard

if TYPE_CHECKING:
    from fsdp_kernels._adam_plan import BucketPlan, Launch
    from fsdp_kernels.bucket import Bucket


LOW_PRECISION = (torch.bfloat16, torch.float16)


class Master(enum.Enum):
    """Where the values that Adam updates live."""

    BUCKET = "the bucket's own shard_master, in fp32 or fp64"
    OPTIMIZER = "an fp32 copy that the optimizer keeps"
    TEMPORARY = "an fp32 copy made for each step"


@dataclass(eq=False)
class FlatState:
    """Flat state of one bucket, each buffer 1-D [shard_numel] on the bucket's device.

    Attributes:
        bucket: The bucket.
        exp_avg, exp_avg_sq, max_exp_avg_sq: Moments in the master's dtype; the last for amsgrad.
        kind: Where the master is.
        master: The optimizer's own fp32 master, or None.
        seen: The bucket's version (edits, and steps of any optimizer) that
            master and compute copy are known to follow; None when they are not known to.
    """

    bucket: Bucket
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    kind: Master
    master: Tensor | None = None
    seen: tuple[int, int] | None = None
    _shards: dict[bool, AdamShard] = field(default_factory=dict)

    @classmethod
    def create(cls, bucket: Bucket, *, amsgrad: bool, master_weights: bool) -> FlatState:
        """Allocate zero moments, and a master where the parameters are too narrow to be one."""
        kind = Master.BUCKET
        if bucket.dtype in LOW_PRECISION:
            kind = Master.OPTIMIZER if master_weights else Master.TEMPORARY
        dtype = bucket.dtype if kind is Master.BUCKET else torch.float32
        state = cls(
            bucket=bucket,
            exp_avg=torch.zeros_like(bucket.shard_master, dtype=dtype),
            exp_avg_sq=torch.zeros_like(bucket.shard_master, dtype=dtype),
            max_exp_avg_sq=None,
            kind=kind,
        )
        if kind is Master.OPTIMIZER:
            state.master = bucket.shard_master.float()
        state.ensure(amsgrad=amsgrad)
        return state

    def ensure(self, *, amsgrad: bool) -> None:
        """Add the running maximum if a group asks for it now."""
        if amsgrad and self.max_exp_avg_sq is None:
            self.max_exp_avg_sq = torch.zeros_like(self.exp_avg_sq)

    def buffers(self, *, amsgrad: bool) -> dict[str, Tensor]:
        """Return the flat buffers that a parameter's state shows, by name."""
        found = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        if amsgrad and self.max_exp_avg_sq is not None:
            found["max_exp_avg_sq"] = self.max_exp_avg_sq
        if self.master is not None:
            found["master"] = self.master
        return found

    def entry(self, p: FlatShard, step: Tensor, *, amsgrad: bool) -> dict[str, Tensor]:
        """Return what `optimizer.state[p]` shows: views of the flat buffers."""
        part = slice(p.fragment.shard_start, p.fragment.shard_stop)
        views = self.buffers(amsgrad=amsgrad)
        return {"step": step} | {k: FlatShard.like(p, flat[part]) for k, flat in views.items()}

    def reset(self, p: FlatShard) -> None:
        """Forget one parameter's moments; its master becomes what the parameter is now."""
        part = slice(p.fragment.shard_start, p.fragment.shard_stop)
        for flat in (self.exp_avg, self.exp_avg_sq, self.max_exp_avg_sq):
            if flat is not None:
                flat[part].zero_()
        if self.master is not None:
            self.master[part].copy_(p.bucket.shard_master[part])

    def step(
        self,
        plan: BucketPlan,
        adam: Callable[[AdamShard, Launch], None],
        grads: Tensor | None,
    ) -> None:
        """Update the bucket's shard in place, and in the compute dtype.

        Args:
            plan: The bucket and what to launch.
            adam: Runs the kernel for one launch.
            grads: The bucket's `shard_grads`; None where `adam` reads those of the ranks.
        """
        bucket = plan.bucket
        if bucket.begin_step():
            note(bucket, "cast", SHARD_MASTER, SHARD_PARAMS)
        self._follow_edits(bucket)
        master, params = self._master_and_params(bucket)
        for launch in plan.launches:
            if launch.table.starts:
                shard = self._shard(launch, grads, master, params)
                adam(shard, launch)
                note(bucket, "step", FULL_GRADS if grads is None else SHARD_GRADS, STEPPED)
                object.__setattr__(shard, "grads", self.exp_avg)
        self._publish(bucket, params)
        bucket.stepped()
        self.seen = bucket.version

    def _follow_edits(self, bucket: Bucket) -> None:
        """Take over what the user wrote into the parameters since the last step."""
        if self.seen == bucket.version:
            return
        own = bucket.stepped_values
        if self.master is not None:
            # Only what was really edited: everything else keeps the bits below the parameter's.
            same = self.master.to(own.dtype) == own
            self.master.copy_(torch.where(same, self.master, own.float()))
        elif self.kind is Master.BUCKET and bucket.shard_params is not own:
            # NOTE: the kernel writes active fragments only, and compute_written() vouches for all.
            bucket.shard_params.copy_(own)
            note(bucket, "cast", SHARD_MASTER, SHARD_PARAMS)

    def _master_and_params(self, bucket: Bucket) -> tuple[Tensor, Tensor | None]:
        own, compute = bucket.stepped_values, bucket.shard_params
        if self.kind is Master.BUCKET:
            return own, None if compute is own else compute
        master = own.float() if self.master is None else self.master
        return master, own

    def _shard(
        self, launch: Launch, grads: Tensor | None, master: Tensor, params: Tensor | None
    ) -> AdamShard:
        """Return the launch's buffers, checked once: checking takes longer than a small launch."""
        # NOTE: between steps the kept record names another buffer in place of the gradients, though
        # it is frozen: gradients may be dropped at any time and must not live on here.
        shard = self._shards.get(launch.amsgrad)
        if shard is None or shard.master is not master or shard.params is not params:
            largest = self.max_exp_avg_sq if launch.amsgrad else None
            shard = AdamShard(grads, master, self.exp_avg, self.exp_avg_sq, largest, params)
            if self.kind is not Master.TEMPORARY:
                self._shards[launch.amsgrad] = shard
        object.__setattr__(shard, "grads", grads)
        return shard

    def _publish(self, bucket: Bucket, params: Tensor | None) -> None:
        """Tell the bucket which of its two copies are fresh."""
        if params is bucket.shard_params:
            bucket.compute_written()
        elif params is not None:
            bucket.compute_stale()  # the kernel wrote the parameters; the copy is of a third dtype

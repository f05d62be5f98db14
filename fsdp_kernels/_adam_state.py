# SPDX-License-Identifier: Apache-2.0
"""What the sharded optimizers keep for each bucket: which rows it has, and its flat moments."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsdp_kernels.flat_shard import FlatShard
from triton_ops._common import AdamShard, FragmentTable

if TYPE_CHECKING:
    from fsdp_kernels.bucket import Bucket
    from fsdp_kernels.runtime import Runtime

LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Launch:
    """One call of the Adam kernel: fragments whose groups share amsgrad and maximize."""

    table: FragmentTable
    amsgrad: bool
    maximize: bool


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """The part of one bucket that belongs to one optimizer.

    Attributes:
        bucket: The bucket.
        params: This optimizer's parameters in it, in segment order.
        first_row: The row of the first of them; the others follow.
        table: Their fragments on this rank.
        launches: The same fragments, split by the flags that a launch fixes.
        picked: int64 [len(params)], their indices in the bucket; None when they are all of it.
    """

    bucket: Bucket
    params: tuple[FlatShard, ...]
    first_row: int
    table: FragmentTable
    launches: tuple[Launch, ...]
    picked: Tensor | None

    @property
    def amsgrad(self) -> bool:
        """Whether any parameter keeps the running maximum."""
        return any(launch.amsgrad for launch in self.launches)

    def used(self) -> Tensor:
        """Return which of the parameters have a gradient, bool [len(params)] on the device."""
        used = self.bucket.used()
        return used if self.picked is None else used.index_select(0, self.picked)


@dataclass(frozen=True, eq=False)
class Plan:
    """Rows, tables and runtimes of one optimizer; rebuilt only when its groups change.

    Attributes:
        buckets: One entry for each bucket that holds any of the optimizer's parameters.
        rows: Parameter to row, over all buckets.
        groups: Parameter to the index of its group.
        group_of_row: int64 [n_rows] on the device: the same by row.
        device: Where everything lives.
        one: float64 [1] on the device.
    """

    buckets: tuple[BucketPlan, ...]
    rows: dict[FlatShard, int]
    groups: dict[FlatShard, int]
    group_of_row: Tensor
    device: torch.device
    one: Tensor

    @cached_property
    def runtimes(self) -> list[Runtime]:
        """The distinct runtimes of the buckets."""
        return list({id(b.bucket.runtime): b.bucket.runtime for b in self.buckets}.values())

    @cached_property
    def of_bucket(self) -> dict[int, BucketPlan]:
        """The same entries by the bucket's id."""
        return {id(b.bucket): b for b in self.buckets}

    def used(self) -> Tensor:
        """Return which parameters have a gradient, bool [n_rows] on the device, in row order."""
        masks = [
            b.used()
            if b.bucket.shard_grads is not None
            else torch.zeros(len(b.params), dtype=torch.bool, device=self.device)
            for b in self.buckets
        ]
        return masks[0] if len(masks) == 1 else torch.cat(masks)


def check_sharded(groups: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raise RuntimeError, naming a parameter, unless all of the groups' are sharded."""
    for number, group in enumerate(groups):
        for index, p in enumerate(group["params"]):
            if not isinstance(p, FlatShard):
                raise RuntimeError(
                    f"{where}: expected sharded parameters, got a plain one of shape "
                    f"{tuple(p.shape)} (parameter {index} of group {number}). "
                    "Call fully_shard(model) first."
                )


def build_plan(groups: Sequence[Mapping[str, Any]], where: str) -> Plan:
    """Lay out one row for each parameter, bucket by bucket in the order they are first met."""
    check_sharded(groups, where)
    group_of: dict[FlatShard, int] = {}
    by_bucket: dict[int, list[FlatShard]] = {}
    for number, group in enumerate(groups):
        for p in group["params"]:
            if p not in group_of:
                by_bucket.setdefault(id(p.bucket), []).append(p)
            group_of[p] = number
    buckets: list[BucketPlan] = []
    rows: dict[FlatShard, int] = {}
    for params in by_bucket.values():
        params.sort(key=lambda p: p.index)
        first_row = len(rows)
        rows.update((p, first_row + i) for i, p in enumerate(params))
        flags = [
            (bool(groups[group_of[p]]["amsgrad"]), bool(groups[group_of[p]]["maximize"]))
            for p in params
        ]
        buckets.append(_plan_bucket(params, flags, first_row, where))
    devices = {b.bucket.device for b in buckets}
    if len(devices) != 1:
        raise ValueError(
            f"{where}: expected parameters on one device, got {sorted(map(str, devices))}. "
            "Use one optimizer for each device."
        )
    device = devices.pop()
    return Plan(
        buckets=tuple(buckets),
        rows=rows,
        groups=group_of,
        group_of_row=torch.tensor([group_of[p] for p in rows], device=device),
        device=device,
        one=torch.ones(1, dtype=torch.float64, device=device),
    )


def _plan_bucket(
    params: list[FlatShard], flags: list[tuple[bool, bool]], first_row: int, where: str
) -> BucketPlan:
    bucket = params[0].bucket
    if bucket.dtype not in (torch.float32, torch.float64, *LOW_PRECISION):
        raise ValueError(
            f"{where}: expected parameters of float32, float64, bfloat16 or float16, got "
            f"{bucket.dtype} in {bucket.label}. Use a torch.optim optimizer for these."
        )
    fragments = [
        (p.fragment.shard_start, p.fragment.shard_stop, first_row + i) for i, p in enumerate(params)
    ]
    launches = []
    for flag in dict.fromkeys(flags):
        table = FragmentTable.build(
            f for f, own in zip(fragments, flags, strict=True) if own == flag
        )
        launches.append(Launch(table, *flag))
    picked = None
    if len(params) != len(bucket.params):
        picked = torch.tensor([p.index for p in params], device=bucket.device)
    return BucketPlan(
        bucket=bucket,
        params=tuple(params),
        first_row=first_row,
        table=FragmentTable.build(fragments),
        launches=tuple(launches),
        picked=picked,
    )


class HyperTable:
    """Every row's hyper-parameters on the device, sent again only when a group changed."""

    def __init__(self) -> None:
        self._rows = torch.empty(0)
        self._sent: list[Any] | None = None

    def rows(self, plan: Plan, groups: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return lr, beta1, beta2, eps, weight_decay of every row, float64 [n_rows, 5]."""
        values = [(g["lr"], *g["betas"], g["eps"], g["weight_decay"]) for g in groups]
        tensors = [
            (i, j, value)
            for i, row in enumerate(values)
            for j, value in enumerate(row)
            if isinstance(value, Tensor)
        ]
        if not tensors and values == self._sent:
            return self._rows
        host = torch.tensor(
            [[0.0 if isinstance(v, Tensor) else float(v) for v in row] for row in values],
            dtype=torch.float64,
        )
        if plan.device.type == "cuda":
            host = host.pin_memory()  # from pageable memory the copy would make the host wait
        table = host.to(plan.device, non_blocking=True)
        for i, j, value in tensors:
            table[i, j].copy_(value.detach().reshape(()), non_blocking=True)
        self._rows = table.index_select(0, plan.group_of_row)
        self._sent = None if tensors else values  # a tensor may change in place
        return self._rows


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
        edits_seen: The bucket's edit version that master and compute copy are known to follow; -1
            when they are not known to.
    """

    bucket: Bucket
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    kind: Master
    master: Tensor | None = None
    edits_seen: int = -1
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
    ) -> None:
        """Update the bucket's shard in place and publish it in the compute dtype.

        Args:
            plan: The bucket and what to launch.
            adam: Runs the kernel for one launch.
        """
        bucket = plan.bucket
        grads = bucket.shard_grads
        assert grads is not None  # the caller passes buckets with gradients only
        self._follow_edits(bucket)
        master, params = self._master_and_params(bucket)
        for launch in plan.launches:
            if launch.table.starts:
                shard = self._shard(launch, grads, master, params)
                adam(shard, launch)
                object.__setattr__(shard, "grads", self.exp_avg)
        self._publish(bucket, params)
        self.edits_seen = bucket.edit_version
        bucket.stepped()

    def _follow_edits(self, bucket: Bucket) -> None:
        """Take over what the user wrote into the parameters since the last step."""
        if self.edits_seen == bucket.edit_version:
            return
        own = bucket.shard_master
        if self.master is not None:
            # Only what was really edited: everything else keeps the bits below the parameter's.
            same = self.master.to(own.dtype) == own
            self.master.copy_(torch.where(same, self.master, own.float()))
        elif self.kind is Master.BUCKET and bucket.shard_params is not own:
            # NOTE: the kernel writes active fragments only, and compute_written() vouches for all.
            bucket.shard_params.copy_(own)

    def _master_and_params(self, bucket: Bucket) -> tuple[Tensor, Tensor | None]:
        own, compute = bucket.shard_master, bucket.shard_params
        if self.kind is Master.BUCKET:
            return own, None if compute is own else compute
        master = own.float() if self.master is None else self.master
        return master, own

    def _shard(
        self, launch: Launch, grads: Tensor, master: Tensor, params: Tensor | None
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

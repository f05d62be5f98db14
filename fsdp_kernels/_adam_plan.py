# SPDX-License-Identifier: Apache-2.0
"""Which bucket holds what of a sharded optimizer: rows, tables, hyper-parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsdp_kernels.flat_shard import FlatShard
from triton_ops._common import FLOAT_DTYPES
from triton_ops._fragments import FragmentTable

if TYPE_CHECKING:
    from fsdp_kernels.bucket import Bucket
    from fsdp_kernels.runtime import Runtime


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

    def holds_all_trainable(self) -> bool:
        """Whether no other optimizer, and nobody who reads gradients alone, needs the bucket's."""
        if self.picked is None:
            return True
        mine = {p.index for p in self.params}
        return all(p.index in mine or not p.requires_grad for p in self.bucket.params)

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

    @property
    def runtimes(self) -> list[Runtime]:
        """The buckets' runtimes, each once; sharding an ancestor later changes them."""
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

    def used_params(self) -> list[FlatShard]:
        """Return the parameters that have a gradient; the host knows without asking the device."""
        found = []
        for b in self.buckets:
            if b.bucket.shard_grads is not None:
                used = b.bucket.grads.host_used()
                found += [p for p in b.params if used[p.index]]
        return found


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
            if not p.is_floating_point():
                continue  # an integer parameter never has a gradient
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
    if bucket.dtype not in FLOAT_DTYPES:
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


class Masks:
    """Which parameters of a bucket have a gradient, on the device: nearly always the same."""

    def __init__(self) -> None:
        self._sent: dict[BucketPlan, tuple[list[bool], Tensor]] = {}

    def of(self, plan: BucketPlan, used: Sequence[bool]) -> Tensor:
        """Return bool [len(plan.params)] from the host's bits of all of the bucket's parameters."""
        mine = [used[p.index] for p in plan.params]
        sent = self._sent.get(plan)
        if sent is None or sent[0] != mine:
            host = torch.tensor(mine)
            if plan.bucket.device.type == "cuda":
                host = host.pin_memory()
            sent = self._sent[plan] = mine, host.to(plan.bucket.device, non_blocking=True)
        return sent[1]


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

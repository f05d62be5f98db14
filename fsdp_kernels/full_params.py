# SPDX-License-Identifier: Apache-2.0
"""`full_params()`: all parameters whole, in their own dtype, for reading and editing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fsdp_kernels.accesses import SHARD_MASTER, WHOLE, announce, note
from fsdp_kernels.bucket import Bucket
from fsdp_kernels.runtime import Runtime
from fsdp_kernels.trace import label
from fsdp_kernels.unit import Unit


@contextmanager
def open_full_params(module: nn.Module, units: list[Unit]) -> Iterator[dict[str, nn.Parameter]]:
    """Gather the units' parameters in their own dtype, show them, write edits back."""
    runtime = units[0].runtime
    runtime.begin_editing()
    try:
        for unit in units:
            if not unit.is_sharded():
                unit.free()
        held = [_Whole(bucket) for unit in units for bucket in unit.buckets]
        try:
            for unit in units:
                unit.sync_rnns()
            yield {name: param for whole in held for name, param in whole.shown.items()}
        finally:
            for whole in held:
                whole.hide()
            for unit in units:
                unit.sync_rnns()
        _write_back(held, runtime)
    finally:
        runtime.end_editing()


class _Whole:
    """One bucket's parameters, whole, while they are shown to the modules."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.full = bucket.shard_master.new_empty(bucket.layout.full_numel)
        name = label("full_params", bucket.unit.name, bucket.index)
        note(bucket, "allocate", writes=WHOLE)
        announce(bucket, name, SHARD_MASTER, WHOLE)
        bucket.comm.all_gather(self.full, bucket.shard_master, label=name).wait()
        note(bucket, "use", WHOLE)
        self._views = bucket.split(self.full)
        params = [
            nn.Parameter(view, requires_grad=param.requires_grad)
            for view, param in zip(self._views, bucket.params, strict=True)
        ]
        self.shown = dict(zip(bucket.names, params, strict=True))
        for site in bucket.leaves.sites:
            site.module.__dict__[site.name] = params[site.index]

    def hide(self) -> None:
        """Give the modules their sharded parameters back."""
        for site in self.bucket.leaves.sites:
            site.module.__dict__.pop(site.name, None)

    def take_edits(self) -> bool:
        """Write this rank's part back; whether anything in it changed."""
        bucket = self.bucket
        for view, (name, param) in zip(self._views, self.shown.items(), strict=True):
            if param.shape != view.shape or param.dtype != view.dtype:
                raise ValueError(
                    f"parameter '{name}': expected shape {tuple(view.shape)} and {view.dtype} to "
                    f"stay, got {tuple(param.shape)} and {param.dtype}. Edit values only."
                )
            if param.data_ptr() != view.data_ptr():
                view.copy_(param.detach())  # `.data =` gave it other memory
        start, stop = bucket.layout.shard_range(bucket.rank)
        mine = self.full[start:stop]
        # As bytes, so that a NaN that was there before is no edit.
        changed = not torch.equal(mine.view(torch.uint8), bucket.shard_master.view(torch.uint8))
        if changed:
            bucket.shard_master.copy_(mine)
            note(bucket, "edit", WHOLE, SHARD_MASTER)
        return changed


def _write_back(held: list[_Whole], runtime: Runtime) -> None:
    changed = torch.tensor([whole.take_edits() for whole in held], dtype=torch.int32)
    changed = changed.to(runtime.device)
    # An edit on any rank is an edit on all: what is gathered must be gathered again by all of them
    # or by none.
    runtime.comm.all_reduce(changed, "max", label=label("full_params", "edits")).wait()
    for whole, any_rank in zip(held, changed.tolist(), strict=True):
        if any_rank:
            whole.bucket.edited()

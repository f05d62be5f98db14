# SPDX-License-Identifier: Apache-2.0
"""The gradients that a rank keeps of a bucket: its shard of the sum, and what `p.grad` shows of it.

The factor that makes a mean of the sum is not applied when it comes: the Adam kernel reads it, and
whoever reads `p.grad` first has it applied to the whole bucket, once. How the sum comes about is in
`grads.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsdp_kernels import ops, trace
from fsdp_kernels.accesses import REDUCED, SHARD_GRADS, hold, note
from fsdp_kernels.flat_shard import HINT, FlatShard
from fsdp_kernels.streams import Place
from triton_ops._fragments import FragmentTable

if TYPE_CHECKING:
    from fsdp_kernels.bucket import Bucket


@dataclass(frozen=True)
class _Measured:
    """What a reduction found out about its sum on the way: see `ShardGrads.squares`."""

    table: FragmentTable
    squares: Tensor
    version: int


class ShardGrads:
    """A rank's reduced gradients of one bucket.

    Attributes:
        shard_grads: 1-D [shard_numel], own dtype, or None; its contents count only while `present`.
        generation: Number of the memory that `shard_grads` is; recorded schedules tell by it.
        home: The streams that this memory came from.
        present: Whether `shard_grads` holds a sum.
        scale: What turns `shard_grads` into the mean over ranks: 1/ranks, or 1.0 once it has been
            applied.
        agreed: bool [n_params] on the device, a slice of the runtime's: used by any rank since the
            last `forget`.
        norm_table: The fragments whose norm an optimizer took of the last gradients: it will want
            that of the next ones, which is cheap while they are being summed.
        taken: Whether a step in backward has used the gradients up, and the optimizer's `step()`
            has not come yet.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        n = len(bucket.shapes)
        self.shard_grads: Tensor | None = None
        self.generation = 0
        self.home: Place | None = None
        self.present = False
        self.scale = 1.0
        self.agreed: Tensor = torch.zeros(n, dtype=torch.bool, device=bucket.device)
        self.taken = False
        self._cleared: set[int] = set()  # set to None since the sum came, but still in it
        self._host_used = [False] * n  # what `agreed` holds
        self._views: list[FlatShard] | None = None
        self.norm_table: FragmentTable | None = None
        self._measured: _Measured | None = None

    # -- memory -----------------------------------------------------------------------------------

    def storage(self) -> Tensor:
        """Return `shard_grads`, made if there is none: the caller then writes all of it."""
        if self.shard_grads is None:
            bucket = self.bucket
            self.shard_grads = torch.empty(
                bucket.layout.shard_numel, dtype=bucket.dtype, device=bucket.device
            )
            self.generation += 1
            self.home = bucket.resources.streams.here()
            note(bucket, "allocate", writes=SHARD_GRADS)
        return self.shard_grads

    def add(self, summed: Tensor, squares: Tensor | None = None) -> None:
        """Add a sum over the ranks to what is there; it may lie in `storage()` if nothing is.

        Args:
            summed: 1-D [shard_numel], reduce dtype.
            squares: What `ops.norm` would say of it for `norm_table`, or None.
        """
        table, self.norm_table, self._measured = self.norm_table, None, None
        mean = 1.0 / self.bucket.comm.everyone.world
        self._apply_cleared()
        if not self.present:
            storage = self.storage()
            if storage is not summed:
                storage.copy_(summed)
                note(self.bucket, "accumulate", REDUCED, SHARD_GRADS)
                if trace.recorders:
                    hold(self.bucket, SHARD_GRADS)
            elif squares is not None and table is not None:
                self._measured = _Measured(table, squares, storage._version)
            self.scale = mean
        else:
            assert self.shard_grads is not None
            self.shard_grads.add_(summed, alpha=1.0 if self.scale == mean else mean)
            note(self.bucket, "accumulate", REDUCED, SHARD_GRADS)
        self.present = True
        self._cleared.clear()

    def squares(self, table: FragmentTable) -> Tensor:
        """Return what `ops.norm` says of `shard_grads`, float64 [2] on the device.

        Args:
            table: The fragments whose elements count.
        """
        grads, measured = self.shard_grads, self._measured
        assert grads is not None
        self.norm_table = table
        # Whoever was shown them had the scale applied first, which counts as a change.
        if measured is not None and measured.table is table and measured.version == grads._version:
            return measured.squares
        note(self.bucket, "norm", SHARD_GRADS)
        return ops.norm(grads, table)

    def let_go(self) -> None:
        """Give the memory up; whoever was shown it keeps it."""
        self.bucket.resources.streams.precede(self.home)
        note(self.bucket, "let go", writes=SHARD_GRADS, place=self.home)
        self.shard_grads = self._views = None

    def disown(self) -> None:
        """Give the memory up while something may still write it."""
        self.shard_grads = self._views = None

    def forget(self) -> None:
        """Forget what was reduced; memory shown to someone is never reused."""
        if self._views is not None:
            self.let_go()
        self.present = False
        self._measured = None
        self.scale = 1.0
        self._cleared.clear()
        self._forget_used()

    # -- which parameters have a gradient ---------------------------------------------------------

    def mark_used(self, used: Sequence[bool]) -> None:
        """Note that `agreed` has these bits too."""
        self._host_used = [a or b for a, b in zip(self._host_used, used, strict=True)]

    def used(self) -> Tensor:
        """bool [n_params], on the device."""
        self._apply_cleared()
        return self.agreed

    def host_used(self) -> list[bool]:
        """The same on the host."""
        self._apply_cleared()
        return self._host_used

    def has_used(self) -> bool:
        """Whether any parameter has a reduced gradient."""
        return self.present and any(self.host_used())

    def _forget_used(self) -> None:
        self.agreed.fill_(False)
        self._host_used = [False] * len(self._host_used)

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

    def check_there(self) -> None:
        """Refuse to look at gradients that a step in backward has used up, until `step()`."""
        if self.taken:
            raise RuntimeError(
                f"bucket '{self.bucket.label}': expected step() after backward, got a look at its "
                "gradients, which backward has stepped with (overlap_backward=True). To read, "
                "clip, unscale or drop gradients before the step, pass overlap_backward=False."
            )

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

    def check_grad(self, index: int, value: Tensor) -> FlatShard:
        """Return what somebody wants to set as the gradient of one parameter, if it may be that."""
        geometry = self.bucket.params[index].geometry
        if not isinstance(value, FlatShard) or not value.geometry.matches(geometry):
            got = type(value).__name__
            raise TypeError(
                f"parameter '{self.bucket.names[index]}': expected a gradient that is None or a "
                f"FlatShard of the same parameter, got {got} of shape "
                f"{tuple(getattr(value, 'shape', ()))}. {HINT}"
            )
        return value

    def put(self, index: int, value: FlatShard) -> None:
        """Make a value the mean gradient of one parameter."""
        storage = self.storage()
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
        fragment = self.bucket.params[index].fragment
        held = storage[fragment.shard_start : fragment.shard_stop]
        if value._local.data_ptr() != held.data_ptr() or value.dtype != held.dtype:
            held.copy_(value._local)
            note(self.bucket, "set", writes=SHARD_GRADS)
        self.agreed[index] = self._host_used[index] = True

    def clear(self, index: int) -> bool:
        """Let one parameter have no gradient any more; whether none is left then."""
        if self.present:
            self._cleared.add(index)
        return not self.present or len(self._cleared) == len(self._host_used)

    def zero(self) -> None:
        """Let the gradients that are there stay and become zero."""
        if self.present and self.shard_grads is not None:
            self.shard_grads.zero_()
            note(self.bucket, "zero", writes=SHARD_GRADS)

    def _exported(self) -> list[FlatShard]:
        if self._views is None:
            storage = self.storage()
            self._views = [
                FlatShard(storage[f.shard_start : f.shard_stop], param.geometry)
                for param in self.bucket.params
                for f in (param.fragment,)
            ]
        return self._views

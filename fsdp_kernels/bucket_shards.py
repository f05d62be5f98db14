# SPDX-License-Identifier: Apache-2.0
"""What one rank keeps of a bucket's parameters, and who wrote it last.

`shard_master` has the parameter's own dtype and is what the `FlatShard`s are views of; users,
`torch.optim` and checkpoints write it. `shard_params` has the compute dtype and is what a gather
sends. Where the dtypes are equal one memory serves as both. If that memory lies where peers read it
in place, `shard_master` maps it a second time, copy on write: what is written there no peer sees
until the next gather, or the next step of a sharded optimizer, takes it over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fsdp_kernels.comm.base import Comm, CopyOnWrite
from fsdp_kernels.layout import BucketLayout
from fsdp_kernels.pool import Pool
from fsdp_kernels.streams import Streams
from fsdp_kernels.trace import label

if TYPE_CHECKING:
    from fsdp_kernels.runtime import Runtime
    from fsdp_kernels.unit import Unit


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of a bucket: the parameter's own, that of computation and that of reduction."""

    own: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype

    @property
    def itemsize(self) -> int:
        """Smallest element size, which the layout's alignment must serve."""
        return min(self.own.itemsize, self.compute.itemsize, self.reduce.itemsize)


@dataclass(frozen=True)
class Resources:
    """What the buckets of one root share."""

    comm: Comm
    streams: Streams
    params: Pool
    grads: Pool


class BucketShards:
    """One rank's part of one bucket.

    Attributes:
        layout: Geometry; all offsets come from it.
        names: Fully qualified parameter names, in segment order.
        dtypes: Own, compute and reduce dtype.
        resources: What it shares with other buckets.
        unit: The unit that it belongs to.
        index: Its index there.
        placed: The full parameters' place in memory that all ranks share, or None. `shard_params`
            then lies in it, so that whoever writes it must call `wait_released` first.
        shard_master: 1-D [shard_numel], own dtype; lives on the current stream.
        shard_params: 1-D [shard_numel], compute dtype; the same object as `shard_master` where the
            dtypes are equal and nothing is placed.
        master_view: What `shard_master` shows, where it shows `shard_params`; else None.
        stepped_values: What an optimizer step reads and writes for `shard_master`: itself, or
            `shard_params` where it shows that. `begin_step` comes first.
    """

    def __init__(
        self, layout: BucketLayout, dtypes: Dtypes, shard: Tensor, resources: Resources
    ) -> None:
        self.layout = layout
        self.dtypes = dtypes
        self.resources = resources
        self.names = [segment.name for segment in layout.segments]
        self.index = 0
        self.unit: Unit = None  # type: ignore[assignment]  # set by the unit, at once
        nbytes = layout.full_numel * dtypes.compute.itemsize
        self.placed = resources.comm.place_params(nbytes, shard.device)
        self.master_view: CopyOnWrite | None = None
        self.shard_master = self.shard_params = shard
        if self.placed is not None:
            self.shard_params = self.placed.shard.view(dtypes.compute).copy_(shard)
            if dtypes.own == dtypes.compute:
                self.master_view = self.placed.view_shard()
                self.shard_master = self.master_view.tensor.view(dtypes.own)
        elif dtypes.compute != dtypes.own:
            self.shard_params = shard.to(dtypes.compute)
        self.stepped_values = self.shard_master if self.master_view is None else self.shard_params
        self._compute_version = self.shard_master._version
        self._steps = 0

    # -- names ------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """Unit path and bucket index, as in `layers.3/0`."""
        return f"{self.unit.label}/{self.index}"

    @property
    def rank(self) -> int:
        """This rank within the group."""
        return self.resources.comm.rank

    @property
    def comm(self) -> Comm:
        """The ranks that share the bucket."""
        return self.resources.comm

    @property
    def runtime(self) -> Runtime:
        """The shared context of the root that the unit belongs to."""
        return self.unit.runtime

    @property
    def device(self) -> torch.device:
        """Where the shards live."""
        return self.shard_master.device

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' own dtype."""
        return self.dtypes.own

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the gathered parameters."""
        return self.dtypes.compute

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which gradients are summed over the ranks."""
        return self.dtypes.reduce

    # -- versions: who wrote the parameters last --------------------------------------------------

    @property
    def version(self) -> tuple[int, int]:
        """Changes whenever the parameters' values may have changed: edits and optimizer steps.

        Edits are all in-place torch operations on `shard_master` or any alias of it.
        """
        return self.shard_master._version, self._steps

    def compute_written(self) -> None:
        """The optimizer wrote `shard_params` beside `shard_master`: the compute copy is fresh."""
        self._compute_version = self.shard_master._version

    def compute_stale(self) -> None:
        """`shard_master` was written behind torch's back: cast it again before the next gather."""
        self._compute_version = -1

    def stepped(self) -> None:
        """An optimizer step changed the parameters: graphs made before must not be run backward."""
        self._steps += 1

    def edited(self) -> None:
        """The master was written in a way that no version counter saw."""
        increment_version(self.shard_master)

    # -- edits ------------------------------------------------------------------------------------

    def wait_released(self) -> None:
        """Return once `shard_params` may be written: at once, unless peers read it in place."""
        if self.placed is not None:
            self.placed.wait_released(label=label("step", self.unit.name, self.index))

    def publish_edits(self) -> bool:
        """Let `shard_params` be what `shard_master` says, if that was written since they agreed.

        Peers see it from the next gather on.

        Returns:
            Whether `shard_params` was written.
        """
        if (
            self._compute_version == self.shard_master._version
            or self.shard_params is self.shard_master
        ):
            return False
        self.wait_released()
        self._publish()
        return True

    def begin_step(self) -> bool:
        """Wait until `stepped_values` may be written, and let them be what the user wrote last.

        Returns:
            Whether the user's edits were written into `shard_params`.
        """
        self.wait_released()
        view = self.master_view
        # NOTE: nobody counts NumPy's writes. Left alone, they would hide what the step writes.
        if view is None or (
            self._compute_version == self.shard_master._version and not view.is_written()
        ):
            return False
        self._publish()
        return True

    def _publish(self) -> None:
        self.shard_params.copy_(self.shard_master)
        if self.master_view is not None:
            self.master_view.revert()  # shows the same values, and costs nothing
        self._compute_version = self.shard_master._version

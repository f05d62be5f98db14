# SPDX-License-Identifier: Apache-2.0
"""From a mesh and a strategy to a communicator of one level or two."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_kernels.comm import pick
from fsdp_kernels.comm._groups import twin
from fsdp_kernels.comm.base import Comm
from fsdp_kernels.comm.hybrid import HybridComm
from fsdp_kernels.comm.solo import SoloComm

# Groups that we made, for each default group, by their ranks: modules that are sharded one by one
# share them. NOTE: groups and not communicators, which would keep the default group alive.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True)
class Grid:
    """Ranks of the job, one row for each replica: a row's ranks share one copy of the state.

    Attributes:
        rows: Global ranks.
        row_group: The process group of this rank's row, where the user's mesh has one.
        column_group: That of the ranks that hold the same shard, where the mesh has one.
    """

    rows: tuple[tuple[int, ...], ...]
    row_group: dist.ProcessGroup | None = None
    column_group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh | None, *, replicates: bool) -> Grid:
        """Lay out a mesh: its last dimension shards, one before it replicates.

        Args:
            mesh: 1-D or 2-D; None means all ranks.
            replicates: Whether nothing is sharded, whatever the mesh's dimensions.
        """
        if replicates:
            ranks = range(dist.get_world_size()) if mesh is None else mesh.mesh.flatten().tolist()
            column = mesh.get_group() if mesh is not None and mesh.ndim == 1 else None
            return cls(tuple((rank,) for rank in ranks), column_group=column)
        if mesh is None:
            return cls((tuple(range(dist.get_world_size())),))
        rows = tuple(map(tuple, mesh.mesh.reshape(-1, mesh.mesh.shape[-1]).tolist()))
        return cls(rows, *(mesh.get_group(dim) for dim in reversed(range(mesh.ndim))))

    @property
    def is_everybody(self) -> bool:
        """Whether all ranks of the job are in it."""
        return sum(map(len, self.rows)) == dist.get_world_size()

    @property
    def size(self) -> str:
        """Number of ranks, as "2 x 4" where there are two levels."""
        rows, columns = len(self.rows), len(self.rows[0])
        return str(rows * columns) if 1 in (rows, columns) else f"{rows} x {columns}"

    def column(self, rank: int) -> list[int]:
        """The ranks that hold the same shard as `rank`."""
        place = next(row.index(rank) for row in self.rows if rank in row)
        return [row[place] for row in self.rows]


def connect(name: str, grid: Grid, device: torch.device) -> Comm:
    """Return the backend of a name over a grid (collective).

    Raises:
        RuntimeError: The backend is not there, or this rank is not in the grid.
    """
    if len(grid.rows) == 1:
        return pick.make(name, grid.row_group, device)
    rank = dist.get_rank()
    if not any(rank in row for row in grid.rows):
        raise RuntimeError(
            f"fully_shard: expected this rank to be in the mesh, got rank {rank} and a mesh "
            f"without it. Call it on the mesh's ranks only."
        )
    shard: Comm = SoloComm()
    if len(grid.rows[0]) > 1:
        shard = pick.make(name, grid.row_group, device)
    everyone = sorted(r for row in grid.rows for r in row)
    column = grid.column(rank)
    # Ranks reach each other's memory inside a row at most.
    across = name
    if name == "shared_memory":
        across = "process_group"
    elif name == "peer":
        across = pick.choose(device.type).name
    return HybridComm(
        shard,
        pick.make(across, _ours("column", column, _known(column, grid.column_group)), device),
        pick.make(across, _known(everyone, None) or _ours("everyone", everyone, None), device),
    )


def _known(ranks: Sequence[int], group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A group of these ranks that is there already, or None."""
    if group is None and list(ranks) == list(range(dist.get_world_size())):
        return dist.group.WORLD
    return group


def _ours(purpose: str, ranks: Sequence[int], like: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A group of some ranks for ourselves (collective over them), made at the first call."""
    world = dist.group.WORLD
    assert world is not None  # the caller has looked
    groups = _made.setdefault(world, {})
    key = f"{purpose} {list(ranks)}"
    if key not in groups:
        new = partial(dist.new_group, list(ranks), use_local_synchronization=True)
        groups[key] = new() if like is None else twin(like)
    return groups[key]

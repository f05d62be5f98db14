# SPDX-License-Identifier: Apache-2.0
"""Further channels between the ranks of a process group, that only those ranks make.

Torch names a group that only its members make after how many groups a rank knows. Ranks that are in
different numbers of groups (stages of a pipeline, a mesh with uneven parts) would wait for each
other under different names. So none of this lets torch choose a name.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fsdp_kernels import _ext

DEFAULT_TIMEOUT_S = 600.0
_SLICE = timedelta(milliseconds=100)  # how soon a wait for other hosts sees that the device failed


def timeout_of(group: dist.ProcessGroup, *kinds: str) -> float:
    """Return the time limit of a group's collectives in seconds, by its backend for a device type.

    Args:
        group: The group.
        kinds: Types of device; the first that the group has a backend for.
    """
    for kind in kinds:
        # NOTE: private, and not every backend has options.
        with suppress(RuntimeError, AttributeError):
            limit: timedelta = group._get_backend(torch.device(kind)).options._timeout
            return limit.total_seconds()
    return DEFAULT_TIMEOUT_S


_twins: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()


def twin(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a new group of the same ranks, backend and time limit (collective among them).

    It ends with the others of torch's, at `destroy_process_group`.
    """
    number = next(_twins.setdefault(group, itertools.count()))
    ranks = dist.get_process_group_ranks(group)
    _, store = distributed_c10d._world.pg_map[distributed_c10d._get_default_group()]
    # NOTE: private; `new_group` does this after it has chosen a name.
    made: Any = distributed_c10d._new_process_group_helper(
        len(ranks),
        dist.get_rank(group),
        ranks,
        dist.get_backend(group),
        store,
        distributed_c10d.GroupName(f"{group.group_name}/fsdp_kernels/{number}"),
        timeout=timedelta(seconds=timeout_of(group, "cuda", "cpu")),
        device_id=group.bound_device_id,
    )[0]
    places = {rank: place for place, rank in enumerate(ranks)}
    distributed_c10d._world.pg_group_ranks[made] = places
    twinned: dist.ProcessGroup = made
    return twinned


class Hosts:
    """The hosts of a communicator's ranks, joined by gloo over a store (collective).

    Args:
        rank: This rank.
        world: Their number.
        store: Where they meet, under keys that nobody else uses.
        timeout_s: Seconds that meeting, or a collective, may take.
        failure: What has failed on this rank's device, or None: no wait outlasts that.

    Raises:
        RuntimeError: They did not all come, or cannot reach each other.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        store: Any,
        timeout_s: float,
        failure: Callable[[], str | None],
    ) -> None:
        self._backend: Any = None
        self._failure = failure
        self._pid = os.getpid()
        self._under_way: Any = None
        try:
            limit = timedelta(seconds=timeout_s)
            self._backend = dist.ProcessGroupGloo(store, rank, world, limit)
        except RuntimeError as error:
            raise RuntimeError(
                f"NcclComm: expected the hosts of all {world} ranks to connect over gloo within "
                f"{timeout_s:g} s, got on rank {rank}: {error}. They need TCP beside NCCL: set "
                "GLOO_SOCKET_IFNAME to the network interface that reaches the other hosts (as "
                "NCCL_SOCKET_IFNAME). If another rank failed, read its error first."
            ) from error

    def largest(self, words: torch.Tensor) -> None:
        """Replace words by their maximum over the ranks."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._wait(self._backend.allreduce([words], options))

    def barrier(self) -> None:
        """Return once every rank has called this."""
        self._wait(self._backend.barrier())

    def _wait(self, work: Any) -> None:
        self._under_way = work
        while True:
            try:
                work.wait(_SLICE)
            except RuntimeError:
                if work.is_completed():
                    self._under_way = None
                    raise
                if self._failure() is not None:
                    raise
            else:
                self._under_way = None
                return

    def close(self) -> None:
        """Let connections and threads go. Nothing may follow; closing again does nothing."""
        backend, self._backend = self._backend, None
        if backend is None:
            return
        work, self._under_way = self._under_way, None
        if os.getpid() != self._pid or (work is not None and not work.is_completed()):
            # To destroy it would wait for what is under way, until the time limit; or, in a fork,
            # for threads that are not there.
            _ext.never_destroy(backend)

    def __del__(self) -> None:
        self.close()

# SPDX-License-Identifier: Apache-2.0
"""Two levels of ranks: sharded inside a group, replicated across groups."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_kernels.comm.base import Comm, PlacedParams, ReduceName, Ticket
from fsdp_kernels.streams import Streams


class HybridComm:
    """A `Comm` whose ranks hold the shards once in every shard group, as replicas of one another.

    Its `rank` and `world` are those of the shard group, which alone gathers and takes norms. A
    reduction sums inside the shard group and then, over the ranks that hold the same shard, across
    the groups. Whatever concerns the whole model (a broadcast, an agreement, a barrier) takes
    `everyone`.

    With a shard group of one rank this is plain replication: a reduction is one all-reduce.

    Args:
        shard: The ranks that share one copy of the state.
        replicate: The ranks that hold the same shard. Nothing but our reductions may run on it:
            after a failed backward ranks have issued different numbers of them.
        everyone: All ranks of both; its rank 0 is the source of initial values.
    """

    def __init__(self, shard: Comm, replicate: Comm, everyone: Comm) -> None:
        if shard.world * replicate.world != everyone.world:
            raise ValueError(
                f"HybridComm: expected {everyone.world} ranks in a grid, got {replicate.world} "
                f"replicas of {shard.world} shards. Pass the groups of one 2-D mesh."
            )
        self.shard = shard
        self.replicate = replicate
        self._everyone = everyone
        self.rank = shard.rank
        self.world = shard.world
        self.symmetric = shard.symmetric
        names = (everyone.name,) if shard.world == 1 else (shard.name, replicate.name)
        self.name = "+".join(dict.fromkeys(names))

    @property
    def everyone(self) -> Comm:
        """All ranks that train the model; see `Comm`."""
        return self._everyone

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The shard group's; see `Comm`."""
        return self.shard.process_group

    def streams(self, device: torch.device) -> Streams:
        """Return the shard group's streams; see `Comm`."""
        return self.shard.streams(device)

    def allocate(self, nbytes: int, device: torch.device, *, collective: bool) -> Tensor:
        """Return memory for the shard group's collectives; see `Comm`."""
        return self.shard.allocate(nbytes, device, collective=collective)

    def grouped(self) -> AbstractContextManager[object]:
        """Group the shard group's collectives; see `Comm`."""
        return self.shard.grouped()

    def place_params(self, nbytes: int, device: torch.device) -> PlacedParams | None:
        """Place them where the shard group can; see `Comm`."""
        return self.shard.place_params(nbytes, device)

    def grads_buffer(self, numel: int, dtype: torch.dtype, *, label: str) -> Tensor | None:
        """Return the shard group's; see `Comm`."""
        return self.shard.grads_buffer(numel, dtype, label=label)

    def prepare_reductions(self, largest_bytes: int = 0) -> None:
        """Prepare the shard group's; the other level serves reductions only; see `Comm`."""
        self.shard.prepare_reductions(largest_bytes)

    def all_gather(self, full: Tensor, shard: Tensor, *, label: str) -> Ticket:
        """Gather inside the shard group; see `Comm`."""
        return self.shard.all_gather(full, shard, label=label)

    def reduce_scatter(
        self, shard: Tensor, full: Tensor, *, label: str, lend: bool = False
    ) -> Ticket:
        """Fill `shard` with its slot of the sum over all ranks; see `Comm`.

        The second level starts when the ticket of the first is waited on, so every rank must wait
        at the same point of its sequence of reductions; not so with a shard group of one, where it
        starts at once.
        """
        first = self.shard.reduce_scatter(shard, full, label=label)
        if self.world > 1:
            return _TwoLevels(label, first, self.replicate, shard)
        first.wait()
        return self.replicate.all_reduce(shard, label=label)

    def all_reduce(self, tensor: Tensor, op: ReduceName = "sum", *, label: str) -> Ticket:
        """Reduce inside the shard group: what its ranks hold is the whole; see `Comm`."""
        return self.shard.all_reduce(tensor, op, label=label)

    def broadcast(self, tensor: Tensor, *, src: int = 0, label: str) -> Ticket:
        """Replace `tensor` by that of rank `src` of `everyone`; see `Comm`."""
        return self._everyone.broadcast(tensor, src=src, label=label)

    def agree(self, words: Tensor, *, label: str) -> Tensor:
        """Return the maximum over all ranks; see `Comm`."""
        return self._everyone.agree(words, label=label)

    def barrier(self, label: str) -> None:
        """Return once every rank of both levels has called this."""
        self._everyone.barrier(label)

    def close(self) -> None:
        """Let all three groups go; see `Comm`."""
        for comm in (self.shard, self.replicate, self._everyone):
            comm.close()


class _TwoLevels(Ticket):
    """A reduction inside the shard group, and the sum across groups that follows it."""

    __slots__ = ("_first", "_replicate", "_shard")

    def __init__(self, label: str, first: Ticket, replicate: Comm, shard: Tensor) -> None:
        super().__init__(label)
        self._first: Ticket | None = first
        self._replicate = replicate
        self._shard: Tensor | None = shard

    def _finish(self) -> None:
        first, shard = self._first, self._shard
        self._first = self._shard = None
        assert first is not None
        assert shard is not None
        first.wait()
        self._replicate.all_reduce(shard, label=self.label).wait()

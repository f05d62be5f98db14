# SPDX-License-Identifier: Apache-2.0
"""A group of one rank, which needs nobody: nothing is sent, and a gather is at most a copy."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from fsdp_kernels.comm._checks import (
    check_contiguous,
    check_op,
    check_reducible,
    check_shards,
    check_src,
)
from fsdp_kernels.comm.base import Comm, DoneTicket, PlacedParams, ReduceName, Ticket
from fsdp_kernels.streams import CudaStreams, HostStreams, Streams


class SoloComm:
    """A `Comm` of this rank alone; see there for its methods."""

    name = "solo"
    rank = 0
    world = 1
    symmetric = False

    @property
    def everyone(self) -> Comm:
        """This communicator itself; see `Comm`."""
        return self

    @property
    def process_group(self) -> None:
        """There is none; see `Comm`."""

    def streams(self, device: torch.device) -> Streams:
        """Return streams without roles; see `Comm`."""
        if device.type != "cuda":
            return HostStreams()
        return CudaStreams(current=partial(torch._C._cuda_getCurrentRawStream, device.index))

    def allocate(self, nbytes: int, device: torch.device, *, collective: bool) -> Tensor:
        """Return memory of torch's own allocator; see `Comm`."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def grouped(self) -> AbstractContextManager[object]:
        """Change nothing; see `Comm`."""
        return nullcontext()

    def place_params(self, nbytes: int, device: torch.device) -> PlacedParams | None:
        """Nothing is shared; see `Comm`."""
        return None

    def grads_buffer(self, numel: int, dtype: torch.dtype, *, label: str) -> Tensor | None:
        """Any memory does; see `Comm`."""
        return None

    def prepare_reductions(self, largest_bytes: int = 0) -> None:
        """Do nothing: there is no order to agree on; see `Comm`."""

    def all_gather(self, full: Tensor, shard: Tensor, *, label: str) -> Ticket:
        """Copy `shard`, unless it is `full`; see `Comm`."""
        check_shards(full, shard, 1, label)
        if full.data_ptr() != shard.data_ptr():
            full.data.copy_(shard)
        return DoneTicket(label)

    def reduce_scatter(
        self, shard: Tensor, full: Tensor, *, label: str, lend: bool = False
    ) -> Ticket:
        """Copy `full`, unless it is `shard`; see `Comm`."""
        check_shards(full, shard, 1, label)
        check_reducible(full, "sum", label)
        if full.data_ptr() != shard.data_ptr():
            shard.copy_(full)
        return DoneTicket(label)

    def all_reduce(self, tensor: Tensor, op: ReduceName = "sum", *, label: str) -> Ticket:
        """Leave `tensor` as it is; see `Comm`."""
        check_op(op, label)
        check_contiguous(tensor, label)
        check_reducible(tensor, op, label)
        return DoneTicket(label)

    def broadcast(self, tensor: Tensor, *, src: int = 0, label: str) -> Ticket:
        """Leave `tensor` as it is; see `Comm`."""
        check_src(src, 1, label)
        check_contiguous(tensor, label)
        return DoneTicket(label)

    def agree(self, words: Tensor, *, label: str) -> Tensor:
        """Return the words; see `Comm`."""
        return words.clone()

    def barrier(self, label: str) -> None:
        """Return at once; see `Comm`."""

    def close(self) -> None:
        """Do nothing; see `Comm`."""

# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory without a device, for ranks that are processes: memory that all of them map.

The reduce stream is a thread, so that reductions go on beside the host, as on a device. What is
launched on the current stream, the host's own, is done at once.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_kernels import ProcessGroupComm, ops
from fsdp_kernels.comm._peer_setup import Region, Whereabouts
from fsdp_kernels.comm.peer import PeerMemory

_HEADER = 4096  # bytes before a rank's memory: a counter for each channel


class HostStream:
    """The host itself."""

    cuda_stream = 1

    def launch(self, fn: Callable[[], object]) -> None:
        fn()

    def wait_event(self, event: Event) -> None:
        event.wait()


class ThreadStream:
    """A stream that a thread works off, in order; after an error it does nothing more."""

    cuda_stream = 1002

    def __init__(self) -> None:
        self.failure: RuntimeError | None = None
        self._todo: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._todo.get()()

    def launch(self, fn: Callable[[], object]) -> None:
        def attempt() -> None:
            if self.failure is None:
                try:
                    fn()
                except RuntimeError as error:
                    self.failure = error

        self._todo.put(attempt)

    def mark(self, event: Event) -> None:
        self._todo.put(lambda: event.reach(self.failure))

    def wait_event(self, event: Event) -> None:
        self.launch(event.wait)


class Event:
    def __init__(self) -> None:
        self._reached = threading.Event()
        self._failure: RuntimeError | None = None

    def record(self, stream: HostStream | ThreadStream) -> None:
        if isinstance(stream, ThreadStream):
            stream.mark(self)
        else:
            self.reach(None)

    def reach(self, failure: RuntimeError | None) -> None:
        self._failure = failure
        self._reached.set()

    def query(self) -> bool:
        return self._reached.is_set()

    def wait(self) -> None:
        self._reached.wait()
        if self._failure is not None:
            raise RuntimeError(str(self._failure))


class Cuda:
    """As much of `torch.cuda` as `PeerMemory` uses."""

    Event = Event

    def __init__(self) -> None:
        self.current: HostStream | ThreadStream = HostStream()

    def current_stream(self, device: torch.device) -> HostStream | ThreadStream:
        return self.current

    @contextmanager
    def stream(self, stream: HostStream | ThreadStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class MappedRegion:
    """Every rank's memory, mapped.

    Attributes:
        multicast: 0: there is no switch.
    """

    multicast = 0

    def __init__(self, cuda: Cuda, rank: int, files: Sequence[Tensor], pids: list[int]) -> None:
        self._cuda = cuda
        self._rank = rank
        self._files = files
        self._pids = pids
        self._arrived = [file[:_HEADER].view(torch.int64) for file in files]

    def part(self, rank: int, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        first = _HEADER + start
        return self._files[rank][first : first + numel * dtype.itemsize].view(dtype)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        self._cuda.current.launch(lambda: self._meet(channel, timeout_ms))

    def _meet(self, channel: int, timeout_ms: int) -> None:
        number = int(self._arrived[self._rank][channel]) + 1
        self._arrived[self._rank][channel] = number
        deadline = time.monotonic() + timeout_ms / 1000
        for peer, arrived in enumerate(self._arrived):
            while int(arrived[channel]) < number:
                if time.monotonic() > deadline or not _lives(self._pids[peer]):
                    raise RuntimeError(f"rank {peer} did not come to barrier {number}")
                time.sleep(0.0003)


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class MappedSide:
    """What `CudaSide` is for CUDA. Tests override what they want to go wrong."""

    def __init__(self) -> None:
        self.cuda = Cuda()
        self._path = ""

    def resolve(self, device: torch.device | str | None) -> torch.device:
        return torch.device("cpu" if device is None else device)

    def whereabouts(self, device: torch.device) -> Whereabouts:
        return Whereabouts("", ("this host",), f"GPU-{dist.get_rank()}")

    def why_unlinked(self, gpu: str, others: Sequence[str]) -> str:
        return ""

    def stream(self, device: torch.device) -> ThreadStream:
        return ThreadStream()

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        file = os.memfd_create("peer")  # stays open: the peers find it by its number
        os.ftruncate(file, _HEADER + nbytes)
        self._path = f"/proc/{os.getpid()}/fd/{file}"
        return _map(self._path)

    def rendezvous(self, memory: Tensor, group: dist.ProcessGroup) -> Region:
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, (self._path, os.getpid()), group=group)
        rank = dist.get_rank(group)
        files = [memory if r == rank else _map(path) for r, (path, _) in enumerate(found)]
        dist.barrier(group=group)
        return MappedRegion(self.cuda, rank, files, [pid for _, pid in found])

    def reduce(self, peers: Sequence[Tensor], shard: Tensor, multicast: int) -> None:
        assert not multicast
        self.cuda.current.launch(lambda: ops.reduce(peers, shard))


def _map(path: str) -> Tensor:
    return torch.from_file(path, shared=True, size=os.path.getsize(path), dtype=torch.uint8)


def make(largest_bytes: int = 0, timeout_s: float = 30.0) -> PeerMemory:
    """Make a communicator over all ranks, gathers over gloo (collective)."""
    comm = PeerMemory(base=ProcessGroupComm(), timeout_s=timeout_s, side=MappedSide())
    if largest_bytes:
        comm.prepare_reductions(largest_bytes)
    return comm

# SPDX-License-Identifier: Apache-2.0
"""Ranks of one process whose streams are queues, worked off in any order that a device may take.

The host only queues, so the ranks' programs run one after the other; then the queues are drained,
each in its own order, with events and barriers between them. What the order between queues is, a
test chooses: a wait that is missing shows as a wrong sum in some of them.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Runnable = Callable[[], bool]
"""Tries to do one thing; returns whether it is done. What waits does nothing until it may go on."""


@dataclass
class Devices:
    """The devices of all ranks.

    Attributes:
        world: Number of ranks.
        left_out: What is missing: "wait in <function of PeerGrads>", or "barrier <channel>".
    """

    world: int
    left_out: str = ""
    streams: list[Stream] = field(default_factory=list)
    arrived: dict[tuple[int, int], int] = field(default_factory=dict)

    def drain(self, choose: Callable[[Sequence[Stream]], Sequence[Stream]]) -> None:
        """Work off all queues; `choose` sorts them, the first that can go on does one thing."""
        while any(stream.todo for stream in self.streams):
            if not any(stream.step() for stream in choose(self.streams)):
                waiting = [s.name for s in self.streams if s.todo]
                raise AssertionError(f"these wait for each other: {waiting}")


class Stream:
    """A queue of one rank's device."""

    cuda_stream = 0

    def __init__(self, devices: Devices, name: str) -> None:
        self.name = name
        self.todo: deque[Runnable] = deque()
        self.devices = devices
        devices.streams.append(self)

    def step(self) -> bool:
        """Do the first thing in the queue, if it can be done now."""
        if self.todo and self.todo[0]():
            self.todo.popleft()
            return True
        return False

    def launch(self, fn: Callable[[], object]) -> None:
        def run() -> bool:
            fn()
            return True

        self.todo.append(run)

    def wait_event(self, event: Event) -> None:
        if self.devices.left_out != f"wait in {sys._getframe(1).f_code.co_name}":
            self.todo.append(lambda: event.reached)


class Event:
    reached = False

    def record(self, stream: Stream) -> None:
        stream.launch(lambda: setattr(self, "reached", True))

    def query(self) -> bool:
        return self.reached


class Cuda:
    """As much of `torch.cuda` as `PeerGrads` uses."""

    Event = Event

    def __init__(self, devices: Devices, rank: int) -> None:
        self.compute = self.current = Stream(devices, f"compute of rank {rank}")

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Region:
    """All ranks' memory."""

    multicast = 0

    def __init__(self, devices: Devices, rank: int, memory: Sequence[Tensor], cuda: Cuda) -> None:
        self._devices = devices
        self._rank = rank
        self._memory = memory
        self._cuda = cuda

    def part(self, rank: int, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        return self._memory[rank][start : start + numel * dtype.itemsize].view(dtype)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        arrived, world = self._devices.arrived, self._devices.world
        mine = (channel, self._rank)
        if self._devices.left_out == f"barrier {channel}":
            return

        def arrive() -> None:
            arrived[mine] = arrived.get(mine, 0) + 1

        def all_have_come() -> bool:
            return all(arrived.get((channel, rank), 0) >= arrived[mine] for rank in range(world))

        self._cuda.current.launch(arrive)
        self._cuda.current.todo.append(all_have_come)


@dataclass
class Side:
    """One rank's side of the devices: the kernel reads one rank after the other."""

    cuda: Any

    def reduce(self, peers: Sequence[Tensor], shard: Tensor, multicast: int) -> None:
        stream = self.cuda.current
        total = torch.zeros_like(shard)
        for peer in peers:
            stream.launch(lambda peer=peer: total.add_(peer))
        stream.launch(lambda: shard.copy_(total))


@dataclass
class Owner:
    """Stands for the communicator."""

    rank: int
    world: int
    timeout_s: float = 1.0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def failed(self, label: str, error: RuntimeError) -> RuntimeError:
        return error

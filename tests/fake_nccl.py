# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the compiled NCCL module that moves nothing: it keeps what it was called with."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from nccl_side import HostSide


class OutOfMemoryError(RuntimeError):
    pass


class FakeTicket:
    def __init__(self, label: str, comm: FakeCommunicator) -> None:
        self.label = label
        self.comm = comm
        self.waits: list[int] = []
        self.stream = comm.gather_stream
        self.started_id = self.event_id = 0

    def wait(self, stream: int) -> None:
        self.waits.append(stream)
        if self.comm.failure:
            raise RuntimeError(self.comm.failure)


class FakeBuffer:
    def __init__(self, nbytes: int, registration: str) -> None:
        self.nbytes = nbytes
        self.registration = registration
        self.memory = torch.empty(nbytes, dtype=torch.uint8)
        self.ptr = self.memory.data_ptr()


class FakeCommunicator:
    """Every call goes to `calls` as (name, arguments)."""

    gather_stream, reduce_stream = 101, 102

    def __init__(self, rank: int, world: int, unique_id: bytes, **options: Any) -> None:
        self.rank, self.world, self.unique_id, self.options = rank, world, unique_id, options
        self.has_reductions = False
        self.reduce_id = b""
        self.failure: str | None = None
        self.calls: list[tuple[Any, ...]] = []
        self.tickets: list[FakeTicket] = []
        self.closed_in: list[int] = []
        self.closed_within: list[float] = []
        self.messages: list[str] = []
        self.registers: str | None = options["registration"]
        self.exhausted = False
        self.meet: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        if name not in ("all_gather", "reduce_scatter", "all_reduce", "broadcast"):
            raise AttributeError(name)

        def call(label: str, *arguments: Any) -> FakeTicket:
            if self.failure:
                raise RuntimeError(self.failure)
            self.calls.append((name, label, *arguments))
            self.tickets.append(FakeTicket(label, self))
            return self.tickets[-1]

        return call

    def begin_group(self) -> None:
        self.calls.append(("begin_group",))

    def end_group(self, stream: int) -> None:
        self.calls.append(("end_group", stream))
        if self.failure:
            raise RuntimeError(self.failure)

    def cancel_group(self) -> None:
        self.calls.append(("cancel_group",))

    def open_reductions(self, unique_id: bytes) -> None:
        self.meet()
        self.has_reductions, self.reduce_id = True, unique_id

    def allocate(self, nbytes: int, collective: bool) -> FakeBuffer | None:
        self.calls.append(("allocate", nbytes, collective))
        if self.exhausted:
            raise OutOfMemoryError("the words of the module")
        if self.registers is None:
            return None
        alone = self.registers == "symmetric" and not collective
        return FakeBuffer(nbytes, "local" if alone else self.registers)

    def limit_registration(self, name: str) -> None:
        self.calls.append(("limit_registration", name))

    def take_messages(self) -> list[str]:
        messages, self.messages = self.messages, []
        return messages

    def abort(self, why: str) -> None:
        self.failure = self.failure or f"aborted: {why}"

    def close(self, within_s: float = math.inf) -> None:
        self.closed_in.append(os.getpid())
        self.closed_within.append(within_s)


class FakeNccl(ModuleType):
    """The module.

    Attributes:
        made: The communicators, in the order in which they were made.
        registers: What an allocation's registration comes to on each rank; None: no memory.
        group: The ranks, which come together to make a communicator.
    """

    OutOfMemoryError = OutOfMemoryError

    def __init__(self, registers: list[str | None] | None = None, group: Any = None) -> None:
        super().__init__("_nccl")
        self.torch_side = HostSide()
        self.made: list[FakeCommunicator] = []
        self.registers = registers
        self.group = group
        self.ids = 0

    def runtime_version(self) -> int:
        return 23007

    def unique_id(self) -> bytes:
        self.ids += 1
        return bytes([self.ids]) + os.urandom(127)

    def Communicator(self, rank: int, world: int, unique_id: bytes, **options: Any) -> Any:
        made = FakeCommunicator(rank, world, unique_id, **options)
        made.meet = partial(dist.barrier, self.group)
        made.meet()
        if self.registers is not None:
            made.registers = self.registers[rank]
        self.made.append(made)
        return made

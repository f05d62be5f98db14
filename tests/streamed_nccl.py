# SPDX-License-Identifier: Apache-2.0
"""`NcclComm` over the simulated module, with the compute streams of a stand-in for `torch.cuda`.

The simulation sees one compute stream, the host's own, since torch computes on the host here. Which
of several compute streams a call was made from is in the recorded log.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import nccl_sim
import torch
from nccl_side import HOST_STREAM, HostSide
from streamed_comm import Cuda, Stream

from fsdp_kernels import NcclComm
from fsdp_kernels.streams import CudaStreams, Streams
from fsdp_kernels.trace import Entry, Recorded, Waited


class _Side(HostSide):
    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    def current_stream(self, device: torch.device) -> Callable[[], int]:
        return lambda: self._cuda.current.cuda_stream

    def streams(self, native: Any, device: torch.device) -> Streams:
        gather, reduce = (
            Stream(self._cuda, handle) for handle in (native.gather_stream, native.reduce_stream)
        )
        return CudaStreams(gather, reduce, self._cuda)


class _OnHost:
    """A communicator or a ticket whose compute streams are all the host's."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._native, name)
        if name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast"):
            return lambda *args: _OnHost(value(*args[:-1], HOST_STREAM))
        if name in ("wait", "end_group"):
            return lambda _stream: value(HOST_STREAM)
        return value


def make(cuda: Cuda, policy: str = "lazy", seed: int = 0) -> NcclComm:
    """Make a communicator; its module is configured first."""
    module: Any = nccl_sim.load()
    module.configure(policy, seed)

    def communicator(*args: Any, **kwargs: Any) -> Any:
        return _OnHost(module.Communicator(*args, **kwargs))

    return NcclComm(
        module=SimpleNamespace(
            Communicator=communicator,
            OutOfMemoryError=module.OutOfMemoryError,
            unique_id=module.unique_id,
            torch_side=_Side(cuda),
        )
    )


Call = tuple[str, str, int]
"""("record" or "wait", a stream, the number of the recording)."""


def called(comm: NcclComm) -> list[Call]:
    """What CUDA was asked for, in the order of the calls, from the simulation's own log."""
    native = comm._native
    names = {HOST_STREAM: "compute", native.gather_stream: "gather", native.reduce_stream: "reduce"}
    kinds = {"cudaEventRecord": "record", "cudaStreamWaitEvent": "wait"}
    return [
        (kinds[entry[0]], names[entry[1]], entry[2])
        for entry in nccl_sim.load().log()
        if entry[0] in kinds
    ]


def noted(log: list[Entry]) -> list[Call]:
    """The same as the log has it: what the communicator did, without other events."""
    kinds = {Recorded: "record", Waited: "wait"}
    return [
        (kinds[type(entry)], entry.stream.split("#")[0], entry.event)
        for entry in log
        if isinstance(entry, (Recorded, Waited)) and entry.event > 0
    ]


def by_stream(calls: list[Call]) -> dict[str, list[Call]]:
    """What each stream was asked for, recordings numbered in order within their stream."""
    numbers: dict[int, Call] = {}
    counts: dict[str, int] = {}
    found: dict[str, list[Any]] = {}
    for kind, stream, number in calls:
        if kind == "record":
            counts[stream] = counts.get(stream, 0) + 1
            numbers[number] = (kind, stream, counts[stream])
        found.setdefault(stream, []).append((kind, *numbers[number][1:]))
    return found

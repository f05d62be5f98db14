# SPDX-License-Identifier: Apache-2.0
"""Which waits the CUDA streams ask for, over a fake of `torch.cuda` that writes them down."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_kernels.comm.solo import SoloComm
from fsdp_kernels.pool import Pool
from fsdp_kernels.stepping import Stepping
from fsdp_kernels.streams import CudaStreams, HostStreams


@dataclass
class FakeEvent:
    cuda: FakeCuda
    on: FakeStream | None = None

    def record(self, stream: FakeStream) -> None:
        self.on = stream
        self.cuda.calls.append(f"record on {stream.name}")


@dataclass
class FakeStream:
    name: str
    cuda: FakeCuda

    def wait_event(self, event: FakeEvent) -> None:
        assert event.on is not None, "waits for an event that was never recorded"
        self.cuda.calls.append(f"{self.name} waits for {event.on.name}")


@dataclass
class FakeCuda:
    """As much of `torch.cuda` as the streams use."""

    calls: list[str] = field(default_factory=list)
    asked: list[torch.device | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.current = FakeStream("compute", self)

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        self.asked.append(device)
        return self.current

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def stream(self, name: str) -> FakeStream:
        return FakeStream(name, self)


def fake() -> tuple[FakeCuda, CudaStreams]:
    cuda = FakeCuda()
    return cuda, CudaStreams(cuda.stream("gather"), cuda.stream("reduce"), cuda)


def test_on_one_compute_stream_there_are_no_events() -> None:
    cuda, streams = fake()
    freed = streams.here()
    for role in ("compute", "gather", "reduce"):
        streams.wait(role, freed)  # type: ignore[arg-type]
        streams.wait(role, None)  # type: ignore[arg-type]
    streams.wait_at(streams.here(), freed)
    streams.wait_at(None, freed)
    streams.follow(freed)
    streams.precede(freed)
    pool = Pool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), streams)
    for nbytes in (64, 64, 128):
        pool.give_back(pool.take("a", nbytes))
    assert cuda.calls == []


def test_between_two_compute_streams_a_role_waits() -> None:
    cuda, streams = fake()
    home = freed = streams.here()
    cuda.current = cuda.stream("other")
    for role in ("compute", "gather", "reduce"):
        streams.wait(role, freed)  # type: ignore[arg-type]
    assert cuda.calls[::2] == ["record on compute"] * 3
    assert cuda.calls[1::2] == [
        "other waits for compute",
        "gather waits for compute",
        "reduce waits for compute",
    ]
    del cuda.calls[:]
    streams.wait_at(home, streams.here())
    assert cuda.calls == ["record on other", "compute waits for other"]


def test_a_role_without_a_stream_is_the_current_stream() -> None:
    """Over a process group, whose collectives wait for the current stream."""
    cuda = FakeCuda()
    streams = CudaStreams(cuda=cuda)
    freed = streams.here()
    cuda.current = cuda.stream("other")
    streams.wait("gather", freed)
    assert cuda.calls == ["record on compute", "other waits for compute"]


def test_streams_that_were_destroyed_are_not_asked_to_wait() -> None:
    cuda, streams = fake()
    freed = streams.here()
    cuda.current = cuda.stream("other")
    streams.close()
    streams.wait("gather", freed)
    assert cuda.calls == ["record on compute", "other waits for compute"]


def test_the_current_stream_is_that_of_the_device() -> None:
    """Which need not be the current device."""
    device = torch.device("cuda", 3)
    cuda = FakeCuda()
    handles = iter([7, 7, 8])
    streams = CudaStreams(cuda=cuda, current=lambda: next(handles), device=device)
    assert streams.here() is streams.here()
    streams.here()
    assert cuda.asked == [device, device]  # once for each handle


def test_the_host_has_no_events() -> None:
    streams = HostStreams()
    assert streams.here() is None
    streams.wait("gather", None)
    streams.wait_at(None, None)
    streams.close()


def test_memory_goes_back_on_the_stream_that_allocated_it_after_its_last_use() -> None:
    cuda, streams = fake()
    pool = Pool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), streams)
    small = pool.take("a", 64)
    cuda.current = cuda.stream("other")
    pool.give_back(small)
    pool.take("b", 128)  # drops the slot that is too small
    assert cuda.calls == ["record on other", "compute waits for other"]


def test_a_slot_that_is_let_go_is_ordered_too() -> None:
    cuda, streams = fake()
    pool = Pool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), streams)
    slot = pool.take("a", 64)
    alias: Tensor = slot.view(16, torch.float32)[:2]
    cuda.current = cuda.stream("other")
    pool.give_back(slot)
    with pytest.warns(UserWarning, match="expected nobody to hold"):
        _ = [pool.take("b", 64) for _ in range(9)]
    assert alias.numel() == 2
    assert cuda.calls == ["record on other", "compute waits for other"]


def test_a_step_waits_for_the_streams_that_units_were_freed_on() -> None:
    cuda, streams = fake()
    stepping = Stepping([], SoloComm(), streams)
    stepping.active = True
    stepping.freed()
    cuda.current = cuda.stream("other")
    unit: Any = SimpleNamespace(stepped=False, buckets=[])
    stepping._step(unit)
    assert unit.stepped
    assert cuda.calls == ["record on compute", "other waits for compute"]

# SPDX-License-Identifier: Apache-2.0
"""Torch's side of a simulated NCCL module: CPU tensors stand for those of a device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from fsdp_kernels.streams import HostStreams, Streams

HOST_STREAM = 0  # the simulation's name for the host itself: what it enqueues there is done at once


class HostSide:
    """What `CudaSide` is for CUDA."""

    def resolve(self, device: torch.device | str | None) -> torch.device:
        wanted = torch.device("cpu" if device is None else device)
        if wanted.type != "cpu":
            raise ValueError(f"NcclComm: expected the CPU of a simulation, got {wanted}.")
        return wanted

    def current_stream(self, device: torch.device) -> Callable[[], int]:
        return lambda: HOST_STREAM

    def streams(self, native: Any, device: torch.device) -> Streams:
        return HostStreams()

    def tensor(self, buffer: Any, device: torch.device) -> torch.Tensor:
        memory = (ctypes.c_uint8 * buffer.nbytes).from_address(buffer.ptr)
        memory.owner = buffer  # torch keeps the memory's object, and so the buffer
        return torch.frombuffer(memory, dtype=torch.uint8)

    def empty_cache(self) -> None:
        """Host memory has no cache."""

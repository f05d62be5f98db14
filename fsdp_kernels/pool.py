# SPDX-License-Identifier: Apache-2.0
"""Reusable full buffers. A slot has one owner at a time; taking one in use names both claimants."""

from __future__ import annotations

import os
from bisect import bisect_left, insort_left
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fsdp_kernels.streams import Event, Streams

_nbytes = attrgetter("nbytes")
_POISON = os.environ.get("FSDP_KERNELS_DEBUG") == "1"


class Slot:
    """One buffer of the pool.

    Attributes:
        buffer: uint8, 1-D; the storage.
        nbytes: Its size.
        pointer: Its address.
        owner: Label of the bucket that holds it, or None while it is free.
        freed: Event after which the next owner may write.
        views: The owners' typed views, kept as long as the slot lives, since making them costs host
            time.
    """

    __slots__ = ("buffer", "freed", "nbytes", "owner", "pointer", "views")

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.nbytes = nbytes
        self.pointer = self.buffer.untyped_storage().data_ptr()
        self.owner: str | None = None
        self.freed: Event | None = None
        self.views: dict[Any, Any] = {}

    def view(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The first `numel` elements as a 1-D tensor of `dtype`."""
        key = (numel, dtype)
        view = self.views.get(key)
        if view is None:
            view = self.views[key] = self.buffer[: numel * dtype.itemsize].view(dtype)
        assert isinstance(view, Tensor)
        return view

    def claim(self, owner: str) -> None:
        """Make `owner` the one owner."""
        if self.owner is not None:
            raise RuntimeError(
                f"pool slot: expected a free slot for '{owner}', got one that '{self.owner}' "
                "holds. "
                "Free the first before the second gathers; this is a fault of the runtime."
            )
        self.owner = owner


class Pool:
    """Slots of one device: as many as were ever in use at once, each as large as its largest owner.

    A free slot that fits best is reused. If none fits, the largest free one is dropped for a new
    one, so the pool never holds more slots than were in use together.
    """

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._device = device
        self._streams = streams
        self._free: list[Slot] = []  # smallest first
        self._used: list[Slot] = []
        self.allocated_bytes = 0
        self.peak_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that have an owner."""
        return sum(slot.nbytes for slot in self._used)

    def take(self, owner: str, nbytes: int) -> Slot:
        """Take a slot of at least `nbytes` bytes for `owner`."""
        at = bisect_left(self._free, nbytes, key=_nbytes)
        if at < len(self._free):
            slot = self._free.pop(at)
        else:
            if self._free:
                self.allocated_bytes -= self._free.pop().nbytes
            slot = Slot(nbytes, self._device)
            self.allocated_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        slot.claim(owner)
        self._used.append(slot)
        return slot

    def give_back(self, slot: Slot) -> None:
        """Return a slot; the next owner writes after what the compute stream has now."""
        if slot.owner is None:
            raise RuntimeError(
                "pool slot: expected a slot with an owner, got a free one. It was given back twice."
            )
        if _POISON:
            slot.buffer.fill_(0xFF)  # NaN in every float format
        slot.owner = None
        slot.freed = self._streams.record("compute")
        self._used.remove(slot)
        # First of its size: what was used last, and may still be in a cache, is taken first.
        insort_left(self._free, slot, key=_nbytes)

    def trim(self) -> None:
        """Drop every free slot."""
        self.allocated_bytes = self.used_bytes
        self._free.clear()

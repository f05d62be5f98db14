# SPDX-License-Identifier: Apache-2.0
"""Reusable full buffers. A slot has one owner at a time; taking one in use names both claimants."""

from __future__ import annotations

import os
import warnings
from bisect import bisect_left, insort_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fsdp_kernels.streams import Place, Streams
from fsdp_kernels.trace import access, recording

_use_count = torch._C._storage_Use_Count
_nbytes = attrgetter("nbytes")
_PATIENCE = 2  # times that memory is short before a held slot is let go
_POISON = os.environ.get("FSDP_KERNELS_DEBUG") == "1"


class Slot:
    """One buffer of the pool.

    Attributes:
        buffer: uint8, 1-D; the storage.
        nbytes: Its size.
        pointer: Its address.
        owner: Label of the bucket that holds it, or None while it is free.
        freed: The stream that used it last, after whose work the next owner may write.
        home: The stream that the memory was allocated on.
        name: What recorded schedules call it.
        own_holders: `holders()` when the present owner took it.
        views: The owners' typed views, kept as long as the slot lives, since making them costs host
            time; add to them with `keep`.
    """

    __slots__ = (
        "_count",
        "_kept",
        "buffer",
        "freed",
        "home",
        "name",
        "nbytes",
        "own_holders",
        "owner",
        "pointer",
        "views",
    )

    def __init__(self, buffer: Tensor, home: Place | None, name: str) -> None:
        self.buffer = buffer
        self.home = home
        self.name = name
        self.nbytes = buffer.numel()
        storage = buffer.untyped_storage()
        self.pointer = storage.data_ptr()
        self._count = partial(_use_count, storage._cdata)
        self.owner: str | None = None
        self.own_holders = 0
        self.freed: Place | None = None
        self.views: dict[Any, list[Tensor]] = {}
        self._kept = 0

    def view(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The first `numel` elements as a 1-D tensor of `dtype`."""
        key = (numel, dtype)
        if key not in self.views:
            self.keep(key, [self.buffer[: numel * dtype.itemsize].view(dtype)])
        return self.views[key][0]

    def keep(self, key: Any, views: list[Tensor]) -> None:
        """Keep views of the buffer under a new key of `views`."""
        self.views[key] = views
        self._kept += len(views)

    def holders(self) -> int:
        """How many tensors hold the memory, without the views that are kept here."""
        return int(self._count()) - self._kept

    def claim(self, owner: str) -> None:
        """Make `owner` the one owner."""
        if self.owner is not None:
            raise RuntimeError(
                f"pool slot: expected a free slot for '{owner}', got one that '{self.owner}' "
                "holds. Free the first before the second gathers; this is a fault of the runtime."
            )
        self.owner = owner


@dataclass(eq=False)
class _Held:
    """A slot that was given back while somebody held a view of it."""

    slot: Slot
    owner: str
    checks: int = 0


class Pool:
    """Slots of one device: as many as were ever in use at once, each as large as its largest owner.

    A free slot that fits best is reused. If none fits, the largest free one is dropped for a new
    one, so the pool never holds more slots than were in use together.

    NOTE: a slot that somebody still holds a view of when it is given back must not be reused: its
    next owner would overwrite what that view shows. It waits apart, and is let go when the view
    stays (in a module, or with saved-tensor hooks inside a unit).

    Args:
        allocate: Returns uint8 [nbytes], of undefined content.
        streams: The streams that slots are used on.
        name: What the slots hold.
        symmetric: Whether all ranks must use the same slot at the same time. A slot that is held
            on this rank is then an error, since another rank's would be reused.
        abort: Ends the communicator, with a reason: after that error the ranks would wait for each
            other in an allocation.
    """

    def __init__(
        self,
        allocate: Callable[[int], Tensor],
        streams: Streams,
        name: str = "pool",
        *,
        symmetric: bool = False,
        abort: Callable[[str], None] | None = None,
    ) -> None:
        self._allocate = allocate
        self._streams = streams
        self._name = name
        self._made = 0
        self._symmetric = symmetric
        self._abort = abort
        self._free: list[Slot] = []  # smallest first
        self._used: list[Slot] = []
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self._held: list[_Held] = []
        self._warned = False

    def take(self, owner: str, nbytes: int) -> Slot:
        """Take a slot of at least `nbytes` bytes for `owner`."""
        if self._held:
            self._collect(nbytes)
        at = self._fitting(nbytes)
        if at < len(self._free):
            slot = self._free.pop(at)
        else:
            if self._free:
                self._drop(self._free.pop())
            name = f"{self._name} slot {self._made}"
            slot = Slot(self._allocate(nbytes), self._streams.here(), name)
            self._note("allocate", slot)
            self._made += 1
            self.allocated_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        slot.claim(owner)
        slot.own_holders = slot.holders()
        self._used.append(slot)
        return slot

    def give_back(self, slot: Slot) -> None:
        """Return a slot; the next owner writes after what the compute stream has now."""
        if slot.owner is None:
            raise RuntimeError(
                "pool slot: expected a slot with an owner, got a free one. It was given back twice."
            )
        owner, slot.owner = slot.owner, None
        self._used.remove(slot)
        slot.freed = self._streams.here()
        if slot.holders() <= slot.own_holders:
            self._add_free(slot)
            return
        if self._symmetric:
            self._drop(slot)
            text = (
                f"bucket '{owner}': expected nobody to hold its full parameters when they are "
                "freed, got a view that is still alive (kept by a module, or saved by tensor hooks "
                "inside the unit). Every rank must use the same memory here: keep a copy instead, "
                "or use NcclOptions(registration='local')."
            )
            if self._abort is not None:
                self._abort(text)
            raise RuntimeError(text)
        self._held.append(_Held(slot, owner))

    def _drop(self, slot: Slot) -> None:
        """Let a slot's memory go, on the stream that it came from."""
        self.allocated_bytes -= slot.nbytes
        self._streams.wait_at(slot.home, slot.freed)
        self._note("let go", slot)

    def _note(self, verb: str, slot: Slot, place: Place | None = None) -> None:
        if recording():
            stream = self._streams.name(place or slot.home)
            access(f"fk.{verb}[{slot.name}]", stream, writes=(slot.name,))

    def _fitting(self, nbytes: int) -> int:
        return bisect_left(self._free, nbytes, key=_nbytes)

    def _add_free(self, slot: Slot) -> None:
        if _POISON:
            self._streams.wait("compute", slot.freed)
            slot.buffer.fill_(0xFF)  # NaN in every float format
            self._note("poison", slot, self._streams.here())
            slot.freed = self._streams.here()
        # First of its size: what was used last, and may still be in a cache, is taken first.
        insort_left(self._free, slot, key=_nbytes)

    def _collect(self, nbytes: int) -> None:
        """Take back what nobody holds any more; let go of what was held too often."""
        for held in [h for h in self._held if h.slot.holders() <= h.slot.own_holders]:
            self._held.remove(held)
            self._add_free(held.slot)
        if self._fitting(nbytes) < len(self._free):
            return
        for held in self._held:
            held.checks += 1
        for held in [h for h in self._held if h.checks > _PATIENCE]:
            self._held.remove(held)
            self._let_go(held.slot, held.owner)

    def _let_go(self, slot: Slot, owner: str) -> None:
        """Leave a slot to whoever holds a view of it."""
        self._drop(slot)
        self.warn_held(owner)

    def warn_held(self, owner: str) -> None:
        """Say, once, that memory is left to whoever holds a view of it."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"bucket '{owner}': expected nobody to hold its full parameters when they are "
                "freed, got a view that is still alive (kept by a module, or saved by tensor "
                "hooks inside the unit). It stays valid, but its memory is not reused. Keep a "
                "copy instead.",
                stacklevel=4,
            )

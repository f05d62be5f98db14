# SPDX-License-Identifier: Apache-2.0
"""Collectives that a process group runs, and the memory that its threads may be at."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from fsdp_kernels.comm.base import Ticket, collective_error

if TYPE_CHECKING:
    from fsdp_kernels.comm.process_group import ProcessGroupComm

# What a backend's threads may be reading or writing: it lives until a wait has returned, and to the
# end of the process if none does.
in_flight: dict[int, tuple[Any, tuple[torch.Tensor, ...]]] = {}

_storage_over = torch._C._construct_storage_from_data_pointer


def unheld(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 1-D tensor over the same memory that does not count as a holder of it.

    Gloo's threads drop what they were given some time after the wait for it has returned. Whoever
    counts a buffer's holders then, to reuse it, would see one more on some machines and days.
    """
    return _lent(tensor.data_ptr(), tensor.nbytes, tensor.dtype)


# Kept: a tensor that only a thread of gloo's still held would have to be let go from there, under
# Python's lock, which at the end of the process is not there any more.
@lru_cache(maxsize=4096)
def _lent(pointer: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    storage = _storage_over(pointer, torch.device("cpu"), nbytes)
    with torch.inference_mode(False):  # a kept tensor must serve outside it too
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage)


class WorkTicket(Ticket):
    """A collective that torch runs."""

    __slots__ = ("_comm", "_operation", "_tensors", "_work")

    def __init__(
        self,
        label: str,
        operation: str,
        comm: ProcessGroupComm,
        work: Any,
        tensors: tuple[torch.Tensor, ...],
    ) -> None:
        super().__init__(label)
        self._operation = operation
        self._comm = comm
        self._work = work
        self._tensors = tensors
        in_flight[id(work)] = (work, tensors)

    def _finish(self) -> None:
        work, self._work = self._work, None
        try:
            work.wait()
        except RuntimeError as error:
            raise collective_error(self._operation, self.label, self._comm, error) from error
        finally:
            self._tensors = ()
        # Not after an error: the backend's threads may still be at the memory then.
        del in_flight[id(work)]


class SumTicket(WorkTicket):
    """An all-to-all whose parts are summed, in rank order, when it is waited on."""

    __slots__ = ("_scratch",)

    def __init__(
        self,
        label: str,
        comm: ProcessGroupComm,
        work: Any,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        scratch: Scratch,
    ) -> None:
        super().__init__(label, "reduce_scatter", comm, work, tensors)
        self._scratch = scratch

    def _finish(self) -> None:
        received, shard, _full = self._tensors
        super()._finish()
        with torch.no_grad():
            parts = received.view(self._comm.world, -1)
            torch.add(parts[0], parts[1], out=shard)
            for part in parts[2:]:
                shard.add_(part)
        self._scratch.give(received)


class Scratch:
    """Keeps one receive buffer between reductions: fresh large ones cost a page fault a page."""

    def __init__(self) -> None:
        self._spare: torch.Tensor | None = None

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Return a buffer of the shape and dtype of `like`; its content is undefined."""
        spare, need = self._spare, like.numel() * like.element_size()
        if spare is None or spare.numel() < need:
            return torch.empty_like(like)
        self._spare = None
        return spare[:need].view(like.dtype)

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back once nothing reads it; the larger of two stays."""
        storage = buffer.untyped_storage()
        if self._spare is None or self._spare.numel() < storage.nbytes():
            self._spare = torch.empty(0, dtype=torch.uint8).set_(storage)

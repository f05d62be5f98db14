# SPDX-License-Identifier: Apache-2.0
"""The tickets of `NcclComm`."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from fsdp_kernels import trace
from fsdp_kernels.comm.base import Ticket

if TYPE_CHECKING:
    from fsdp_kernels.comm.nccl import NcclComm


class NcclTicket(Ticket):
    """A collective that was issued to NCCL, or collected in a group.

    Attributes:
        native: The module's ticket, until the wait.
    """

    __slots__ = ("_cancelled", "_comm", "_issued_on", "_operation", "_tensors", "native")

    def __init__(
        self,
        comm: NcclComm,
        operation: str,
        native: Any,
        tensors: tuple[torch.Tensor, ...],
        stream: int,
    ) -> None:
        super().__init__(native.label)
        self._comm = comm
        self._operation = operation
        self._tensors = tensors
        self._issued_on = stream
        self.native = native
        self._cancelled = False

    def cancel(self) -> None:
        """Note that the group failed: waiting raises, and to drop the ticket is no mistake."""
        self._cancelled = True

    def _finish(self) -> None:
        self._wait_on(self._comm.current_stream())

    def _wait_on(self, stream: int) -> None:
        comm, native = self._comm, self.native
        try:
            native.wait(stream)
            if trace.recording() and native.event_id:
                trace.waited(trace.compute_stream(stream), native.event_id)
        except RuntimeError as error:
            raise comm.failed(self._operation, self.label, error) from error
        finally:
            self.native, self._tensors = None, ()

    def __del__(self) -> None:
        if getattr(self, "_pending", False) and not self._cancelled:
            # Its memory may be allocated again at once, and would be written under the collective.
            # The current stream is that of whichever thread collects garbage.
            with suppress(Exception):
                self._wait_on(self._issued_on)
            super().__del__()

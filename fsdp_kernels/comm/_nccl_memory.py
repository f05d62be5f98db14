# SPDX-License-Identifier: Apache-2.0
"""Memory that NCCL has registered, as far as every rank of an `NcclComm` can register it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fsdp_kernels.comm._nccl_end import log_messages
from fsdp_kernels.comm._nccl_setup import REGISTRATIONS, Meeting


class NcclMemory:
    """Lets every rank register as much as each of them can: NCCL wants them alike (collective).

    Args:
        meeting: Where the ranks met.
        native: The module's communicator.
        asked: The registration that the options ask for.
        largest: Returns the maximum of a number over the ranks.

    Attributes:
        symmetric: Whether peers address one another's buffers.
    """

    def __init__(
        self, meeting: Meeting, native: Any, asked: str, largest: Callable[[float], float]
    ) -> None:
        self._meeting = meeting
        self._native = native
        wanted = REGISTRATIONS.index(asked)
        # First what a rank can do alone: one that has no memory of NCCL's would leave the others
        # waiting in a collective registration.
        least = min(wanted, _least_registration(native, largest, collective=False))
        if least >= 0 and asked == "symmetric":
            least = min(wanted, _least_registration(native, largest, collective=True))
        self._allocates, self._registers = least >= 0, least > 0
        if least < wanted:
            native.limit_registration(REGISTRATIONS[max(least, 0)])
        self.symmetric = least == REGISTRATIONS.index("symmetric")
        log_messages(native)

    def allocate(self, nbytes: int, *, collective: bool) -> torch.Tensor:
        """Return memory that NCCL has registered, where it can; see `Comm`."""
        meeting = self._meeting
        buffer = None
        if nbytes and self._allocates:
            try:
                buffer = self._native.allocate(nbytes, collective)
            except meeting.out_of_memory:
                buffer = self._try_again(nbytes, collective)
            log_messages(self._native)
        if buffer is None:
            return torch.empty(nbytes, dtype=torch.uint8, device=meeting.device)
        return meeting.side.tensor(buffer, meeting.device)

    def _try_again(self, nbytes: int, collective: bool) -> Any:
        """Allocate after an attempt without success."""
        self._meeting.side.empty_cache()  # what torch keeps unused, NCCL cannot have
        try:
            return self._native.allocate(nbytes, collective)
        except self._meeting.out_of_memory as error:
            if not self._registers:
                return None
            text = (
                f"NcclComm: expected {nbytes} bytes of NCCL's memory on rank {self._meeting.rank}, "
                "got none even after torch's cache was emptied. Other ranks have registered "
                "theirs, so torch's own would not do: use smaller units or batches. "
                f"({error})"
            )
            if collective and self.symmetric:
                self._native.abort(text)  # the others wait for this rank in the registration
            raise torch.OutOfMemoryError(text) from error


def _least_registration(native: Any, largest: Callable[[float], float], *, collective: bool) -> int:
    """The least that a buffer's registration comes to on any rank; -1 where one got none."""
    buffer = native.allocate(1, collective)
    mine = -1 if buffer is None else REGISTRATIONS.index(buffer.registration)
    return -int(largest(-float(mine)))

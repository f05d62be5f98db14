# SPDX-License-Identifier: Apache-2.0
"""A reduction over peers' memory, and its ticket."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fsdp_kernels.comm._peer_log import LoggedReduction
from fsdp_kernels.comm.base import Ticket


@dataclass(slots=True, eq=False)
class Reduction:
    """One reduction over peers' memory.

    Attributes:
        label: What it is for.
        slot: Number of the slot that it uses on every rank.
        shard: Where the sum goes; None once it was waited on.
        parts: This rank's part of every rank's slot, in rank order.
        multicast: The address at which switches sum those parts; 0: by pointers.
        compute: The stream that it was posted on.
        ready: The event after the first barrier; None where the sum follows at once.
        done: The event after the sum, or after the kernel of whoever was lent the parts.
        lent: Whether the parts were lent.
        logged: What a recorded schedule knows of it.
    """

    label: str
    slot: int
    shard: Tensor | None
    parts: list[Tensor]
    multicast: int
    compute: Any
    ready: Any = None
    done: Any = None
    lent: bool = False
    logged: LoggedReduction | None = None


class Reducer(Protocol):
    """What queues reductions: `PeerGrads`."""

    def lend(self, reduction: Reduction) -> list[Tensor] | None:
        """Return the parts, to be read on the current stream until `finish`; or None."""

    def finish(self, reduction: Reduction, stream: Any = None) -> None:
        """Make a stream, or the current one, wait for the sum; or take back what was lent."""


class PeerTicket(Ticket):
    """A reduction over peers' memory.

    Args:
        label: See `Ticket`.
        grads: Whose it is.
        reduction: What it waits for.
    """

    __slots__ = ("_grads", "_reduction")

    def __init__(self, label: str, grads: Reducer, reduction: Reduction) -> None:
        super().__init__(label)
        self._grads = grads
        self._reduction: Reduction | None = reduction

    def peers(self) -> list[Tensor] | None:
        """The ranks' slots themselves, until `wait`; see `Ticket`."""
        return None if self._reduction is None else self._grads.lend(self._reduction)

    def _finish(self) -> None:
        reduction, self._reduction = self._reduction, None
        assert reduction is not None
        self._grads.finish(reduction)

    def __del__(self) -> None:
        reduction = getattr(self, "_reduction", None)
        if getattr(self, "_pending", False) and reduction is not None:
            # As in `NcclTicket`: its memory may be allocated again at once.
            with suppress(RuntimeError):
                self._grads.finish(reduction, reduction.compute)
            super().__del__()

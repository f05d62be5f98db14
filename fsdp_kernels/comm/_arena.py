# SPDX-License-Identifier: Apache-2.0
"""Memory that the ranks of one host share: its set-up over a process group, and its areas.

`docs/shared_memory.md` describes who may write and read what, when.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_kernels import _ext
from fsdp_kernels.comm._arena_setup import PLACE, ArenaUnavailable, Meeting, identity, why_apart

PREFIX = "fsdp_kernels-"  # of the files, while they have a name
ALIGNMENT = 128
_LABEL = "fk.arena"
_TEXT_BYTES = 512


@dataclass(frozen=True, eq=False)
class Area:
    """A range of a segment, at the same place on every rank.

    Attributes:
        tensor: uint8 [nbytes]; what one rank writes all see. Zeros at first. It keeps the memory
            mapped; the arena hands nothing back before it ends.
    """

    tensor: Tensor
    segment: Any
    offset: int

    def private_view(self, start: int, nbytes: int) -> PrivateView:
        """Show bytes [start, start + nbytes) once more, such that writes stay this rank's own."""
        if not (start >= 0 and nbytes >= 0 and start + nbytes <= self.tensor.numel()):
            raise ValueError(
                f"private_view: expected bytes inside [0, {self.tensor.numel()}), got {nbytes} "
                f"from {start}. Pass a part of the area."
            )
        return PrivateView(self.segment, self.offset + start, nbytes)


class PrivateView:
    """Shared bytes, copy on write.

    It costs no memory until it is written to. A page that was not written to shows what the owner
    writes to the shared bytes; one that was shows what was written here, until `revert`.

    Attributes:
        tensor: uint8 [nbytes].
    """

    def __init__(self, segment: Any, offset: int, nbytes: int) -> None:
        self._mapping = segment.private_view(offset, nbytes) if nbytes else None
        self.tensor = _tensor(self._mapping, 0, nbytes)

    def revert(self) -> None:
        """Forget what was written: the view shows the shared bytes again, and costs nothing."""
        if self._mapping is not None:
            self._mapping.revert()

    def is_written(self) -> bool:
        """Whether anything was written since `revert`; also where Linux does not say."""
        return self._mapping is not None and bool(self._mapping.is_written())


class Arena:
    """Segments of shared memory, and the epochs by which ranks wait for one another.

    Every rank makes the same calls in the same order; those marked collective wait for all. What a
    rank allocates lies at the same place on all ranks.

    Args:
        group: The ranks; `None` is the default group. Used for the set-up only.
        timeout_s: Seconds that one wait may take; `None` takes the group's own time limit.

    Raises:
        ArenaUnavailable: The ranks are not on one host, or cannot share memory there.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, timeout_s: float | None = None
    ) -> None:
        meeting = Meeting(group)
        self.rank = meeting.rank
        self.world = meeting.world
        self.timeout_s = timeout_s or meeting.timeout_s
        module = _ext.cpu()
        known = meeting.share(identity(module))
        if reason := why_apart(known):
            raise ArenaUnavailable(reason)
        assert module is not None  # why_apart said so
        self._module: Any = module
        self._segments: list[Any] = []
        self._used = 0  # bytes of the last segment
        control = self._module.Peers.control_bytes(self.world)
        messages = self._module.Exchange.bytes(self.world)
        self._add_segment(_aligned(control) + messages, meeting.share)
        segment, processes = self._segments[0], [one.process for one in known]
        self._peers = self._module.Peers(
            segment, self._take(control), processes, self.rank, self.timeout_s
        )
        self._exchange = self._module.Exchange(self._peers, segment, self._take(messages))

    # -- memory -----------------------------------------------------------------------------------

    def reserve(self, nbytes: int, *, spare_nbytes: int = 0) -> None:
        """Make one segment for what is allocated next (collective).

        Without it, every allocation that does not fit makes a segment of its own. Each area takes
        its bytes up to a multiple of `ALIGNMENT`.

        Args:
            nbytes: Of the segment.
            spare_nbytes: What must be there beside it, for later.

        Raises:
            ArenaUnavailable: There is too little shared memory; the message says how much is
                needed and there.
        """
        if spare_nbytes > 0:
            check = self._module.check_space
            error = _error(_attempt(check, PLACE, nbytes + spare_nbytes)) if self.rank == 0 else ""
            _raise_first(self._share(error))
        if nbytes > 0:
            self._add_segment(nbytes, self._share)

    def param_nbytes(self, nbytes: int) -> int:
        """What a bucket of full parameters takes of the arena, epochs included."""
        epochs: int = self._module.ParamEpochs.epochs(self.world) * ALIGNMENT
        return _aligned(nbytes) + epochs

    def grad_nbytes(self, nbytes: int, slots: int) -> int:
        """What every rank's gradient buckets take of the arena, epochs included."""
        epochs: int = self._module.GradEpochs.epochs(self.world) * ALIGNMENT
        return self.world * slots * _aligned(nbytes) + epochs

    def allocate(self, nbytes: int) -> Area:
        """Return an area of zeros (collective if the last segment has too little left).

        Raises:
            ArenaUnavailable: As for `reserve`.
        """
        offset = self._place(nbytes)
        segment = self._segments[-1]
        return Area(_tensor(segment, offset, nbytes), segment, offset)

    def allocate_each(self, nbytes: int) -> list[Area]:
        """Return one area for each rank, in rank order (collective as `allocate`)."""
        each = _aligned(nbytes)
        whole = self._place(each * self.world)
        segment = self._segments[-1]
        offsets = [whole + each * rank for rank in range(self.world)]
        return [Area(_tensor(segment, at, nbytes), segment, at) for at in offsets]

    # -- epochs -----------------------------------------------------------------------------------

    def param_epochs(self) -> Any:
        """Return the epochs of one bucket's full parameters (collective as `allocate`).

        Methods: `gather(label)`, `wait_ready(label)`, `release()`, `wait_released(label)`; `held`,
        `number`.
        """
        return self._epochs(self._module.ParamEpochs)

    def grad_epochs(self, slots: int = 2) -> Any:
        """Return the epochs of gradient buckets that are used in turn (collective as `allocate`).

        Methods: `begin(label) -> slot`, `post()`, `wait_posted(label) -> slot`, `consume()`,
        `skip(label)`; `outstanding`.

        Args:
            slots: Number of buckets of each rank: 1, 2, 4 ...
        """
        return self._epochs(self._module.GradEpochs, slots)

    def epochs(self) -> Any:
        """Return one number of each rank, zeros at first (collective as `allocate`).

        Methods: `set(number)`, `get(rank)`, `wait(number, label, operation)`: for all ranks.
        """
        return self._epochs(self._module.Epochs)

    def _epochs(self, kind: Any, *args: int) -> Any:
        offset = self._place(kind.epochs(self.world) * ALIGNMENT)
        return kind(self._peers, self._segments[-1], offset, *args)

    # -- messages ---------------------------------------------------------------------------------

    def exchange(self, words: Tensor, *, label: str, operation: str = "exchange") -> Tensor:
        """Return every rank's `words`, in rank order (collective): [world, *words.shape].

        For some kilobytes: larger messages travel in parts, each of which waits for all ranks.

        Args:
            words: A contiguous CPU tensor of the same dtype and shape on every rank.
            label: What it is for; ranks with different labels get an error.
            operation: The operation's name in errors.
        """
        if not words.is_contiguous():
            words = words.contiguous()
        out = words.new_empty((self.world, *words.shape))
        nbytes = words.numel() * words.element_size()
        self._exchange.all_gather(words.data_ptr(), nbytes, out.data_ptr(), label, operation)
        return out

    # -- the end ----------------------------------------------------------------------------------

    @property
    def failure(self) -> str | None:
        """Why no rank can wait for another any more, and which rank said so first; None if good."""
        failure: str | None = self._peers.failure
        return failure

    def abort(self, reason: str) -> None:
        """Let the next wait of every rank fail with a reason; of several, the first counts."""
        self._peers.abort(reason)

    def close(self) -> None:
        """Say that this rank is done: whoever waits for more from it gets an error.

        Memory stays mapped as long as a tensor shows it. Closing again does nothing.
        """
        self._peers.close()

    # -- segments ---------------------------------------------------------------------------------

    def _place(self, nbytes: int) -> int:
        """Return the offset, in the last segment, of bytes that nobody has yet."""
        if self._used + nbytes > self._segments[-1].nbytes:
            self._add_segment(nbytes, self._share)
        return self._take(nbytes)

    def _take(self, nbytes: int) -> int:
        offset = self._used
        self._used = _aligned(offset + nbytes)
        return offset

    def _add_segment(self, nbytes: int, share: Callable[[str], Sequence[str]]) -> None:
        """Make a segment on rank 0, map it on the others, and take its name away."""
        nbytes = _aligned(max(nbytes, 1))
        name = f"{PREFIX}{secrets.token_hex(16)}" if self.rank == 0 else ""
        path = f"{PLACE}/{share(name)[0]}"
        made: Any = ""
        try:
            if self.rank == 0:
                self._module.sweep(PLACE, PREFIX)
                made = _attempt(self._module.Segment.create, path, nbytes)
            _raise_first(share(_error(made)))
            if self.rank != 0:
                made = _attempt(self._module.Segment.open, path, nbytes)
            errors = share(_error(made))
            if any(errors):
                # Another job removes the file of a rank that has died: that death is the reason.
                share("")
            _raise_first(errors)
        finally:
            # Here, all have mapped it, or nobody will.
            self._module.unlink(path)
        self._segments.append(made)
        self._used = 0

    def _share(self, text: str) -> list[str]:
        """Return every rank's text, through the memory that is shared already."""
        row = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        words = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        rows = self.exchange(words, label=_LABEL, operation="allocate")
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]


def _attempt(make: Callable[[str, int], Any], path: str, nbytes: int) -> Any:
    """Return a segment, or the error as text: the other ranks must hear of it before any raises."""
    try:
        return make(path, nbytes)
    except RuntimeError as error:
        return str(error)


def _error(made: Any) -> str:
    return made if isinstance(made, str) else ""


def _raise_first(errors: Sequence[str]) -> None:
    for error in errors:
        if error:
            raise ArenaUnavailable(error)


def _aligned(nbytes: int) -> int:
    return math.ceil(nbytes / ALIGNMENT) * ALIGNMENT


def _tensor(buffer: Any, offset: int, nbytes: int) -> Tensor:
    if nbytes == 0:  # torch refuses a buffer of nothing
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(buffer, dtype=torch.uint8, offset=offset, count=nbytes)


def error_of(error: RuntimeError) -> RuntimeError:
    """The error to raise for one of an arena's, which becomes its cause, as in every backend."""
    return RuntimeError(str(error))

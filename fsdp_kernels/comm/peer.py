# SPDX-License-Identifier: Apache-2.0
"""CUDA ranks of one NVLink domain: reductions read peers' gradients where they were packed."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_kernels import _ext
from fsdp_kernels.comm._arena_setup import Meeting
from fsdp_kernels.comm._checks import check_reducible, check_shards
from fsdp_kernels.comm._groups import timeout_of
from fsdp_kernels.comm._peer_grads import SLOTS, PeerGrads, slot_nbytes
from fsdp_kernels.comm._peer_setup import (
    CudaSide,
    PeerUnavailable,
    Side,
    check_reach,
    connect,
    why_no_symmetric_memory,
)
from fsdp_kernels.comm.base import Comm, PlacedParams, ReduceName, Ticket, collective_error
from fsdp_kernels.comm.nccl import NcclComm
from fsdp_kernels.comm.process_group import ProcessGroupComm
from fsdp_kernels.streams import Streams

logger = logging.getLogger("fsdp_kernels")

_SUMMED = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
_PROBE_BYTES = 128


class PeerMemory:
    """A `Comm` of CUDA ranks that address one another's memory; it has not run on a GPU yet.

    Each rank packs its gradients into a slot of symmetric memory. One kernel of each rank then
    reads its shard of every rank's slot over NVLink and sums it in rank order, so that results are
    the same bits on every run; see `_peer_grads` for what waits for what. The host waits for
    nothing. Everything else (gathers, small messages, sums of other dtypes) takes another
    communicator.

    A barrier on the device that outlasts the time limit, because a rank died or did not come,
    traps: CUDA then refuses every later call of this process, and the error names the oldest
    reduction that was not seen to end. The process must be started again, with the others.

    With `multicast=True` NVLink switches sum fp32, bf16 and fp16 (sm_90 and later), so that a rank
    receives one value instead of one from each rank. They accumulate in fp32, in an order of their
    own, and round once, to the gradients' dtype: not the same bits as the sum in rank order.

    Making one is collective.

    Args:
        group: The process group; `None` is the default one. All its ranks on one host, on GPUs that
            NVLink joins.
        device: The CUDA device of this rank's tensors; `None` is the current one.
        base: What everything else takes, over the same ranks; closed with this one. `None` makes an
            `NcclComm`, or a `ProcessGroupComm` where the NCCL module was not built.
        multicast: Let switches sum where they can.
        timeout_s: Seconds that a barrier may take; `None` takes the group's limit.
        side: Torch's side of the device; tests pass a stand-in.

    Attributes:
        device: Where every tensor must be.
        timeout_s: Seconds that a barrier may take.
        failure: The first error of a reduction, which later ones raise, or None.

    Raises:
        PeerUnavailable: The ranks do not reach one another's memory: use `NcclComm`. Every rank
            raises it, with the same reason.
        RuntimeError: No process group, or one without this rank; no CUDA device.
    """

    name = "peer"

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        base: Comm | None = None,
        multicast: bool = False,
        timeout_s: float | None = None,
        side: Side | None = None,
    ) -> None:
        self._side = side = side or CudaSide()
        meeting = Meeting(group, "PeerMemory")
        self._group_of = weakref.ref(meeting.group)  # weak, as in `ProcessGroupComm`
        self.device = side.resolve(device)
        self.rank, self.world = meeting.rank, meeting.world
        self.timeout_s = timeout_s or timeout_of(meeting.group, self.device.type, "cpu")
        self.failure: str | None = None
        self._multicast = multicast
        self._grads: PeerGrads | None = None
        self._asked_grads = 0  # the largest bucket that was asked for, given or not
        self._stream: Any = None
        if self.world > 1:
            check_reach(side, self.device, meeting)
            connect(side, _PROBE_BYTES, self.device, meeting)
            self._stream = side.stream(self.device)
        self._base = base or _default_base(group, self.device)
        self.symmetric = self._base.symmetric
        self._closed = False

    # -- memory, streams, order -------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        """Whether it is open and no reduction has failed."""
        return not self._closed and self.failure is None

    @property
    def grads_nbytes(self) -> int:
        """Bytes of this rank's gradient slots; 0 before they are made."""
        return 0 if self._grads is None else SLOTS * self._grads.nbytes

    @property
    def everyone(self) -> Comm:
        """This communicator itself; see `Comm`."""
        return self

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group that it was made over, as long as it was not destroyed; see `Comm`."""
        return None if self._closed else self._group_of()

    def streams(self, device: torch.device) -> Streams:
        """Return those of the gathers; a reduction orders its own stream by itself; see `Comm`."""
        return self._base.streams(device)

    def allocate(self, nbytes: int, device: torch.device, *, collective: bool) -> Tensor:
        """Return memory for gathers; see `Comm`."""
        return self._base.allocate(nbytes, device, collective=collective)

    def place_params(self, nbytes: int, device: torch.device) -> PlacedParams | None:
        """Nothing is shared but gradients; see `Comm`."""
        return None

    def grouped(self) -> AbstractContextManager[object]:
        """Group the gathers; reductions start at once; see `Comm`."""
        grads = self._grads
        return self._base.grouped() if grads is None else _together(grads, self._base)

    def prepare_reductions(self, largest_bytes: int = 0) -> None:
        """Make gradient slots of at least so many bytes; see `Comm`.

        Without the memory for them, reductions take the other communicator.
        """
        self._check_open("fk.reduce")
        self._base.prepare_reductions(largest_bytes)
        if self.world == 1 or largest_bytes <= self._asked_grads:
            return
        self._asked_grads = largest_bytes
        nbytes, side = slot_nbytes(largest_bytes), self._side
        if self._grads is not None:
            self._grads.give_back_all(side.cuda.current_stream(self.device))
        meeting = Meeting(self._open_group(), "PeerMemory")
        try:
            region = connect(side, SLOTS * nbytes, self.device, meeting)
        except PeerUnavailable as error:
            self._say(f"gradients take {self._base.name}: {error}")
            return
        multicast = self._multicast
        self._grads = PeerGrads(self, side, region, nbytes, self._stream, multicast=multicast)
        if multicast and not self._grads.sums_in_switches:
            self._say("no switch sums for these GPUs: multicast=True changes nothing")

    def grads_buffer(self, numel: int, dtype: torch.dtype, *, label: str) -> Tensor | None:
        """Return this rank's slot for the reduction that comes next; see `Comm`."""
        grads = self._grads
        if grads is None or dtype not in _SUMMED or not 0 < numel * dtype.itemsize <= grads.nbytes:
            return None
        self._check_healthy(label)
        return grads.begin(numel, dtype, label)

    # -- collectives ------------------------------------------------------------------------------

    def all_gather(self, full: Tensor, shard: Tensor, *, label: str) -> Ticket:
        """Fill `full` with every rank's `shard`, in rank order; see `Comm`."""
        self._check_open(label)
        return self._base.all_gather(full, shard, label=label)

    def reduce_scatter(
        self, shard: Tensor, full: Tensor, *, label: str, lend: bool = False
    ) -> Ticket:
        """Fill `shard` with this rank's slot of the sum of every rank's `full`; see `Comm`."""
        check_shards(full, shard, self.world, label)
        check_reducible(full, "sum", label)
        self._check_open(label)
        here = full.device == self.device
        buffer = self.grads_buffer(full.numel(), full.dtype, label=label) if here else None
        if buffer is None:
            return self._base.reduce_scatter(shard, full, label=label, lend=lend)
        if buffer.data_ptr() != full.data_ptr():
            buffer.copy_(full)
        assert self._grads is not None  # they gave the buffer
        return self._grads.post(shard, label, lend=lend)

    def all_reduce(self, tensor: Tensor, op: ReduceName = "sum", *, label: str) -> Ticket:
        """Replace `tensor` by its sum, maximum or minimum over the ranks; see `Comm`."""
        self._check_open(label)
        return self._base.all_reduce(tensor, op, label=label)

    def broadcast(self, tensor: Tensor, *, src: int = 0, label: str) -> Ticket:
        """Replace `tensor` by that of rank `src` of the group; see `Comm`."""
        self._check_open(label)
        return self._base.broadcast(tensor, src=src, label=label)

    def agree(self, words: Tensor, *, label: str) -> Tensor:
        """Return the maximum over the ranks of words that the host holds; see `Comm`."""
        self._check_open(label)
        return self._base.agree(words, label=label)

    def barrier(self, label: str) -> None:
        """Return once every rank has called this."""
        self._check_open(label)
        self._base.barrier(label)

    def close(self) -> None:
        """Let the slots, which others may wait for, and the other communicator go; see `Comm`."""
        if not self._closed:
            self._closed = True
            grads, self._grads = self._grads, None
            if grads is not None and self.failure is None:
                with suppress(RuntimeError):  # of a device that is lost: there is nothing to do
                    grads.give_back_all(self._side.cuda.current_stream(self.device))
            self._base.close()

    # -- inside -----------------------------------------------------------------------------------

    def failed(self, label: str, error: RuntimeError) -> RuntimeError:
        """Return the error to raise for what the device said, and note it."""
        oldest = "" if self._grads is None else self._grads.oldest()
        raised = collective_error("reduce_scatter", label, self, error)
        if oldest and oldest != label:
            raised = RuntimeError(f"{raised} The oldest that was not seen to end is {oldest}.")
        if self.failure is None:
            self.failure = str(raised)
            # NOTE: torch's destructor asks CUDA, and after a trap that ends the process at once.
            _ext.never_destroy(self._grads)
        return raised

    def _check_open(self, label: str) -> None:
        if self._closed:
            raise RuntimeError(
                f"{label}: expected an open communicator, got one that was closed. "
                "Create a new PeerMemory."
            )

    def _open_group(self) -> dist.ProcessGroup:
        group = self._group_of()
        if group is None:
            raise RuntimeError(
                "fk.reduce: expected an open communicator, got one whose process group was "
                "destroyed. Create a new PeerMemory."
            )
        return group

    def _check_healthy(self, label: str) -> None:
        if self.failure is not None:
            earlier = RuntimeError(f"an earlier failure: {self.failure}")
            raise self.failed(label, earlier) from earlier

    def _say(self, what: str) -> None:
        if self.rank == 0:
            logger.warning("fk.reduce: %s", what)


@contextmanager
def _together(grads: PeerGrads, base: Comm) -> Iterator[None]:
    with base.grouped(), grads.grouped():
        yield


def _default_base(group: dist.ProcessGroup | None, device: torch.device) -> Comm:
    if _ext.nccl() is None:
        return ProcessGroupComm(group)
    return NcclComm(group, device=device)


def availability() -> str:
    """Say what stands in the way of `comm="peer"` on this host, without a CUDA context."""
    reason = why_no_symmetric_memory("cuda")
    if reason:
        return f"no: {reason}"
    return "where NVLink joins the ranks' GPUs (comm='peer' only: it has not run on a GPU yet)"

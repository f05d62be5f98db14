# SPDX-License-Identifier: Apache-2.0
"""The context that all units of one root share: it drives gather, wait, free, prefetch and reduce.

In forward, a unit's call makes it full, prefetches what the recorded order expects next, runs the
module, and frees. The root and the unit that backward needs first stay full. In backward, the first
saved weight that autograd unpacks (or an early hint from the unit's outputs) makes the unit full
again; when all its gradients have arrived it is freed and reduced (`reductions.py`). A callback at
the end of the backward reduces what is left and lets the ranks agree on what was used.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_kernels import saved_tensors
from fsdp_kernels.bucket import Bucket, Resources
from fsdp_kernels.comm.base import Comm
from fsdp_kernels.pool import Pool
from fsdp_kernels.reductions import Reductions
from fsdp_kernels.schedule import Order
from fsdp_kernels.streams import HostStreams, Streams
from fsdp_kernels.trace import emit
from fsdp_kernels.unit import Unit

_graph_task = torch._C._current_graph_task_id


class _Token:
    """Lives as long as autograd holds the callback that ends a backward."""


@dataclass(slots=True)
class Frame:
    """One running forward of a unit: what must be undone when it ends."""

    grad: bool
    in_backward: bool
    pop_hooks: bool
    restore_autocast_cache: bool


class Runtime:
    """State of one root: its units, the recorded orders, and the backward under way.

    Attributes:
        comm: The ranks.
        units: All units; the last one adopted first is the root.
        buckets: All buckets, in the units' order.
        saved: Tensors that our saved-tensor hooks have seen.
        prefetch: How many units are gathered ahead.
        reductions: When gradients are reduced, and what the ranks agree on.
    """

    def __init__(self, comm: Comm, device: torch.device, streams: Streams | None = None) -> None:
        self.comm = comm
        self.streams: Streams = streams or HostStreams()
        self.resources = Resources(
            comm, self.streams, Pool(device, self.streams), Pool(device, self.streams)
        )
        self.device = device
        self.prefetch = 1
        self.saved = 0
        self.units: list[Unit] = []
        self.buckets: list[Bucket] = []
        self.root: Unit | None = None
        self._owners: dict[int, Bucket] = {}
        self._forward = Order()
        self.reductions = Reductions(self.units, self.buckets, comm, self._forward)
        self._backward = Order()
        self._depth = 0
        self._in_backward = False
        self._ending = False
        self._current: Unit | None = None
        self._touched: list[Unit] = []
        self._callback: Callable[[], _Token | None] = lambda: None
        self._editing = False
        self._warned_autocast = False

    # -- units ------------------------------------------------------------------------------------

    def adopt(self, units: Iterable[Unit], root: Unit) -> None:
        """Take units, from other runtimes too, all sharded and idle; `root` is the outermost."""
        self.root = root
        for unit in units:
            for bucket in unit.buckets:
                bucket.move_to(self.resources)
                if not unit.adopted:
                    bucket.on_arrival(self.note_arrival)
            unit.runtime = self
            unit.adopted = True
            unit.position = len(self.units)
            self.units.append(unit)
            self.buckets.extend(unit.buckets)
        self.reductions.share_agreement(self.device)

    def claim(self, bucket: Bucket) -> None:
        """Note which bucket a slot's storage holds."""
        pointer = bucket.slot_pointer()
        if pointer:  # a bucket of empty parameters has no memory
            self._owners[pointer] = bucket

    def disclaim(self, bucket: Bucket) -> None:
        """Forget a bucket's slot."""
        self._owners.pop(bucket.slot_pointer(), None)

    def owner_of(self, tensor: Tensor) -> Bucket | None:
        """The bucket whose full buffer a tensor is a view of, or None."""
        try:
            return self._owners.get(tensor.untyped_storage().data_ptr())
        except RuntimeError:  # sparse tensors and wrappers have no memory of their own
            return None

    def emit(self, verb: str, unit: Unit) -> None:
        """Record an event of a whole unit."""
        emit(verb, unit.name)

    # -- forward ----------------------------------------------------------------------------------

    def enter(self, unit: Unit) -> Frame:
        """Make a unit full for a forward of (part of) its module."""
        in_backward = self._in_backward and self._callback() is not None
        if not in_backward and self._depth == 0:
            self.recover()
            self.reductions.settle()
            self._free_kept()
        if unit.active == 0 or not unit.is_full():
            self._open(unit, in_backward)
        grad = torch.is_grad_enabled()
        autocast = torch.is_autocast_enabled(self.device.type)
        restore = self._switch_autocast_cache_off() if autocast else False
        unit.active += 1
        self._depth += 1
        return Frame(grad, in_backward, grad and saved_tensors.push(self), restore)

    def _open(self, unit: Unit, in_backward: bool) -> None:
        if self._editing:
            raise RuntimeError(
                f"unit '{unit.label}': expected no forward inside full_params(), got one: it would "
                "not see the edits. Leave the context first."
            )
        for bucket in unit.buckets:
            bucket.check_sites()
        try:
            with _outside_inference_mode():
                if in_backward:
                    self._touch(unit)
                else:
                    self._forward.visit(unit.position)
                    self._ensure_full(unit)
                    self._prefetch(self._forward)
        except BaseException:
            if self._depth == 0 and not in_backward:
                self._abandon()
            raise
        unit.packed = 0
        unit.saved_before = self.saved

    def leave(self, unit: Unit, frame: Frame, output: Any) -> None:
        """End a forward that succeeded."""
        self._undo(unit, frame)
        if frame.in_backward or (unit.active and self._depth):
            return
        try:
            with _outside_inference_mode():
                self._close(unit, frame, output)
        except BaseException:
            if self._depth == 0:
                self._forward.abandon()
                self._free_all()
            raise

    def _close(self, unit: Unit, frame: Frame, output: Any) -> None:
        keep = self._keeps(unit, frame.grad)
        # No weight saved here: backward needs none (an embedding), or other hooks inside the unit
        # (checkpointing, a user's own) have them. Then it must be full when it is come to.
        reads = unit.packed or unit.has_children or self.saved == unit.saved_before
        for tensor in _tensors(output):
            if tensor.grad_fn is not None and reads:
                tensor.register_hook(lambda _: self._touch(unit))  # type: ignore[no-untyped-call]
            if not keep and self.owner_of(tensor) in unit.buckets:
                raise ValueError(
                    f"unit '{unit.label}': expected outputs of their own memory, got a view of its "
                    "parameters, which are freed now. Return a copy (weight.clone()), or give the "
                    "weight to the unit that uses it."
                )
        if unit.is_full():
            if keep:
                unit.hide()
            else:
                unit.free()
        if self._depth == 0:
            self._end_forward(frame.grad)

    def leave_failed(self, unit: Unit, frame: Frame) -> None:
        """End a forward that raised; in backward it may be checkpoint's early stop."""
        self._undo(unit, frame)
        if frame.in_backward:
            return
        with _outside_inference_mode():
            if self._depth == 0:
                self._forward.abandon()
                self._free_all()
            elif unit.active == 0 and unit.is_full():
                unit.free()

    def _undo(self, unit: Unit, frame: Frame) -> None:
        if frame.pop_hooks:
            saved_tensors.pop()
        if frame.restore_autocast_cache:
            torch.set_autocast_cache_enabled(True)
        unit.active -= 1
        self._depth -= 1

    def _keeps(self, unit: Unit, grad: bool) -> bool:
        upcoming = self._forward.upcoming(1)
        if upcoming and upcoming[0] == unit.position:
            return True
        return grad and (unit is self.root or self._forward.is_final(unit.position))

    def _end_forward(self, grad: bool) -> None:
        self._forward.finish()
        for unit in self.units:
            if not unit.is_sharded() and (not grad or not unit.is_full()):
                unit.free()

    def _switch_autocast_cache_off(self) -> bool:
        if not self._warned_autocast:
            self._warned_autocast = True
            warnings.warn(
                "fully_shard: expected no autocast around a sharded forward, got one. The cast "
                "weights stay in "
                "memory until backward: pass mp_policy=MixedPrecisionPolicy(param_dtype=...) "
                "instead.",
                stacklevel=4,
            )
        if not torch.is_autocast_cache_enabled():
            return False
        torch.set_autocast_cache_enabled(False)  # its copies would outlive the free
        return True

    def _free_kept(self) -> None:
        """Free what an earlier forward left full for a backward that did not come.

        Whether it is still current depends on edits on this rank alone, and all ranks must gather.
        """
        for unit in self.units:
            if unit.is_hidden() and unit.is_idle():
                unit.free()

    def come_to_rest(self) -> None:
        """Free every unit before another runtime takes them.

        Raises:
            ValueError: Gradients wait for a reduction of this runtime.
        """
        self.finish_failed()
        for unit in self.units:
            if unit.has_left_over():
                raise ValueError(
                    f"unit '{unit.label}': expected no gradients left by no_sync when an ancestor "
                    "is sharded, got some. Call zero_grad() or step() first."
                )
        self._free_all()

    def begin_editing(self) -> None:
        """Refuse forwards until `end_editing`: they would not see the edits."""
        self.recover()
        if self._depth or self._in_backward or self._editing:
            raise RuntimeError(
                "full_params: expected no forward, backward or full_params under way, got one. "
                "Call it between steps."
            )
        self._editing = True

    def end_editing(self) -> None:
        """Allow forwards again."""
        self._editing = False

    # -- gather and prefetch ----------------------------------------------------------------------

    def ensure_full(self, unit: Unit) -> None:
        """Gather and wait, for `unshard()`."""
        self.recover()
        self._ensure_full(unit)

    def _ensure_full(self, unit: Unit) -> None:
        if not unit.is_sharded() and not unit.is_current():
            unit.free()  # edited since it was gathered
        if unit.is_full():
            unit.show()
            for bucket in unit.buckets:
                bucket.sync_requires_grad()
            return
        if unit.is_sharded():
            self._gather(unit)
        unit.wait()

    def _prefetch(self, order: Order) -> None:
        for position in order.upcoming(self.prefetch):
            if self.units[position].is_sharded():
                self._gather(self.units[position])

    def _gather(self, unit: Unit) -> None:
        self.reductions.before_gather(unit, self._in_backward)
        unit.gather()

    # -- backward ---------------------------------------------------------------------------------

    def read_in_backward(self, unit: Unit, read: Callable[[], Tensor]) -> Tensor:
        """Make a unit full and read a saved weight."""
        if _graph_task() == -1:
            # Somebody looks at a node's saved tensors outside any backward: nobody would free the
            # unit later.
            was_full = unit.is_full()
            self._ensure_full(unit)
            value = read().clone()
            if not was_full:
                unit.free()
            return value
        self._touch(unit)
        # With create_graph=True the backward's own graph saves what we return, and no hook of ours
        # sees it: a view would read whatever the slot holds by then.
        return read().clone() if torch.is_grad_enabled() else read()

    def _touch(self, unit: Unit) -> None:
        """Note that backward has come to a unit: full now, the next prefetched, others let go.

        What is freed follows from the touches alone, which all ranks share, never from which
        gradients have arrived here: ranks would gather different units again.
        """
        self._enter_backward()
        previous, self._current = self._current, unit
        if previous is unit:
            self._ensure_full(unit)
            return
        for other in [u for u in self._touched if not (u.contains(unit) or unit.contains(u))]:
            self._touched.remove(other)
            if other.is_idle():
                other.free()
            self.reductions.left(other)
        if unit not in self._touched:
            self._touched.append(unit)
        self._backward.visit(unit.position)
        self._ensure_full(unit)
        self._prefetch(self._backward)

    @staticmethod
    def note_arrival(bucket: Bucket, index: int) -> None:
        """Note that autograd has left a parameter's gradient in its leaf."""
        bucket.unit.runtime._arrived(bucket, index)

    def _arrived(self, bucket: Bucket, index: int) -> None:
        self._enter_backward()
        unit, grads = bucket.unit, bucket.grads
        if not grads.arrived[index]:  # a re-entrant checkpoint may bring a second part
            grads.arrived[index] = True
            unit.arrived += 1
        self.reductions.arrived(unit)

    def _enter_backward(self) -> None:
        if self._in_backward:
            if self._callback() is not None:
                return
            self._abandon()  # the last backward failed, and another one has begun
        # Autograd drops the callback, and the token with it, when a backward fails. An inner
        # backward (re-entrant checkpointing) finds the outer one's token alive.
        token = _Token()
        self._callback = weakref.ref(token)
        end = functools.partial(self._end_backward, token)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        self._in_backward = True
        if not self._backward.last:
            self._backward.last = self._forward.first_visits()[::-1]
        self.reductions.begin_backward()

    def _end_backward(self, token: _Token) -> None:
        self._ending = True
        try:
            self.reductions.end_backward()
        except BaseException:
            self._abandon()
            raise
        finally:
            self._ending = False
        self._in_backward = False
        self._current = None
        self._touched = []
        self._backward.finish()
        for unit in self.units:
            unit.begin_count()
            if unit.is_idle():  # a forward that calls autograd.grad still runs in others
                unit.free()

    # -- failure ----------------------------------------------------------------------------------

    def recover(self) -> None:
        """Clean up after a backward that raised: its end-of-backward callback never ran."""
        if self._in_backward and not self._ending and self._callback() is None:
            self._abandon()

    def finish_failed(self) -> None:
        """Clean up after a failed backward, the reductions that it had issued too (collective)."""
        self.recover()
        self.reductions.settle()

    def finish(self) -> None:
        """What the optimizer calls first, and whoever reads `p.grad`.

        Cleans up after a failed backward, and reduces what `no_sync` left (collective then).
        """
        self.recover()
        if not self._in_backward:
            self.reductions.reduce_left_over()

    def _abandon(self) -> None:
        """Leave every unit sharded and without gradients; the ranks settle at the next forward."""
        if self._in_backward:
            self.reductions.abandon()
            if any(bucket.grads.present for bucket in self.buckets):
                warnings.warn(
                    "fully_shard: expected no failed backward before step(), got one: the "
                    "gradients that earlier backwards had accumulated were dropped with its own. "
                    "Run the step's micro-batches again.",
                    stacklevel=3,
                )
        self._in_backward = False
        self._current = None
        self._touched = []
        self._depth = 0
        self._backward.abandon()
        self._forward.abandon()
        for unit in self.units:
            unit.abandon()

    def _free_all(self) -> None:
        fault: RuntimeError | None = None
        for unit in self.units:
            if not unit.is_sharded():
                try:
                    unit.free()
                except RuntimeError as error:
                    fault = fault or error
        if fault is not None:
            raise fault


_NULL = nullcontext()


@contextmanager
def _leave_inference_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def _outside_inference_mode() -> AbstractContextManager[None]:
    """Buffers outlive the forward: made in inference mode, no later training could write them."""
    return _leave_inference_mode() if torch.is_inference_mode_enabled() else _NULL


def _tensors(output: Any) -> Iterator[Tensor]:
    """Tensors in the usual containers; in others the hint comes later, from a saved weight."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _tensors(item)
    elif isinstance(output, dict):
        for item in output.values():
            yield from _tensors(item)
    elif hasattr(output, "__dict__") and not isinstance(output, (type, torch.nn.Module)):
        for item in vars(output).values():  # a dataclass, or a class of the user's
            if isinstance(item, (Tensor, list, tuple, dict)):
                yield from _tensors(item)

# SPDX-License-Identifier: Apache-2.0
"""The context that all units of one root share: it drives gather, wait, free, prefetch and reduce.

In forward, a unit's call makes it full, prefetches what the recorded order expects next, runs the
module, and frees. The root and the unit that backward needs first stay full. In backward, the first
saved weight that autograd unpacks makes the unit full again (`backward.py`), and its gradients are
reduced at a point that all ranks share (`reductions.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_kernels import accesses, saved_tensors, trace
from fsdp_kernels.backward import Backward
from fsdp_kernels.bucket import Bucket
from fsdp_kernels.bucket_shards import Resources
from fsdp_kernels.comm.base import Comm
from fsdp_kernels.gathers import Gathers
from fsdp_kernels.pool import Pool
from fsdp_kernels.reductions import Reductions
from fsdp_kernels.schedule import Order
from fsdp_kernels.stepping import Stepping
from fsdp_kernels.trace import emit
from fsdp_kernels.unit import Unit


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
        gathers: Which units are full.
        backward: The backward under way.
        stepping: Steps that backwards take.
        reductions: When gradients are reduced, and what the ranks agree on.
    """

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self.comm = comm
        streams = comm.streams(device)

        def allocate(collective: bool) -> Callable[[int], Tensor]:
            return lambda nbytes: comm.allocate(nbytes, device, collective=collective)

        # Units are gathered in one order on every rank; gradients are packed as they come.
        symmetric, abort = comm.symmetric, getattr(comm, "abort", None)
        params = Pool(allocate(True), streams, "params", symmetric=symmetric, abort=abort)
        grads = Pool(allocate(False), streams, "grads")
        self.resources = Resources(comm, streams, params, grads)
        self.device = device
        self.saved = 0
        self.units: list[Unit] = []
        self.buckets: list[Bucket] = []
        self.root: Unit | None = None
        self._forward = Order()
        self.stepping = Stepping(self.units, comm, streams)
        self.reductions = Reductions(self.units, self.buckets, comm, self._forward, self.stepping)
        self.gathers = Gathers(self.units, self.reductions, comm, single=streams.single)
        self.backward = Backward(
            self.units, self.gathers, self.reductions, self._forward, self.stepping, self._abandon
        )
        self._depth = 0
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
                    bucket.leaves.on_arrival(bucket, self.note_arrival)
            unit.runtime = self
            unit.adopted = True
            unit.position = len(self.units)
            self.units.append(unit)
            self.buckets.extend(unit.buckets)
        self.reductions.share_agreement(self.device)

    def emit(self, verb: str, unit: Unit) -> None:
        """Record an event of a whole unit."""
        emit(verb, unit.name)

    # -- forward ----------------------------------------------------------------------------------

    def run(
        self, unit: Unit, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call (part of) a unit's module with the unit full."""
        frame = self.enter(unit)
        try:
            output = call(*args, **kwargs)
        except BaseException:
            self.leave_failed(unit, frame)
            raise
        self.leave(unit, frame, output)
        return output

    def is_inside(self, unit: Unit) -> bool:
        """Whether a forward of the unit runs that has done all that a call inside it would do."""
        return (
            unit.active > 0
            and unit.is_full()
            and (not torch.is_grad_enabled() or saved_tensors.is_innermost())
            and not torch.is_autocast_enabled(self.device.type)
        )

    def enter(self, unit: Unit) -> Frame:
        """Make a unit full for a forward of (part of) its module."""
        in_backward = self.backward.is_running()
        if not in_backward and self._depth == 0:
            self.recover()
            self.reductions.settle()
            self.stepping.check("forward")
            self.gathers.free_kept()
            self.gathers.renew()
        autocast = torch.is_autocast_enabled(self.device.type)
        restore = self._switch_autocast_cache_off() if autocast else False
        try:
            if unit.active == 0 or not unit.is_full():
                self._open(unit, in_backward)
        except BaseException:
            if restore:
                torch.set_autocast_cache_enabled(True)
            raise
        grad = torch.is_grad_enabled()
        unit.active += 1
        self._depth += 1
        if trace.recorders:
            trace.moment("begin", _forward_label(unit, in_backward))
        return Frame(grad, in_backward, grad and saved_tensors.push(self), restore)

    def _open(self, unit: Unit, in_backward: bool) -> None:
        if self._editing:
            raise RuntimeError(
                f"unit '{unit.label}': expected no forward inside full_params(), got one: it "
                "would not see the edits. Leave the context first."
            )
        for bucket in unit.buckets:
            bucket.leaves.check_sites()
        try:
            with _outside_inference_mode():
                if in_backward:
                    self._check_not_stepped(unit)
                    self.backward.touch(unit)
                else:
                    self._forward.visit(unit.position)
                    self.gathers.ensure_full(unit)
                    self.gathers.prefetch(self._forward)
        except BaseException:
            if self._depth == 0 and not in_backward:
                self._abandon()
            raise
        unit.packed = 0
        unit.saved_before = self.saved

    @staticmethod
    def _check_not_stepped(unit: Unit) -> None:
        if unit.stepped:
            raise RuntimeError(
                f"unit '{unit.label}': expected no forward of it after its step "
                "(overlap_backward=True), got one, in a recomputation that needs the weights from "
                "before. Pass overlap_backward=False."
            )

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
                self.gathers.free_all()
            raise

    def _close(self, unit: Unit, frame: Frame, output: Any) -> None:
        keep = self._keeps(unit, frame.grad)
        carry = frame.grad and not keep and self.gathers.carries(unit)
        # No weight saved here: backward needs none (an embedding), or other hooks inside the unit
        # (checkpointing, a user's own) have them. Then it must be full when it is come to.
        reads = unit.packed or unit.has_children or self.saved == unit.saved_before
        for tensor in _tensors(output):
            if tensor.grad_fn is not None and reads:
                tensor.register_hook(lambda _: unit.runtime.backward.touch(unit))  # type: ignore[no-untyped-call]
            if not keep and self.gathers.owner_of(tensor) in unit.buckets:
                raise ValueError(
                    f"unit '{unit.label}': expected outputs of their own memory, got a view of "
                    "its parameters, which are freed now. Return a copy (weight.clone()), or "
                    "give the weight to the unit that uses it."
                )
        if unit.is_full():
            if keep or carry:
                unit.carried = carry
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
                self.gathers.free_all()
            elif unit.active == 0 and unit.is_full():
                unit.free()

    def _undo(self, unit: Unit, frame: Frame) -> None:
        if frame.pop_hooks:
            saved_tensors.pop()
        if frame.restore_autocast_cache:
            torch.set_autocast_cache_enabled(True)
        unit.active -= 1
        self._depth -= 1
        if trace.recorders:
            trace.moment("end", _forward_label(unit, frame.in_backward))

    def _keeps(self, unit: Unit, grad: bool) -> bool:
        upcoming = self._forward.upcoming(1)
        if upcoming and upcoming[0] == unit.position:
            return True
        return grad and (unit is self.root or self._forward.is_final(unit.position))

    def _end_forward(self, grad: bool) -> None:
        self._forward.finish()
        self.gathers.free_after_forward(grad)

    def _switch_autocast_cache_off(self) -> bool:
        if not self._warned_autocast:
            self._warned_autocast = True
            warnings.warn(
                "fully_shard: expected no autocast around a sharded forward, got one. The cast "
                "weights stay in memory until backward: pass "
                "mp_policy=MixedPrecisionPolicy(param_dtype=...) instead.",
                stacklevel=4,
            )
        if not torch.is_autocast_cache_enabled():
            return False
        torch.set_autocast_cache_enabled(False)  # its copies would outlive the free
        return True

    def come_to_rest(self) -> None:
        """Free every unit before another runtime takes them.

        Raises:
            ValueError: Gradients wait for a reduction of this runtime.
        """
        self.finish_failed()
        self.stepping.check("fully_shard")
        for unit in self.units:
            if unit.has_left_over():
                raise ValueError(
                    f"unit '{unit.label}': expected no gradients left by no_sync when an ancestor "
                    "is sharded, got some. Call zero_grad() or step() first."
                )
        self.gathers.free_all()

    def begin_editing(self) -> None:
        """Refuse forwards until `end_editing`: they would not see the edits."""
        self.finish_failed()
        if self._depth or self.backward.under_way or self._editing:
            raise RuntimeError(
                "full_params: expected no forward, backward or full_params under way, got one. "
                "Call it between steps."
            )
        self._editing = True

    def end_editing(self) -> None:
        """Allow forwards again."""
        self._editing = False

    def ensure_full(self, unit: Unit) -> None:
        """Gather and wait, for `unshard()`."""
        self.finish_failed()
        if self._depth == 0 and not self.backward.under_way:
            self.gathers.free_kept()
            self.gathers.renew()
        self.gathers.ensure_full(unit)

    # -- backward and failure ---------------------------------------------------------------------

    @staticmethod
    def note_arrival(bucket: Bucket, index: int) -> None:
        """Note that autograd has left a parameter's gradient in its leaf."""
        bucket.grads.unpacked = True  # first: what follows may raise
        if trace.recorders:
            accesses.note_arrival(bucket, index)
        bucket.unit.runtime.backward.arrived(bucket, index)

    def recover(self) -> None:
        """Clean up after a backward that raised: its end-of-backward callback never ran."""
        if self.backward.has_failed():
            self._abandon()

    def finish(self) -> None:
        """What the optimizer calls first, and whoever reads `p.grad`.

        Cleans up after a failed backward, and reduces what `no_sync` left (collective then).
        """
        if self.backward.under_way:  # every read of a gradient comes here, so no call is made first
            self.recover()
        if self.reductions.unsettled and not self.backward.under_way:
            self.reductions.reduce_left_over()

    def before_step(self) -> None:
        """What an optimizer calls first: `finish`, and let go what a step writes in place."""
        self.finish()
        self.stepping.check("step")
        for unit in self.units:
            if not unit.is_sharded() and unit.is_placed():
                unit.free()

    def finish_failed(self) -> None:
        """Clean up after a failed backward, the reductions that it had issued too (collective).

        Whatever else is collective comes after it: another rank may be in that backward still, and
        hears of the failure here.
        """
        self.recover()
        self.reductions.settle()

    def _abandon(self) -> None:
        """Leave every unit sharded and without gradients; the ranks settle at the next forward."""
        lost = self.backward.abandon()
        self._depth = 0
        self._forward.abandon()
        for unit in self.units:
            unit.abandon()
        if lost:  # last: where warnings are errors, everything is clean by now
            warnings.warn(
                "fully_shard: expected no failed backward before step(), got one: the gradients "
                "that earlier backwards had accumulated were dropped with its own. Run the step's "
                "micro-batches again.",
                stacklevel=3,
            )


_NULL = nullcontext()


def _forward_label(unit: Unit, in_backward: bool) -> str:
    return trace.label("recompute" if in_backward else "forward", unit.name)


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

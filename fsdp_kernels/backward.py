# SPDX-License-Identifier: Apache-2.0
"""A backward under way: which unit it has come to, which gradients have arrived, how it ends.

The first saved weight that autograd unpacks, or an early hint from the unit's outputs, is a touch:
the unit becomes full, the next ones are prefetched, and units that backward has left are freed.
Gradients arrive in the leaves; `Reductions` says when they are reduced. A callback that autograd
runs at the end reduces the rest and lets the ranks agree.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fsdp_kernels import trace
from fsdp_kernels.bucket import Bucket
from fsdp_kernels.gathers import Gathers
from fsdp_kernels.reductions import Reductions
from fsdp_kernels.schedule import Order
from fsdp_kernels.stepping import Stepping
from fsdp_kernels.unit import Unit

_graph_task = torch._C._current_graph_task_id


def _nobody() -> Backward | None:
    return None


# Whose units the backward of this process came to last: one graph may lead through several roots.
_in_turn: Callable[[], Backward | None] = _nobody


class _Token:
    """Lives as long as autograd holds the callback that ends a backward."""


class Backward:
    """The backward of one root.

    Attributes:
        under_way: Whether a backward has begun and was not ended or cleaned up.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        gathers: Gathers,
        reductions: Reductions,
        forward: Order,
        stepping: Stepping,
        abandon: Callable[[], None],
    ) -> None:
        self._units = units
        self._gathers = gathers
        self._reductions = reductions
        self._forward = forward
        self._stepping = stepping
        self._abandon_root = abandon
        self._order = Order()
        self.under_way = False
        self._ending = False
        self._task = -1
        self._accumulating = False
        self._current: Unit | None = None
        self._touched: list[Unit] = []
        self._token: Callable[[], _Token | None] = lambda: None

    def is_running(self) -> bool:
        """Whether the caller is part of a backward (checkpointing runs forwards in there)."""
        return self.under_way and self._token() is not None

    def has_failed(self) -> bool:
        """Whether the last backward raised: autograd has dropped its callback uncalled."""
        return self.under_way and not self._ending and self._token() is None

    def read(self, unit: Unit, read: Callable[[], Tensor]) -> Tensor:
        """Make a unit full and read a saved weight."""
        if _graph_task() == -1:
            # Somebody looks at a node's saved tensors outside any backward: nobody would free the
            # unit later.
            was_full, was_hidden = unit.is_full(), unit.is_hidden()
            self._gathers.ensure_full(unit)
            value = read().clone()
            if not was_full:
                unit.free()
            elif was_hidden:
                unit.hide()
            return value
        self.touch(unit)
        # With create_graph=True the backward's own graph saves what we return, and no hook of ours
        # sees it: a view would read whatever the slot holds by then.
        return read().clone() if torch.is_grad_enabled() else read()

    def touch(self, unit: Unit) -> None:
        """Note that backward has come to a unit: full now, the next prefetched, others let go.

        What is freed follows from the touches alone, which all ranks share, never from which
        gradients have arrived here: ranks would gather different units again.
        """
        self._begin()
        self._take_turn()
        if unit.stepped:  # an early hint: nothing of it is wanted any more
            return
        previous, self._current = self._current, unit
        if previous is unit:
            if not self._gathers.is_ready(unit):
                self._gathers.ensure_full(unit)
            return
        if trace.recorders:
            trace.moment("turn", trace.label("backward", unit.name))
        left = [u for u in self._touched if not (u.contains(unit) or unit.contains(u))]
        for other in left:
            self._touched.remove(other)
            if other.is_idle():
                other.free()
        self._stepping.freed()
        if self._stepping.active and not self._gathers.is_expecting(self._order):
            self._reductions.finish_due()  # else the next gather does, whose round it is, too
        for other in left:
            self._reductions.left(other)
        if unit not in self._touched:
            self._touched.append(unit)
        self._order.visit(unit.position)
        self._gathers.ensure_full(unit)
        self._gathers.prefetch(self._order)

    def arrived(self, bucket: Bucket, index: int) -> None:
        """Note that autograd has left a parameter's gradient in its leaf."""
        self._begin()
        unit, grads = bucket.unit, bucket.grads
        if not bucket.resources.streams.single:
            grads.users.add(bucket.resources.streams)
        if not grads.arrived[index]:  # a re-entrant checkpoint may bring a second part
            grads.arrived[index] = True
            unit.arrived += 1
        if self._stepping.active and _graph_task() != self._task:
            unit.inner = True
        self._reductions.arrived(unit)

    def _take_turn(self) -> None:
        """Let the root that backward comes from issue what is due there, complete here or not.

        Roots may share a communicator. What one rank has issued early, since it was complete there,
        all ranks must issue before anything of the next root.
        """
        global _in_turn
        last = _in_turn()
        if last is self:
            return
        _in_turn = weakref.ref(self)
        self._reductions.in_turn = True
        if last is not None:
            last._reductions.in_turn = False
            if last.is_running():
                last._reductions.issue_due()

    def _begin(self) -> None:
        if self.under_way:
            if self._token() is not None:
                return
            self._abandon_root()  # the last backward failed, and another one has begun
        # Autograd drops the callback, and the token with it, when a backward fails. An inner
        # backward (re-entrant checkpointing) finds the outer one's token alive.
        token = _Token()
        self._token = weakref.ref(token)
        torch.autograd.Variable._execution_engine.queue_callback(
            functools.partial(self._end, token)
        )
        del token  # else it lived as long as the traceback of what is raised from here
        self.under_way = self._gathers.in_backward = True
        buckets = [bucket for unit in self._units for bucket in unit.buckets]
        self._accumulating = any(b.grads.present or b.grads.left_over for b in buckets)
        if not self._order.last:
            self._order.last = self._forward.first_visits()[::-1]
        self._reductions.begin_backward()
        self._task = _graph_task()
        self._stepping.begin()

    def _end(self, token: _Token) -> None:
        self._ending = True
        try:
            self._take_turn()
            if self._stepping.active:  # which write what peers read while a unit is full
                self._free_idle()
            self._reductions.end_backward()
            self._stepping.end()
        except BaseException:
            self._abandon_root()
            raise
        finally:
            self._ending = False
        self._order.finish()
        self._forget()
        for unit in self._units:
            unit.begin_count()
        self._free_idle()

    def _free_idle(self) -> None:
        """Free all units but those whose forward, which calls autograd itself, still runs."""
        for unit in self._units:
            if unit.is_idle():
                unit.free()
        self._stepping.freed()

    def abandon(self) -> bool:
        """After a failure: no backward is under way, and what it had issued will be settled.

        Returns:
            Whether gradients of earlier backwards are lost too.
        """
        lost = self.under_way and self._accumulating
        if self.under_way:
            self._reductions.abandon()
            self._stepping.abandon(self._current)
        self._order.abandon()
        self._forget()
        return lost

    def _forget(self) -> None:
        self.under_way = self._gathers.in_backward = False
        self._current = None
        self._touched = []
        if trace.recorders:
            trace.moment("turn", "")

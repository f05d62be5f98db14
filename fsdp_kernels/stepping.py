# SPDX-License-Identifier: Apache-2.0
"""Steps that a backward takes: which units, when, and what becomes of one that fails half-way.

An optimizer with `overlap_backward=True` registers itself here. When a reduction is waited for, the
ranks exchange one word: whether anything still speaks against a step of that unit. If nothing does,
on any rank, the bucket's owner steps with what was reduced, and the gradients' memory goes. If
something does, the unit is stepped at the end of the backward, when the ranks know which parameters
any of them used and which gradients came late.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fsdp_kernels.bucket import Bucket
from fsdp_kernels.comm.base import Comm
from fsdp_kernels.streams import Streams, Users
from fsdp_kernels.trace import label, span
from fsdp_kernels.unit import Unit


class Stepper(Protocol):
    """An optimizer that steps while backward runs."""

    def owned(self) -> Iterable[Bucket]:
        """Return the buckets whose trainable parameters are all its own.

        Raises:
            ValueError: Its settings allow no step in backward.
        """
        ...

    def step_bucket(
        self, bucket: Bucket, used: Sequence[bool], peers: Sequence[Tensor] | None
    ) -> None:
        """Step one bucket.

        Args:
            bucket: Its gradients are reduced, or are to be read from the ranks' memory.
            used: For each parameter, whether any rank has a gradient for it.
            peers: This rank's part of every rank's gradients, in rank order, each 1-D
                [shard_numel]; None: the gradient is `bucket.shard_grads`.
        """
        ...


_registered: weakref.WeakSet[Stepper] = weakref.WeakSet()


def register(stepper: Stepper) -> None:
    """Let an optimizer step in every backward of its parameters, as long as somebody holds it."""
    _registered.add(stepper)


class Stepping:
    """The steps of one root's backwards.

    Attributes:
        active: Whether the backward under way steps anything.
        failed: Labels of the units that a backward had stepped when it failed; the parameters are
            of two steps then, until somebody loads others or accepts these.
        alike: Whether all ranks had stepped the same number of units by then.
    """

    def __init__(self, units: Sequence[Unit], comm: Comm, streams: Streams) -> None:
        self._units = units
        self._comm = comm
        self._streams = streams
        self._owners: dict[int, Stepper] = {}  # by id of the bucket
        self._decided: dict[Unit, bool] = {}
        self._stepped: list[Unit] = []
        # Streams on which a unit was freed or stepped: what the next step writes was used there.
        self._users = Users()
        self.active = False
        self.failed: list[str] = []
        self.alike = True

    # -- one backward -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Find out who steps what in the backward that begins.

        Raises:
            RuntimeError: An earlier backward's step is not finished, or this one may not step.
        """
        self.check("backward")
        for unit in self._units:
            if any(bucket.grads.taken for bucket in unit.buckets):
                raise RuntimeError(
                    f"backward: expected optimizer.step() after the last backward, got another "
                    f"backward, and unit '{unit.label}' has taken its step already "
                    "(overlap_backward=True). Call step() after every backward; to accumulate "
                    "gradients over several, pass overlap_backward=False."
                )
        self._owners = self._find_owners() if _registered else {}
        self.active = bool(self._owners)
        for unit in self._units if self.active else ():
            if not unit.sync and any(id(b) in self._owners for b in unit.buckets):
                raise RuntimeError(
                    f"unit '{unit.label}': expected a backward that reduces gradients "
                    "(overlap_backward=True), got one under no_sync() or "
                    "set_requires_gradient_sync(False). Pass overlap_backward=False to accumulate."
                )

    def _find_owners(self) -> dict[int, Stepper]:
        owners: dict[int, Stepper] = {}
        several: set[int] = set()
        for stepper in list(_registered):
            for bucket in stepper.owned():
                unit = bucket.unit
                if unit.runtime.stepping is not self or unit.strategy.defers_grads:
                    continue
                if id(bucket) in owners:
                    several.add(id(bucket))
                owners[id(bucket)] = stepper
        return {key: owner for key, owner in owners.items() if key not in several}

    def freed(self) -> None:
        """Note that units were freed on the current stream."""
        if self.active:
            self._users.add(self._streams)

    def decide(self, units: Iterable[Unit]) -> None:
        """Let the ranks agree on which units are stepped as soon as they are reduced (collective).

        Nothing may speak against it on any rank: all gradients have come, so the used parameters
        are known, too, and none can come late; the unit is freed; and no graph wants its weights.
        """
        asked = [unit for unit in units if self._owns(unit)]
        if not asked:
            return
        words = torch.tensor([not self._is_ready(unit) for unit in asked], dtype=torch.float64)
        words = self._comm.agree(words, label=label("agree", "steps"))
        for unit, objections in zip(asked, words.tolist(), strict=True):
            self._decided[unit] = not objections

    def to_lend(self, unit: Unit) -> list[Bucket]:
        """Return the buckets whose gradients, reduced next, a step may read on all ranks itself."""
        if not self.active or self._decided.get(unit) is False:
            return []
        return [bucket for bucket in unit.buckets if id(bucket) in self._owners]

    def _owns(self, unit: Unit) -> bool:
        return any(id(bucket) in self._owners for bucket in unit.reduced_buckets())

    def _is_ready(self, unit: Unit) -> bool:
        return (
            unit.is_complete()
            and unit.is_sharded()
            # An inner backward (re-entrant checkpointing) may bring further parts of a gradient.
            and not (unit.late or unit.inner)
            and not any(bucket.is_wanted() for bucket in unit.buckets)
        )

    def finish(self, unit: Unit) -> None:
        """Wait for a unit's reduction, and step if the ranks agree (collective)."""
        if unit not in self._decided:
            self.decide([unit])
        if self._decided.get(unit):
            self._step(unit)
        unit.finish_reduce()

    def finish_rest(self) -> None:
        """Step what has gradients and was not stepped, at the end of a backward."""
        for unit in reversed(self._units):
            if unit.stepped or not unit.reduces_now():
                continue
            if any(id(b) in self._owners and b.grads.has_used() for b in unit.buckets):
                self._step(unit)

    def _step(self, unit: Unit) -> None:
        if not self._streams.single:
            self._users.join(self._streams)
            self._users.add(self._streams)
        unit.stepped = True
        self._stepped.append(unit)
        for bucket in unit.buckets:
            owner = self._owners.get(id(bucket))
            if owner is None or not (bucket.grads.is_reducing() or bucket.grads.has_used()):
                continue
            peers = bucket.grads.lend()
            if peers is None:
                bucket.grads.finish()
            try:
                with span("step", unit.name, bucket.index):
                    owner.step_bucket(bucket, bucket.grads.known_used(), peers)
            finally:
                bucket.grads.take()

    def end(self) -> None:
        """End a backward; whoever comes next, on this stream, comes after its steps."""
        self._users.join(self._streams)
        self._forget()

    def _forget(self) -> None:
        self._users.places.clear()
        self._owners, self._decided, self._stepped = {}, {}, []
        self.active = False

    # -- failure ----------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Note that a backward failed, and what it had stepped."""
        if self._stepped:
            self.failed = [unit.label for unit in self._stepped]
            self.reset_taken()
        self._forget()

    def check(self, where: str) -> None:
        """Raise RuntimeError while the parameters are of two steps."""
        if not self.failed:
            return
        how = "call accept_failed_backward() of the optimizer on every rank"
        raise RuntimeError(
            f"{where}: expected whole steps, got parameters of two: with overlap_backward=True a "
            f"backward had stepped {', '.join(self.failed)}, and no other unit, when it failed. "
            f"Load a checkpoint of model and optimizer; or, to go on from here, {how}."
        )

    def accept(self) -> None:
        """Go on with parameters of two steps.

        Raises:
            RuntimeError: The ranks have not stepped the same units.
        """
        if self.failed and not self.alike:
            raise RuntimeError(
                "accept_failed_backward: expected the same units stepped on all ranks, got "
                f"different ones ({', '.join(self.failed)} here). Load a checkpoint of model and "
                "optimizer."
            )
        self.reset()

    def reset(self) -> None:
        """Forget about a failed backward: others' parameters are loaded, or these accepted."""
        self.failed, self.alike = [], True
        self.reset_taken()

    def reset_taken(self) -> None:
        """Let gradients be read again that a step has taken: there are none."""
        for unit in self._units:
            for bucket in unit.buckets:
                bucket.grads.taken = False

# SPDX-License-Identifier: Apache-2.0
"""Steps that a backward takes: which units, when, and what becomes of one that fails half-way.

An optimizer with `overlap_backward=True` registers itself here. When a reduction is waited for, the
ranks say whether anything still speaks against a step of that unit. If nothing does, on any rank,
the bucket's owner steps with what was reduced, and the gradients' memory goes. If something does,
the unit is stepped at the end of the backward, when the ranks know which parameters any of them
used and which gradients came late.

Ranks must step alike: before the first backward, and whenever a backward steps, they agree on the
set of buckets that have an owner. Where none had one in the last backward, nobody asks; the first
backward that could step again does not, and its end tells whether the next one may.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Sequence
from typing import NoReturn, Protocol

from torch import Tensor

from fsdp_kernels.bucket import Bucket
from fsdp_kernels.comm.base import Comm
from fsdp_kernels.rounds import Heard, Rounds
from fsdp_kernels.streams import Streams, Users
from fsdp_kernels.trace import span
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
        owned: A number for the set of buckets that have an owner here; 0 for none.
        rounds: How many rounds the backward under way has held.
        failed: Labels of the units that a backward had stepped when it failed; the parameters are
            of two steps then, until somebody loads others or accepts these.
        apart: "" if all ranks had stepped as many units by then, or what they had stepped.
    """

    def __init__(self, units: Sequence[Unit], comm: Comm, streams: Streams) -> None:
        self._units = units
        self._rounds = Rounds(units, comm)
        self._streams = streams
        self._owners: dict[int, Stepper] = {}  # by id of the bucket
        self._agreed: int | None = None  # the last set of owned buckets that all ranks agreed on
        self._decided: dict[Unit, bool] = {}
        self._failed_at: Unit | None = None
        self._stepped: list[Unit] = []
        # Streams on which a unit was freed or stepped: what the next step writes was used there.
        self._users = Users()
        self.active = False
        self.owned = self.rounds = 0
        self.failed: list[str] = []
        self.apart = ""

    # -- one backward -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Find out who steps what in the backward that begins (collective in the first one).

        Raises:
            RuntimeError: An earlier backward's step is not finished, or this one may not step; or
                the ranks do not step the same buckets.
        """
        self.check("backward")
        if (taken := self._find_taken()) is not None:
            raise RuntimeError(
                f"backward: expected optimizer.step() after the last backward, got another "
                f"backward, and unit '{taken.label}' has taken its step already "
                "(overlap_backward=True). Call step() after every backward; to accumulate "
                "gradients over several, pass overlap_backward=False."
            )
        self._owners = self._find_owners() if _registered else {}
        owned = ",".join(self._owned_labels())
        self.owned = zlib.crc32(owned.encode()) + 1 if owned else 0
        for unit in self._units if owned else ():
            if not unit.sync and any(id(b) in self._owners for b in unit.buckets):
                raise RuntimeError(
                    f"unit '{unit.label}': expected a backward that reduces gradients "
                    "(overlap_backward=True), got one under no_sync() or "
                    "set_requires_gradient_sync(False). Pass overlap_backward=False to accumulate."
                )
        if self._agreed is None:
            self.meet()
        self.active = bool(self._agreed)
        self.rounds = 0  # that one came long before the first gather

    def _find_taken(self) -> Unit | None:
        """The first unit that a backward has stepped, and for which `step()` has not come yet."""
        for unit in self._units:
            if any(bucket.grads.taken for bucket in unit.buckets):
                return unit
        return None

    def _owned_labels(self) -> list[str]:
        owners = self._owners
        if not owners:
            return []
        return [b.label for unit in self._units for b in unit.buckets if id(b) in owners]

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
        asked = list(units)
        heard = self.meet(
            [unit for unit in asked if not (self._owns(unit) and self._is_ready(unit))]
        )
        objections = heard.units.tolist() if len(asked) > 1 else heard.units
        for unit in asked:
            self._decided[unit] = not objections[unit.position]

    def meet(self, objections: Sequence[Unit] = ()) -> Heard:
        """Hold a round: go on only if every rank is in this backward (collective).

        Raises:
            RuntimeError: A rank's backward has failed, or ranks do not step the same buckets.
        """
        heard = self._rounds.go_on(self.owned, objections)
        self.rounds += 1
        if heard.failed is not None:
            rank, unit = heard.failed
            raise RuntimeError(
                f"backward on rank {self._rounds.rank}: expected every rank to go on "
                f"(overlap_backward=True), got one that has failed on rank {rank}"
                f"{f', at unit {unit!r}' if unit else ''}. That rank's error says why. This "
                "backward ends here, too: do what that rank does next."
            )
        if not heard.alike:
            self.refuse_owned()
        self.agree_owned()
        return heard

    def agree_owned(self) -> None:
        """Note that the owned buckets are the same on every rank."""
        self._agreed = self.owned

    def refuse_owned(self) -> NoReturn:
        """Raise RuntimeError on every rank: the owned buckets are not the same."""
        owned = ", ".join(self._owned_labels()) or "none"
        raise RuntimeError(
            f"backward on rank {self._rounds.rank}: expected every rank to step the same buckets "
            f"in backward (overlap_backward=True), got other ones on another rank; here: {owned}. "
            "Make optimizers of the same parameters with the same overlap_backward on every rank, "
            "and let go of old ones on every rank (del, then gc.collect())."
        )

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
        if self._decided[unit]:
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

    def abandon(self, at: Unit | None) -> None:
        """Note that a backward failed, what it had stepped, and the unit that it had come to."""
        self._failed_at = at
        if self._stepped:
            self.failed = [unit.label for unit in self._stepped]
            self.reset_taken()
        self._forget()

    def report(self, issued: Sequence[Unit]) -> Heard:
        """Tell the others that this rank's backward has failed (collective).

        Args:
            issued: The units whose reductions it had issued, in this order.
        """
        heard = self._rounds.report(self._failed_at, issued, len(self.failed))
        (most, first), (least, other) = heard.most, heard.least
        if most != least and not heard.going:  # else there is another round
            self.apart = f"{most} units stepped on rank {first}, and {least or 'none'} on {other}"
        return heard

    def check(self, where: str) -> None:
        """Raise RuntimeError while the parameters are of two steps."""
        if not self.failed and not self.apart:
            return
        what = f"had stepped {', '.join(self.failed) or 'no unit'}"
        what += f" here ({self.apart})" if self.apart else ", and no other unit,"
        how = "call accept_failed_backward() of the optimizer on every rank"
        how = "" if self.apart else f"; or, to go on from here, {how}"
        raise RuntimeError(
            f"{where}: expected whole steps, got parameters of two: with overlap_backward=True a "
            f"backward {what} when it failed. Load a checkpoint of model and optimizer{how}."
        )

    def check_saved(self, where: str) -> None:
        """Raise RuntimeError while parameters and moments are of two steps, even if one is due."""
        self.check(where)
        if (taken := self._find_taken()) is not None:
            raise RuntimeError(
                f"{where}: expected step() after backward, got a save before it: "
                f"unit '{taken.label}' has taken its step in backward (overlap_backward=True), "
                "others may not have. Call step() first."
            )

    def accept(self) -> None:
        """Go on with parameters of two steps.

        Raises:
            RuntimeError: The ranks have not stepped the same units.
        """
        if self.apart:
            raise RuntimeError(
                "accept_failed_backward: expected the same units stepped on all ranks, got "
                f"{self.apart}. Load a checkpoint of model and optimizer."
            )
        self.reset()

    def reset(self) -> None:
        """Forget about a failed backward: others' parameters are loaded, or these accepted."""
        self.failed, self.apart = [], ""
        self.reset_taken()

    def reset_taken(self) -> None:
        """Let gradients be read again that a step has taken: there are none."""
        for unit in self._units:
            for bucket in unit.buckets:
                bucket.grads.taken = False

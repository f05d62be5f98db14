# SPDX-License-Identifier: Apache-2.0
"""What ranks tell one another while backwards step, and after a backward that failed.

A round is one exchange between the hosts, always with as many words and under one label, so that it
does not matter why a rank comes to it: a rank in the middle of a backward says which units may not
be stepped yet, a rank whose backward has failed says so, and what it had issued and stepped. So a
rank in a backward learns of another's failure at its next round, instead of waiting for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_kernels.comm.base import Comm
from fsdp_kernels.trace import label
from fsdp_kernels.unit import Unit

_NAMED = 6  # words before those of the units
_LABEL = label("agree", "backward")


class Heard(NamedTuple):
    """What all ranks have said.

    Attributes:
        failed: The first rank whose backward has failed, and the label of the unit that it had come
            to ("" before any); None if all go on.
        going: Whether any rank is in the middle of a backward.
        most: The most units that any rank had stepped, and the first such rank.
        least: The fewest, and the first such rank.
        alike: Whether all ranks step the same buckets in backward.
        units: float64 [number of units], the maximum over the ranks: of their objections, or of
            the numbers of their reductions.
    """

    failed: tuple[int, str] | None
    going: bool
    most: tuple[int, int]
    least: tuple[int, int]
    alike: bool
    units: Tensor


class Rounds:
    """The rounds of one root's ranks, all of which hold each one."""

    def __init__(self, units: Sequence[Unit], comm: Comm) -> None:
        self._units = units
        self._comm = comm

    @property
    def rank(self) -> int:
        """This rank among all that train the model."""
        return self._comm.everyone.rank

    def go_on(self, owned: int, objections: Sequence[Unit] = ()) -> Heard:
        """Say that this rank is in the middle of a backward (collective).

        Args:
            owned: A number for the set of buckets that are stepped in backward.
            objections: Units that may not be stepped yet.
        """
        words = self._words([0, 1, 0, 0, owned, -owned])
        for unit in objections:
            words[_NAMED + unit.position] = 1.0
        return self._hold(words)

    def report(self, at: Unit | None, issued: Sequence[Unit], stepped: int) -> Heard:
        """Say that this rank's backward has failed (collective).

        Args:
            at: The unit that it had come to.
            issued: The units whose reductions it had issued, in this order.
            stepped: How many units it had stepped.
        """
        comm, count = self._comm.everyone, len(self._units)
        place = count if at is None else at.position
        # Maxima are of the first rank; where a minimum is wanted, of a negative.
        failed = (comm.world - comm.rank) * (count + 1) + place
        most = stepped * comm.world + comm.world - 1 - comm.rank
        words = self._words([failed, 0, most, -(stepped * comm.world + comm.rank), 0, 0])
        for number, unit in enumerate(issued, 1):
            words[_NAMED + unit.position] = number
        return self._hold(words)

    def _words(self, named: Sequence[int]) -> Tensor:
        words = torch.zeros(_NAMED + len(self._units), dtype=torch.float64)
        words[:_NAMED] = torch.tensor(named, dtype=torch.float64)
        return words

    def _hold(self, words: Tensor) -> Heard:
        words = self._comm.agree(words, label=_LABEL)
        failed, going, most, least, owned, same = map(int, words[:_NAMED].tolist())
        world, count = self._comm.everyone.world, len(self._units)
        first = None
        if failed:
            rank, place = world - failed // (count + 1), failed % (count + 1)
            first = rank, self._units[place].label if place < count else ""
        return Heard(
            failed=first,
            going=going > 0,
            most=(most // world, world - 1 - most % world),
            least=(-least // world, -least % world),
            alike=owned == -same,
            units=words[_NAMED:],
        )

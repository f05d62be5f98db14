# SPDX-License-Identifier: Apache-2.0
"""Pure logic: the units' last order predicts what to prefetch and what to keep.

A prediction is a hint. A wrong one gathers a unit too early or frees one too soon, which costs time
and never
correctness: whoever needs a unit asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence


class Order:
    """The units of one pass, by index, as visited; the last full pass is the prediction."""

    def __init__(self) -> None:
        self.last: list[int] = []
        self._now: list[int] = []
        self._cursor = 0  # where in `last` this pass has come to

    def visit(self, unit: int) -> None:
        """Note that the pass has come to a unit."""
        self._now.append(unit)
        last, cursor = self.last, self._cursor
        if cursor < len(last) and last[cursor] == unit:
            self._cursor = cursor + 1
            return
        try:
            self._cursor = last.index(unit, cursor) + 1
        except ValueError:
            self._cursor = last.index(unit) + 1 if unit in last else cursor

    def upcoming(self, count: int) -> Sequence[int]:
        """The next `count` units that the prediction expects."""
        return self.last[self._cursor : self._cursor + count]

    def is_final(self, unit: int) -> bool:
        """Whether the prediction ends with this unit and the pass has come to its end."""
        return self._cursor == len(self.last) > 0 and self.last[-1] == unit

    def first_visits(self) -> list[int]:
        """Each unit of the present pass (else of the last) once, in the order of first visits."""
        return list(dict.fromkeys(self._now or self.last))

    def finish(self) -> None:
        """End the pass; what was visited becomes the prediction."""
        if self._now:
            self.last = self._now
        self.abandon()

    def abandon(self) -> None:
        """End a pass that failed; the prediction stays."""
        self._now = []
        self._cursor = 0

# SPDX-License-Identifier: Apache-2.0
"""A model of which only the number of parameters is known: equal transformer blocks.

A decoder's block has about 12 x width^2 parameters, and published ones are about 128 times as wide
as they are deep (GPT-3: 12,288 and 96; Llama 3 405B: 16,384 and 126). So N parameters are about
(N / (12 x 128^2))^(1/3) blocks. What the user says instead comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from fsdp_kernels.plan.job import PlannedBucket, PlannedUnit, Widths
from fsdp_kernels.plan.sizes import show_count

_WIDTH_PER_LAYER = 128
_PARAMS_PER_WIDTH = 12
_SAVED_PER_WIDTH = 16
"""Values of `width` that a block's forward keeps for each token.

Two norms' inputs and outputs (4), queries, keys and values (3), attention's output (1), and the
activation function's input and output, each four times as wide (8): arXiv:2205.05198 without
dropout's masks, and with attention that keeps no scores.
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder.

    Attributes:
        numel: All parameters.
        layers: Blocks.
        width: Channels.
        vocabulary: Rows of the embedding and of the head; 0: neither is told apart.
    """

    numel: int
    layers: int
    width: int
    vocabulary: int = 0

    @classmethod
    def of(
        cls, numel: int, layers: int | None = None, width: int | None = None, vocabulary: int = 0
    ) -> Shape:
        """Fill in what is not known.

        Raises:
            ValueError: Embedding and head alone have more parameters than the model.
        """
        if layers is None and width is None:
            layers = max(1, round((numel / _PARAMS_PER_WIDTH / _WIDTH_PER_LAYER**2) ** (1 / 3)))
        if width is None:
            assert layers is not None
            width = max(1, round((numel / _PARAMS_PER_WIDTH / layers) ** 0.5))
        if layers is None:
            layers = max(1, round(numel / _PARAMS_PER_WIDTH / width**2))
        if 2 * vocabulary * width >= numel:
            raise ValueError(
                f"--vocabulary: expected an embedding and a head smaller than the model, got "
                f"2 x {vocabulary:,} x {width:,} of {numel:,} parameters. Lower --vocabulary, or "
                "give --width."
            )
        return cls(numel, layers, width, vocabulary)

    @property
    def head_numel(self) -> int:
        """Parameters of the head, and of the embedding."""
        return self.vocabulary * self.width

    def note(self) -> str:
        """Say what is assumed."""
        return (
            f"taken as {self.layers} equal block{'s' * (self.layers > 1)} of width {self.width:,} "
            "(--layers, --width, --unit-params or a model say otherwise)"
        )

    def units(self, unit_numel: int | None, widths: Widths, tokens: int) -> tuple[PlannedUnit, ...]:
        """Cut the model into units.

        Args:
            unit_numel: Parameters of a unit; the last has the rest. None: a block is a unit.
            widths: Bytes of a parameter.
            tokens: Of a micro-batch; 0: no activations.
        """
        inside = self.numel - 2 * self.head_numel
        if unit_numel is None:
            part, more = divmod(inside, self.layers)
            numels = [part + (i < more) for i in range(self.layers)]
            name = "blocks"
        else:
            whole, rest = divmod(inside, unit_numel)
            numels = [unit_numel] * whole + [rest] * (rest > 0)
            name = "units"
        token = tokens * self.width * widths.params
        saved = _SAVED_PER_WIDTH * self.layers * token
        units = [self._root(widths, tokens)]
        for i, numel in enumerate(numels):
            share = Fraction(numel, inside)
            units.append(
                PlannedUnit(
                    f"{name}.{i}",
                    (PlannedBucket((f"{name}.{i}.weight",), (numel,), widths),),
                    saved_bytes=round(saved * share),
                    input_bytes=round(token),
                    inner_bytes=round(saved * share - token),
                    multiplied=numel,
                    attention_width=round(self.layers * self.width * share),
                )
            )
        return tuple(units)

    def _root(self, widths: Widths, tokens: int) -> PlannedUnit:
        """Embedding and head: the loss keeps the logits in the dtype of computation and in fp32."""
        if not self.vocabulary:
            return PlannedUnit("", ())
        names, numel = ("embedding.weight", "head.weight"), self.head_numel
        logits = tokens * self.vocabulary * (widths.params + 4)
        return PlannedUnit(
            "",
            (PlannedBucket(names, (numel, numel), widths),),
            saved_bytes=round(logits),
            multiplied=numel,
        )


def describe(numel: int, units: tuple[PlannedUnit, ...]) -> str:
    """Say how large a model is and how it is cut."""
    blocks = [unit.numel for unit in units[1:]]
    text = f"{show_count(numel)} parameters"
    if not blocks:
        return f"{text} in one unit"
    root = f" and a root of {show_count(units[0].numel)}" if units[0].numel else ""
    least, most = min(blocks), max(blocks)
    each = show_count(most) if least == most else f"{show_count(least)} to {show_count(most)}"
    if 0 < most - least <= most // 1000:
        each = f"about {show_count(int(float(f'{most:.3g}')))}"
    return f"{text}: {len(blocks)} unit{'s' * (len(blocks) > 1)} of {each}{root}"

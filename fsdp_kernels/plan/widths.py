# SPDX-License-Identifier: Apache-2.0
"""From dtypes and an optimizer to bytes of a parameter."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from fsdp_kernels.plan.job import Widths
from fsdp_kernels.plan.sizes import DTYPE_BYTES

_SCALE_BYTES = Fraction(4, 256)  # one fp32 scale for each block of 256 8-bit values
_MOMENTS = {"adam": 2, "adamw": 2, "sgd": 0, "momentum": 1, "adam8bit": 2}

OPTIMIZERS = tuple(_MOMENTS)
OVERLAPPING = ("adam", "adamw")  # that can step in backward


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes by name, and an optimizer; None: what training does if nothing is said.

    Attributes:
        param: Of computation: `MixedPrecisionPolicy.param_dtype`.
        grad: Of the gradients that the step reads; None: the parameter's own.
        reduce: Of reductions: `MixedPrecisionPolicy.reduce_dtype`.
        master: Of the copy that the step writes; "none": there is none.
        state: Of the optimizer's moments.
        optimizer: One of `OPTIMIZERS`.
    """

    param: str | None = None
    grad: str | None = None
    reduce: str | None = None
    master: str | None = None
    state: str | None = None
    optimizer: str = "adam"

    def widths(self, own: str, *, trained: bool = True) -> Widths:
        """Return the bytes of a parameter whose own dtype is `own`.

        As `fully_shard` and `ShardedAdamW` do: gradients and moments have the parameter's own
        dtype, moments at least fp32. Where that is not the dtype of computation, the parameter
        itself is the master; where it is narrower than fp32, Adam keeps one in fp32.
        """
        compute = self.param or own
        low = DTYPE_BYTES[own] < 4
        master = 0 if compute == own else DTYPE_BYTES[own]
        if trained and low and self.optimizer.startswith("adam"):
            master += 4
        if self.master is not None:
            master = 0 if self.master == "none" else DTYPE_BYTES[self.master]
        state = DTYPE_BYTES[self.state or ("fp32" if low else own)]
        return Widths(
            params=Fraction(DTYPE_BYTES[compute]),
            grads=Fraction(DTYPE_BYTES[self.grad or own] * trained),
            reduce=Fraction(DTYPE_BYTES[self.reduce or compute] * trained),
            master=Fraction(master),
            state=self._moments(state) * trained,
        )

    def _moments(self, nbytes: int) -> Fraction:
        each = Fraction(nbytes)
        if self.optimizer == "adam8bit":
            each = 1 + _SCALE_BYTES
        return _MOMENTS[self.optimizer] * each

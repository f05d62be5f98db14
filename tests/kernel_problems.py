# SPDX-License-Identifier: Apache-2.0
"""Inputs of the kernel contract, poisoned outside the fragments, and its oracle in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from triton_ops import _common as common
from triton_ops._common import AdamShard
from triton_ops._fragments import FragmentTable

STEPS = 3


@dataclass(frozen=True)
class Implementation:
    """One set of the four kernels."""

    pack: Callable[..., None]
    norm: Callable[..., Tensor]
    adam_coefs: Callable[..., None]
    adam: Callable[..., None]
    device: str = "cpu"


@dataclass(frozen=True)
class Precision:
    """A storage dtype with the tolerance of one rounding to it."""

    dtype: torch.dtype
    rtol: float

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.")


FP32 = Precision(torch.float32, 1e-6)
BF16 = Precision(torch.bfloat16, 2**-8)
FP16 = Precision(torch.float16, 2**-10)
FP64 = Precision(torch.float64, 1e-12)
LOW = (FP32, BF16, FP16)


@dataclass(frozen=True)
class Mode:
    """The flags of one Adam."""

    decoupled: bool = True
    amsgrad: bool = False
    maximize: bool = False

    def __str__(self) -> str:
        flags = [name for name in ("amsgrad", "maximize") if getattr(self, name)]
        return "-".join(["adamw" if self.decoupled else "adam", *flags])


MODES = [Mode(d, a, m) for d in (True, False) for a in (False, True) for m in (False, True)]


def place(numels: list[int], *, align: int = 8, gap: int = 0) -> FragmentTable:
    """Lay fragments of these lengths one after the other, row = position; 0 makes an empty one."""
    fragments, start = [], 0
    for row, numel in enumerate(numels):
        fragments.append((start, start + numel, row))
        start = -(-(start + numel + gap) // align) * align
    return FragmentTable.build(fragments)


TABLES = {
    "nothing": place([0, 0]),
    "one-element": place([1]),
    "even": place([2048, 8, 64]),
    "primes": place([1, 7, 0, 13, 127, 2, 257, 1009], gap=9),
    "blocks": place([3 * common.BLOCK_NUMEL + 5, 16, common.BLOCK_NUMEL, 5 * common.BLOCK_NUMEL]),
    "quarter-aligned": place([13, 129, 1500], align=4),  # 16 bytes of float32 only
    "unaligned": place([5, 77, 1031, 3], align=1),
}
TAIL = 37  # elements after the last fragment


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare bit for bit, NaNs included."""
    as_bytes = [tensor.detach().cpu().contiguous().view(torch.uint8) for tensor in (a, b)]
    return a.dtype == b.dtype and torch.equal(*as_bytes)


def close(actual: Tensor, expected: Tensor, rtol: float, what: str, scale: float = 1.0) -> None:
    """Compare with a float64 oracle to ``rtol`` of each element and of what it was made from.

    A sum that cancels is as wrong as its terms: ``scale`` is their magnitude. NaNs and infinities
    must be at the same places.
    """
    actual, expected = actual.double().cpu(), expected.double().cpu()
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=rtol * scale, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


@dataclass
class Problem:
    """One shard with its fragments and hyper-parameters, poisoned outside the fragments."""

    table: FragmentTable
    shard: AdamShard
    hyper: Tensor
    step: Tensor
    used: Tensor
    factor: Tensor

    @classmethod
    def make(
        cls,
        table: FragmentTable,
        device: str = "cpu",
        *,
        grads: torch.dtype = torch.float32,
        params: torch.dtype | None = torch.bfloat16,
        amsgrad: bool = False,
        master: torch.dtype = torch.float32,
    ) -> Problem:
        rows, numel = max(table.n_rows, 1), table.end + TAIL
        inside = covered(table, numel)

        def fill(values: Tensor, dtype: torch.dtype) -> Tensor:
            return torch.where(inside, values, math.nan).to(dtype).to(device)

        shard = AdamShard(
            grads=fill(torch.randn(numel), grads),
            master=fill(torch.randn(numel), master),
            exp_avg=fill(torch.randn(numel) * 0.1, master),
            exp_avg_sq=fill(torch.rand(numel) * 0.1, master),
            max_exp_avg_sq=fill(torch.rand(numel) * 0.1, master) if amsgrad else None,
            params=None if params is None else fill(torch.full((numel,), math.nan), params),
        )
        hyper = torch.stack(
            (
                10 ** torch.empty(rows).uniform_(-4, -1),
                torch.empty(rows).uniform_(0.0, 0.95),
                torch.empty(rows).uniform_(0.9, 0.999),
                10 ** torch.empty(rows).uniform_(-8, -4),
                torch.empty(rows).uniform_(0.0, 0.3),
            ),
            dim=1,
        ).double()
        step = torch.randint(0, 20, (rows,)).float()
        step[0] = 0.0  # a first update is among them
        used = torch.rand(rows) < 0.7
        factor = torch.rand(1, dtype=torch.float64) + 0.1
        return cls(table, shard, *(t.to(device) for t in (hyper, step, used, factor)))

    def clone(self, device: str) -> Problem:
        """Copy everything to a device."""
        buffers = {name: tensor.clone().to(device) for name, tensor in self.shard.named().items()}
        rest = (self.hyper, self.step, self.used, self.factor)
        return Problem(self.table, AdamShard(**buffers), *(t.clone().to(device) for t in rest))

    def run(self, kernels: Implementation, mode: Mode, skip: Tensor | None, scale: float) -> None:
        """Take one step with an implementation."""
        rows = self.step.numel()
        coefs = torch.full((rows, common.COEF_COLUMNS), math.nan, dtype=torch.float64)
        coefs = coefs.to(self.step.device)
        kernels.adam_coefs(self.hyper, self.step, self.used, skip, coefs, decoupled=mode.decoupled)
        kernels.adam(
            self.shard,
            self.table,
            coefs,
            self.factor,
            scale=scale,
            decoupled=mode.decoupled,
            maximize=mode.maximize,
        )


def covered(table: FragmentTable, numel: int, rows: Tensor | None = None) -> Tensor:
    """Mark the elements of the fragments (of the marked rows)."""
    inside = torch.zeros(numel, dtype=torch.bool)
    for start, stop, row in zip(table.starts, table.stops, table.rows, strict=True):
        inside[start:stop] = True if rows is None else rows[row]
    return inside


class Oracle:
    """Adam in float64, from the papers' formulas, fed the same low-precision gradients."""

    def __init__(self, problem: Problem) -> None:
        shard = problem.shard
        self.p, self.m, self.v = (
            t.double().cpu().clone() for t in (shard.master, shard.exp_avg, shard.exp_avg_sq)
        )
        v_max = shard.max_exp_avg_sq
        self.v_max = None if v_max is None else v_max.double().cpu().clone()
        self.step = problem.step.cpu().tolist()

    def update(self, problem: Problem, mode: Mode, scale: float) -> None:
        grads = problem.shard.grads.double().cpu() * (problem.factor.item() * scale)
        table, used = problem.table, problem.used.tolist()
        hyper = problem.hyper.tolist()
        self.step = [step + on for step, on in zip(self.step, used, strict=True)]
        for start, stop, row in zip(table.starts, table.stops, table.rows, strict=True):
            if used[row]:
                self._fragment(slice(start, stop), grads[start:stop], hyper[row], row, mode)

    def _fragment(self, part: slice, g: Tensor, hyper: list[float], row: int, mode: Mode) -> None:
        lr, beta1, beta2, eps, weight_decay = hyper
        step = self.step[row]
        if mode.maximize:
            g = -g
        if mode.decoupled:
            self.p[part] *= 1 - lr * weight_decay
        else:
            g = g + weight_decay * self.p[part]
        self.m[part] = beta1 * self.m[part] + (1 - beta1) * g
        self.v[part] = beta2 * self.v[part] + (1 - beta2) * g * g
        second = self.v[part]
        if self.v_max is not None:
            second = self.v_max[part] = torch.maximum(self.v_max[part], second)
        m_hat = self.m[part] / (1 - beta1**step)
        v_hat = second / (1 - beta2**step)
        self.p[part] -= lr * m_hat / (v_hat.sqrt() + eps)

    def compare(self, problem: Problem, rtol: float) -> None:
        inside = covered(problem.table, self.p.numel())
        shard = problem.shard
        expected = {"master": self.p, "exp_avg": self.m, "exp_avg_sq": self.v}
        if self.v_max is not None:
            expected["max_exp_avg_sq"] = self.v_max
        for name, value in expected.items():
            scale = {"master": 1.0, "exp_avg": 1.0}.get(name, 0.1)
            close(getattr(shard, name).cpu()[inside], value[inside], rtol, name, scale)
        assert problem.step.tolist() == self.step

# SPDX-License-Identifier: Apache-2.0
"""What every implementation of the kernels must do: a contract class, run by `test_kernels.py`.

Inputs are fresh each run (the seed is printed), the oracle is written out in float64 here, a dtype
and its tolerance travel together, and every byte outside the fragments is poisoned with NaN and
must stay as it was.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from triton_ops import _common as common
from triton_ops import reference
from triton_ops._common import AdamShard, FragmentTable

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
_TAIL = 37  # elements after the last fragment


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare bit for bit, NaNs included."""
    as_bytes = [tensor.detach().cpu().contiguous().view(torch.uint8) for tensor in (a, b)]
    return a.dtype == b.dtype and torch.equal(*as_bytes)


def close(actual: Tensor, expected: Tensor, rtol: float, what: str) -> None:
    """Compare with a float64 oracle, element-wise, to ``rtol`` of each element and of the largest.

    Only elements that are finite in the oracle; NaNs and infinities must be at the same places.
    """
    actual, expected = actual.double().cpu(), expected.double().cpu()
    scale = float(expected[expected.isfinite()].abs().max()) if expected.isfinite().any() else 0.0
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
        rows, numel = max(table.n_rows, 1), table.end + _TAIL
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
            close(getattr(shard, name).cpu()[inside], value[inside], rtol, name)
        assert problem.step.tolist() == self.step


class KernelContract:
    """The tests; a subclass names the implementation."""

    kernels: Implementation

    @pytest.fixture(autouse=True)
    def _fresh_inputs(self) -> Iterator[None]:
        seed = secrets.randbits(32)
        print(f"seed {seed}")  # pytest shows it where a test fails
        state = torch.random.get_rng_state()
        torch.manual_seed(seed)
        yield
        torch.random.set_rng_state(state)

    # ---- adam

    def check_steps(
        self,
        table: FragmentTable,
        grads: Precision,
        params: Precision | None,
        mode: Mode,
        state: Precision = FP32,
    ) -> None:
        """Take steps with fresh gradients; compare with the oracle and with what may not change."""
        problem = Problem.make(
            table,
            self.kernels.device,
            grads=grads.dtype,
            params=params.dtype if params else None,
            amsgrad=mode.amsgrad,
            master=state.dtype,
        )
        problem.used[0] = True
        oracle = Oracle(problem)
        inside = covered(table, table.end + _TAIL)
        for _ in range(STEPS):
            before = problem.clone("cpu").shard.named()
            scale = secrets.choice((1.0, 1 / 3, 0.25))
            problem.run(self.kernels, mode, None, scale)
            oracle.update(problem, mode, scale)
            changed = covered(table, inside.numel(), problem.used.cpu())
            for name, tensor in problem.shard.named().items():
                now, old = tensor.cpu(), before[name]
                same = ~changed if name != "grads" else torch.ones_like(changed)
                assert same_bits(now[same], old[same]), f"{name} changed where it may not"
            if problem.shard.params is not None:
                cast = problem.shard.master.to(problem.shard.params.dtype)
                assert same_bits(problem.shard.params.cpu()[changed], cast.cpu()[changed])
            fresh = torch.where(inside, torch.randn(inside.numel()), math.nan)
            problem.shard.grads.copy_(fresh)
            problem.used.copy_(torch.rand(problem.used.numel()) < 0.7)
        oracle.compare(problem, 3 * state.rtol)

    @pytest.mark.parametrize("params", [None, *LOW], ids=str)
    @pytest.mark.parametrize("grads", LOW, ids=str)
    def test_adam_dtypes(self, grads: Precision, params: Precision | None) -> None:
        self.check_steps(TABLES["primes"], grads, params, Mode())

    @pytest.mark.parametrize("mode", MODES, ids=str)
    def test_adam_modes(self, mode: Mode) -> None:
        self.check_steps(TABLES["primes"], BF16, BF16, mode)

    @pytest.mark.parametrize("name", TABLES)
    def test_adam_geometry(self, name: str) -> None:
        self.check_steps(TABLES[name], BF16, BF16, Mode(amsgrad=True))

    @pytest.mark.parametrize("mode", MODES, ids=str)
    @pytest.mark.parametrize("grads", LOW, ids=str)
    def test_adam_gives_the_bits_of_the_reference(self, grads: Precision, mode: Mode) -> None:
        ours = Problem.make(TABLES["blocks"], grads=grads.dtype, amsgrad=mode.amsgrad)
        ours.used.fill_(True)
        theirs = ours.clone("cpu")
        ours = ours.clone(self.kernels.device)
        coefs = torch.empty(ours.step.numel(), common.COEF_COLUMNS, dtype=torch.float64)
        reference.adam_coefs(
            theirs.hyper, theirs.step, theirs.used, None, coefs, decoupled=mode.decoupled
        )
        options: dict[str, Any] = {
            "scale": 1 / 3,
            "decoupled": mode.decoupled,
            "maximize": mode.maximize,
        }
        for _ in range(2):
            reference.adam(theirs.shard, theirs.table, coefs, theirs.factor, **options)
            self.kernels.adam(
                ours.shard, ours.table, coefs.to(self.kernels.device), ours.factor, **options
            )
            for name, tensor in theirs.shard.named().items():
                assert same_bits(getattr(ours.shard, name), tensor), name

    def test_adam_keeps_a_non_finite_gradient_to_its_element(self) -> None:
        for amsgrad in (False, True):
            problem = Problem.make(TABLES["even"], self.kernels.device, amsgrad=amsgrad)
            problem.used.fill_(True)
            problem.shard.grads[3], problem.shard.grads[70], problem.shard.grads[2050] = (
                math.nan,
                math.inf,
                -math.inf,
            )
            oracle = Oracle(problem)
            mode = Mode(amsgrad=amsgrad)
            problem.run(self.kernels, mode, None, 1.0)
            oracle.update(problem, mode, 1.0)
            oracle.compare(problem, 3 * FP32.rtol)
            assert int(problem.shard.master[: TABLES["even"].end].isnan().sum()) == 3

    def test_adam_reads_the_factor_in_float64(self) -> None:
        # 2**-150 is 0 in float32: a loss scale and a clip factor may meet only in the product.
        problem = Problem.make(TABLES["even"], self.kernels.device)
        problem.used.fill_(True)
        problem.factor.fill_(2.0**-150)
        oracle = Oracle(problem)
        problem.run(self.kernels, Mode(), None, 2.0**149)
        oracle.update(problem, Mode(), 2.0**149)
        oracle.compare(problem, 3 * FP32.rtol)

    @pytest.mark.parametrize("skip", [1.0, 2.0])
    def test_a_skipped_step_changes_no_byte(self, skip: float) -> None:
        problem = Problem.make(TABLES["primes"], self.kernels.device, amsgrad=True)
        before = problem.clone("cpu")
        problem.run(self.kernels, Mode(), torch.tensor([skip], device=self.kernels.device), 1.0)
        assert same_bits(problem.step, before.step)
        for name, tensor in problem.shard.named().items():
            assert same_bits(tensor, getattr(before.shard, name)), name

    def test_skip_of_zero_does_not_skip(self) -> None:
        problem = Problem.make(TABLES["primes"], self.kernels.device)
        oracle = Oracle(problem)
        problem.run(self.kernels, Mode(), torch.zeros(1, device=self.kernels.device), 1.0)
        oracle.update(problem, Mode(), 1.0)
        oracle.compare(problem, 3 * FP32.rtol)

    def test_adam_refuses_what_does_not_fit(self) -> None:
        problem = Problem.make(TABLES["even"], self.kernels.device)
        coefs = torch.zeros(3, common.COEF_COLUMNS, dtype=torch.float64, device=self.kernels.device)
        beyond = FragmentTable.build([(0, problem.shard.master.numel() + 1, 0)])
        cases: list[tuple[FragmentTable, Tensor, Tensor, str]] = [
            (beyond, coefs, problem.factor, "expected fragments inside"),
            (problem.table, coefs[:2], problem.factor, "at least 3 rows"),
            (problem.table, coefs.float(), problem.factor, "coefs float64"),
            (problem.table, coefs, problem.factor.float(), "factor float64"),
        ]
        for table, rows, factor, message in cases:
            with pytest.raises(ValueError, match=message):
                self.kernels.adam(problem.shard, table, rows, factor)
        with pytest.raises(ValueError, match="exp_avg"):
            replace(problem.shard, exp_avg=problem.shard.exp_avg.bfloat16())

    # ---- adam_coefs

    @pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
    @pytest.mark.parametrize("rows", [0, 1, 7, 300])
    def test_coefs(self, rows: int, decoupled: bool) -> None:
        device = self.kernels.device
        hyper = torch.rand(rows, common.HYPER_COLUMNS, dtype=torch.float64) * 0.999
        hyper[:3, 1] = 0.0  # beta1 of plain RMS scaling
        step = torch.randint(0, 1000, (rows,)).float()
        step[::5] = 0.0
        step[1::50] = 1e6
        used = torch.rand(rows) < 0.6
        ours, out = step.clone().to(device), torch.full((rows, 9), math.nan, dtype=torch.float64)
        out = out.to(device)
        self.kernels.adam_coefs(
            hyper.to(device), ours, used.to(device), None, out, decoupled=decoupled
        )
        assert torch.equal(ours.cpu(), step + used)
        expected = []
        for (lr, beta1, beta2, eps, decay), count, on in zip(
            hyper.tolist(), (step + used).tolist(), used.tolist(), strict=True
        ):
            count = max(count, 1.0)
            expected.append(
                [
                    float(on),
                    beta1,
                    1 - beta1,
                    beta2,
                    1 - beta2,
                    lr / (1 - beta1**count),
                    math.sqrt(1 - beta2**count),
                    eps,
                    1 - lr * decay if decoupled else decay,
                ]
            )
        wanted = torch.tensor(expected, dtype=torch.float64).reshape(rows, 9)
        torch.testing.assert_close(out.cpu(), wanted, rtol=1e-11, atol=0.0)

    def test_coefs_of_a_first_step_are_accurate(self) -> None:
        # In float32, 1 - 0.999 is off by 2e-5 of itself.
        device = self.kernels.device
        row = [1e-3, 0.9, 0.999, 1e-8, 0.0]
        hyper = torch.tensor([row], dtype=torch.float64, device=device)
        out = torch.empty(1, 9, dtype=torch.float64, device=device)
        used = torch.ones(1, dtype=torch.bool, device=device)
        self.kernels.adam_coefs(
            hyper, torch.zeros(1, device=device), used, None, out, decoupled=True
        )
        assert out[0, common.STEP_SIZE].item() == pytest.approx(1e-2, rel=1e-12)
        expected = math.sqrt(1e-3)
        assert out[0, common.BIAS_CORRECTION2_SQRT].item() == pytest.approx(expected, rel=1e-12)

    # ---- against torch.optim

    @pytest.mark.parametrize("mode", MODES, ids=str)
    def test_ten_steps_of_torch_optim(self, mode: Mode) -> None:
        device, table = self.kernels.device, place([40, 1, 257, 64], gap=3)
        numels = [stop - start for start, stop in zip(table.starts, table.stops, strict=True)]
        values = [torch.nn.Parameter(torch.randn(n, device=device)) for n in numels]
        groups: list[dict[str, Any]] = [
            {"params": values[:2], "lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1},
            {"params": values[2:], "lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6},
        ]
        kind = torch.optim.AdamW if mode.decoupled else torch.optim.Adam
        optimizer = kind(groups, amsgrad=mode.amsgrad, maximize=mode.maximize, foreach=False)
        problem = Problem.make(table, device, amsgrad=mode.amsgrad)
        for name, tensor in problem.shard.named().items():
            tensor.fill_(math.nan if name == "params" else 0.0)
        problem.step.zero_()
        for row, value in enumerate(values):
            part = slice(table.starts[row], table.stops[row])
            problem.shard.master[part] = value.detach()
            group = optimizer.param_groups[row // 2]
            entries = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
            problem.hyper[row] = torch.tensor(entries, dtype=torch.float64)
        for number in range(10):
            problem.used.copy_(torch.tensor([True, number % 3 != 1, number > 4, True]))
            for row, value in enumerate(values):
                gradient = torch.randn(numels[row], device=device)
                part = slice(table.starts[row], table.stops[row])
                problem.shard.grads[part] = gradient / problem.factor.float()
                used = bool(problem.used[row])
                value.grad = problem.shard.grads[part] * problem.factor.float() if used else None
            optimizer.step()
            problem.run(self.kernels, mode, None, 1.0)
            for row, value in enumerate(values):
                part = slice(table.starts[row], table.stops[row])
                close(problem.shard.master[part], value.detach(), 2e-6, f"step {number} row {row}")

    # ---- norm

    @pytest.mark.parametrize("name", TABLES)
    @pytest.mark.parametrize("grads", LOW, ids=str)
    def test_norm(self, grads: Precision, name: str) -> None:
        table = TABLES[name]
        flat = Problem.make(table, self.kernels.device, grads=grads.dtype).shard.grads
        inside = covered(table, flat.numel())
        result = self.kernels.norm(flat, table)
        assert result.dtype == torch.float64
        assert result.shape == (2,)
        expected = flat.double().cpu()[inside].square().sum()
        torch.testing.assert_close(result[0].cpu(), expected, rtol=1e-6, atol=0.0)
        assert result[1].item() == 0
        assert same_bits(self.kernels.norm(flat, table), result)  # the same order every time

    @pytest.mark.parametrize("grads", LOW, ids=str)
    def test_norm_counts_what_is_not_finite(self, grads: Precision) -> None:
        table = TABLES["primes"]
        flat = Problem.make(table, self.kernels.device, grads=grads.dtype).shard.grads
        inside = covered(table, flat.numel()).nonzero().flatten()
        for number, value in enumerate((math.inf, -math.inf, math.nan), start=1):
            flat[inside[torch.randint(0, len(inside), (1,))]] = value
            flat[inside[-number]] = value  # in a ragged tail
            total, bad = self.kernels.norm(flat, table).tolist()
            assert bad == int((~flat.cpu()[inside].isfinite()).sum())
            assert math.isnan(total) if number == 3 else total == math.inf

    @pytest.mark.parametrize("magnitude", [1e30, 1e20, 1e-15, 1e-23, 1e-40])
    def test_norm_neither_overflows_nor_underflows(self, magnitude: float) -> None:
        table = TABLES["blocks"]
        flat = Problem.make(table, self.kernels.device).shard.grads * magnitude
        expected = flat.double().cpu()[covered(table, flat.numel())].square().sum()
        result = self.kernels.norm(flat, table)
        torch.testing.assert_close(result[0].cpu(), expected, rtol=1e-6, atol=0.0)
        assert result[1].item() == 0

    # ---- pack

    @pytest.mark.parametrize("out", LOW, ids=str)
    @pytest.mark.parametrize("grads", LOW, ids=str)
    @pytest.mark.parametrize("accumulate", [False, True], ids=["write", "accumulate"])
    def test_pack(self, grads: Precision, out: Precision, accumulate: bool) -> None:
        shapes = [(3, 5), (), (0, 4), (127,), None, (common.BLOCK_NUMEL * 2 + 3,), (16, 8), (64,)]
        self.check_pack([_gradient(shape, grads.dtype) for shape in shapes], out, accumulate)

    @pytest.mark.parametrize("accumulate", [False, True], ids=["write", "accumulate"])
    def test_pack_of_strided_unaligned_and_mixed_gradients(self, accumulate: bool) -> None:
        base = torch.randn(40, 56)
        gradients: list[Tensor | None] = [
            base.t(),
            base[:, 3:17],
            base.flatten()[1:1000],  # contiguous, not at a multiple of 16 bytes
            base.bfloat16().flatten()[3:300],
            torch.randn(7, 1).expand(7, 9),
            base.half(),
            torch.randn(2, 3, 4).to(memory_format=torch.contiguous_format).permute(2, 0, 1),
            None,
        ]
        for out in LOW:
            self.check_pack(gradients, out, accumulate)
            self.check_pack(gradients, out, accumulate, align=1)

    @pytest.mark.parametrize("gradients", [[], [None, None], [torch.empty(0)]], ids=str)
    def test_pack_of_nothing(self, gradients: list[Tensor | None]) -> None:
        for accumulate in (False, True):
            self.check_pack(gradients, FP32, accumulate)

    def check_pack(
        self,
        gradients: list[Tensor | None],
        out: Precision,
        accumulate: bool,
        align: int = 8,
    ) -> None:
        """Pack into a bucket of NaNs (of numbers under the gradients, when accumulating)."""
        starts, start = [], 0
        for gradient in gradients:
            starts.append(start)
            numel = 21 if gradient is None else gradient.numel()
            start = -(-(start + numel) // align) * align
        numel = start + 133
        bucket = torch.full((numel,), math.nan)
        oracle = torch.full((numel,), math.nan if accumulate else 0.0, dtype=torch.float64)
        for gradient, first in zip(gradients, starts, strict=True):
            if gradient is not None:
                part = slice(first, first + gradient.numel())
                if accumulate:
                    bucket[part] = torch.randn(gradient.numel())
                    oracle[part] = bucket[part].to(out.dtype).double()
                oracle[part] += gradient.double().flatten()
        bucket = bucket.to(out.dtype).to(self.kernels.device)
        copies = [None if g is None else _on(g, self.kernels.device) for g in gradients]
        self.kernels.pack(copies, starts, bucket, accumulate=accumulate)
        if accumulate:
            close(bucket, oracle, out.rtol, "bucket")
        else:
            assert same_bits(bucket, oracle.to(out.dtype))  # one rounding, and +0 elsewhere
        for copy, gradient in zip(copies, gradients, strict=True):
            assert copy is None or gradient is None or torch.equal(copy.cpu(), gradient)

    def test_pack_refuses_what_does_not_fit(self) -> None:
        out = torch.zeros(64, device=self.kernels.device)
        gradient = torch.ones(10, device=self.kernels.device)
        for gradients, starts, message in (
            ([gradient], [], "one start per gradient"),
            ([gradient], [60], "expected gradient 0 inside"),
            ([gradient, gradient], [0, 8], "expected gradient 1 inside"),
            ([gradient.int()], [0], "expected gradient 0 float"),
        ):
            with pytest.raises(ValueError, match=message):
                self.kernels.pack(gradients, starts, out)
        with pytest.raises(ValueError, match="expected a contiguous"):
            self.kernels.pack([gradient], [0], out.view(8, 8))


class Float64Contract:
    """What the CPU implementations do in float64, where every operation has room."""

    kernels: Implementation

    @pytest.mark.parametrize("mode", MODES, ids=str)
    def test_adam_in_float64(self, mode: Mode) -> None:
        for params in (None, FP32, FP64):
            KernelContract.check_steps(self, TABLES["primes"], FP64, params, mode, FP64)  # type: ignore[arg-type]

    def test_norm_and_pack_in_float64(self) -> None:
        table = TABLES["primes"]
        flat = Problem.make(table, grads=torch.float64, master=torch.float64).shard.grads
        expected = flat[covered(table, flat.numel())].square().sum()
        torch.testing.assert_close(
            self.kernels.norm(flat, table)[0], expected, rtol=1e-13, atol=0.0
        )
        for accumulate in (False, True):
            gradients = [_gradient(shape, torch.float64) for shape in [(3, 5), None, (130,)]]
            KernelContract.check_pack(self, gradients, FP64, accumulate)  # type: ignore[arg-type]


def _gradient(shape: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor | None:
    return None if shape is None else torch.randn(shape).to(dtype)


def _on(gradient: Tensor, device: str) -> Tensor:
    """Copy a gradient to a device with its strides and its offset from 16 bytes."""
    storage = torch.empty(gradient.untyped_storage().nbytes(), dtype=torch.uint8, device=device)
    storage.untyped_storage().copy_(gradient.untyped_storage())
    typed = storage.view(gradient.dtype)
    return typed.as_strided(gradient.shape, gradient.stride(), gradient.storage_offset())

# SPDX-License-Identifier: Apache-2.0
"""What every implementation of `adam` and `adam_coefs` must do; see `kernel_cases.py`."""

from __future__ import annotations

import math
import secrets
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_problems import (
    BF16,
    FP32,
    LOW,
    MODES,
    STEPS,
    TABLES,
    TAIL,
    Implementation,
    Mode,
    Oracle,
    Precision,
    Problem,
    close,
    covered,
    place,
    same_bits,
)
from torch import Tensor

from triton_ops import _common as common
from triton_ops import reference
from triton_ops._fragments import FragmentTable


class AdamContract:
    """A subclass names the implementation."""

    kernels: Implementation

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
        inside = covered(table, table.end + TAIL)
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

# SPDX-License-Identifier: Apache-2.0
"""What every implementation of the kernels must do: a contract class, run by `test_kernels.py`.

Inputs are fresh each run (the seed is printed), the oracle is written out in float64 in
`kernel_problems.py`, a dtype and its tolerance travel together, and every byte outside the
fragments is poisoned with NaN and must stay as it was.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
import torch
from kernel_adam_cases import AdamContract
from kernel_move_cases import NormContract, PackContract, make_gradient
from kernel_problems import (
    BF16,
    FP16,
    FP32,
    FP64,
    MODES,
    TABLES,
    Implementation,
    Mode,
    Problem,
    covered,
    place,
    same_bits,
)

__all__ = [
    "BF16",
    "FP16",
    "FP32",
    "FP64",
    "MODES",
    "TABLES",
    "Float64Contract",
    "FreshInputs",
    "Implementation",
    "KernelContract",
    "Mode",
    "Problem",
    "covered",
    "place",
    "same_bits",
]


class FreshInputs:
    """Other numbers at each run."""

    @pytest.fixture(autouse=True)
    def _fresh_inputs(self) -> Iterator[None]:
        seed = secrets.randbits(32)
        print(f"seed {seed}")  # pytest shows it where a test fails
        state = torch.random.get_rng_state()
        torch.manual_seed(seed)
        yield
        torch.random.set_rng_state(state)


class KernelContract(FreshInputs, AdamContract, NormContract, PackContract):
    """The tests; a subclass names the implementation."""

    kernels: Implementation


class Float64Contract:
    """What the CPU implementations do in float64, where every operation has room."""

    kernels: Implementation

    @pytest.mark.parametrize("mode", MODES, ids=str)
    def test_adam_in_float64(self, mode: Mode) -> None:
        for params in (None, FP32, FP64):
            AdamContract.check_steps(self, TABLES["primes"], FP64, params, mode, FP64)  # type: ignore[arg-type]

    def test_norm_and_pack_in_float64(self) -> None:
        table = TABLES["primes"]
        flat = Problem.make(table, grads=torch.float64, master=torch.float64).shard.grads
        expected = flat[covered(table, flat.numel())].square().sum()
        torch.testing.assert_close(
            self.kernels.norm(flat, table)[0], expected, rtol=1e-13, atol=0.0
        )
        for accumulate in (False, True):
            gradients = [make_gradient(shape, torch.float64) for shape in [(3, 5), None, (130,)]]
            PackContract.check_pack(self, gradients, FP64, accumulate)  # type: ignore[arg-type]

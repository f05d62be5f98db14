# SPDX-License-Identifier: Apache-2.0
"""The contract of Triton's kernels on a CUDA device, and that no kernel waits for the device.

`test_kernels.py` runs Triton's in the interpreter and C++'s on the CPU; `test_cuda_kernels.py` has
the contract of CUDA's.
"""

from __future__ import annotations

import pytest
import torch
from device_tools import held_up, without_waiting
from kernel_cases import BF16, TABLES, FreshInputs, Implementation, KernelContract, Problem
from kernel_move_cases import PackContract

from fsdp_kernels import ops
from triton_ops._common import interpreted

triton = pytest.importorskip("triton", reason="triton is not installed")

from triton_ops import adam, norm, pack  # noqa: E402 - they import triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and interpreted(),
        reason="TRITON_INTERPRET is set: Triton compiles nothing in this process",
    ),
]

TRITON = Implementation(pack.pack, norm.norm, adam.adam_coefs, adam.adam, device="cuda")
OPS = Implementation(ops.pack, ops.norm, ops.adam_coefs, ops.adam, device="cuda")


class AsynchronousContract:
    """What the kernels on a device must do beside their results."""

    kernels: Implementation

    def test_nothing_waits_for_the_device(self) -> None:
        problem = Problem.make(TABLES["blocks"], "cuda")
        skip = torch.zeros(1, device="cuda")
        wide = torch.randn(9, 66, device="cuda")
        gradients = [torch.randn(33, 9, device="cuda"), None, wide[:, ::2], wide[0]]
        out = torch.empty(1024, device="cuda")
        coefs = torch.full((4, 9), 1.0, dtype=torch.float64, device="cuda")

        def calls() -> None:
            self.kernels.pack(gradients, [0, 300, 400, 700], out)
            self.kernels.norm(problem.shard.grads, problem.table)
            self.kernels.adam_coefs(
                problem.hyper, problem.step, problem.used, skip, coefs, decoupled=True
            )
            self.kernels.adam(problem.shard, problem.table, coefs, problem.factor)

        calls()  # compiles, and uploads the tables
        without_waiting(calls)

    def test_the_current_stream_is_taken(self) -> None:
        """On a stream that is held up, nothing may have happened when the call returns."""
        problem = Problem.make(TABLES["blocks"], "cuda")
        gradient, out = torch.ones(1024, device="cuda"), torch.zeros(1024, device="cuda")

        def calls() -> torch.Tensor:
            self.kernels.pack([gradient], [0], out)
            return self.kernels.norm(problem.shard.grads, problem.table)

        expected = calls()  # compiles
        total, seen = held_up(calls, out.zero_, out.sum)
        assert seen.item() == 0, "pack did not run on the current stream"
        assert out.sum().item() == 1024
        assert torch.equal(total, expected)


class TestTriton(KernelContract, AsynchronousContract):
    kernels = TRITON


class TestOps(FreshInputs, AsynchronousContract):
    """What training calls: CUDA's pack and norm where they are built, else Triton's."""

    kernels = OPS

    @pytest.mark.parametrize("accumulate", [False, True])
    def test_many_gradients_in_one_bucket(self, accumulate: bool) -> None:
        """More pointers than one launch takes, of every dtype, aligned or not, with gaps."""
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        gradients: list[torch.Tensor | None] = []
        for i in range(400):
            numel, offset = 1 + 37 * i % 300, i % 4
            gradient = torch.randn(numel + 4).to(dtypes[i % 3])[offset : offset + numel]
            gradients.append(None if i % 11 == 5 else gradient)
        PackContract.check_pack(self, gradients, BF16, accumulate)  # type: ignore[arg-type]

# SPDX-License-Identifier: Apache-2.0
"""What every implementation of `norm` and `pack` must do; see `kernel_cases.py`."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_problems import (
    FP32,
    LOW,
    TABLES,
    Implementation,
    Precision,
    Problem,
    covered,
    same_bits,
)
from torch import Tensor

from triton_ops import _common as common


class NormContract:
    """A subclass names the implementation."""

    kernels: Implementation

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


class PackContract:
    """A subclass names the implementation."""

    kernels: Implementation

    @pytest.mark.parametrize("out", LOW, ids=str)
    @pytest.mark.parametrize("grads", LOW, ids=str)
    @pytest.mark.parametrize("accumulate", [False, True], ids=["write", "accumulate"])
    def test_pack(self, grads: Precision, out: Precision, accumulate: bool) -> None:
        shapes = [(3, 5), (), (0, 4), (127,), None, (common.BLOCK_NUMEL * 2 + 3,), (16, 8), (64,)]
        self.check_pack([make_gradient(shape, grads.dtype) for shape in shapes], out, accumulate)

    @pytest.mark.parametrize("accumulate", [False, True], ids=["write", "accumulate"])
    def test_pack_of_strided_unaligned_and_mixed_gradients(self, accumulate: bool) -> None:
        base = torch.randn(40, 56)
        gradients: list[Tensor | None] = [
            base.t(),
            base[:, 3:17],
            base.flatten()[5:900:3],
            torch.tensor(3.0).expand(50),
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

    def test_pack_reads_a_negated_view_with_its_sign(self) -> None:
        values = torch.randn(2, 40, device=self.kernels.device)
        negated = torch.complex(*values).conj().imag, torch._neg_view(values[0])
        bucket = torch.empty(80, device=self.kernels.device)
        self.kernels.pack(list(negated), [0, 40], bucket)
        assert torch.equal(bucket, torch.cat((-values[1], -values[0])))

    def test_pack_of_more_dimensions_than_most(self) -> None:
        gradient = torch.randn(2, 3, 2, 2, 3, 2, 2, 3, 2, 2).permute(9, 7, 5, 3, 1, 0, 2, 4, 6, 8)
        self.check_pack([gradient], FP32, accumulate=False)

    def test_pack_keeps_every_nan_a_nan(self) -> None:
        # Rounding the bits of this one as if it were a number would carry into the sign: -0.
        bits = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32)
        gradient = bits.view(torch.float32).to(self.kernels.device)
        for out in LOW:
            bucket = torch.zeros(8, dtype=out.dtype, device=self.kernels.device)
            self.kernels.pack([gradient], [0], bucket)
            assert bucket.isnan().tolist() == [True] * 3 + [False] * 5

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
        bucket = torch.full((numel,), math.nan, dtype=out.dtype)
        expected = bucket.clone() if accumulate else torch.zeros_like(bucket)
        for gradient, first in zip(gradients, starts, strict=True):
            if gradient is None:
                continue
            part, values = slice(first, first + gradient.numel()), gradient.flatten()
            if accumulate:
                bucket[part] = torch.randn(len(values)).to(out.dtype)
                wide = torch.promote_types(
                    torch.promote_types(out.dtype, gradient.dtype), FP32.dtype
                )
                values = bucket[part].to(wide) + values.to(wide)
            expected[part] = values.to(out.dtype)
        bucket = bucket.to(self.kernels.device)
        copies = [None if g is None else _on(g, self.kernels.device) for g in gradients]
        self.kernels.pack(copies, starts, bucket, accumulate=accumulate)
        assert same_bits(bucket, expected)  # rounded once; +0, or untouched, elsewhere
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


def make_gradient(shape: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor | None:
    return None if shape is None else torch.randn(shape).to(dtype)


def _on(gradient: Tensor, device: str) -> Tensor:
    """Copy a gradient to a device with its strides and its offset from 16 bytes."""
    storage = torch.empty(gradient.untyped_storage().nbytes(), dtype=torch.uint8, device=device)
    storage.untyped_storage().copy_(gradient.untyped_storage())
    typed = storage.view(gradient.dtype)
    return typed.as_strided(gradient.shape, gradient.stride(), gradient.storage_offset())

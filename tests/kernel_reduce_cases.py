# SPDX-License-Identifier: Apache-2.0
"""What every implementation of `reduce` must do; see `test_reduce_adam.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from kernel_cases import FreshInputs
from kernel_problems import (
    BF16,
    FP32,
    FP64,
    LOW,
    TABLES,
    TAIL,
    Precision,
    close,
    covered,
    same_bits,
)
from torch import Tensor

from triton_ops._fragments import FragmentTable

WORLDS = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class ReduceKernels:
    """The kernels over several ranks' memory, and those that they must agree with."""

    reduce: Callable[..., Tensor | None]
    reduce_adam: Callable[..., None]
    norm: Callable[..., Tensor]
    adam: Callable[..., None]
    device: str = "cpu"


def draw(
    world: int,
    numel: int,
    kind: Precision,
    device: str,
    *,
    offset: int = 0,
    magnitude: float = 1.0,
) -> list[Tensor]:
    """Draw every rank's gradients, each in memory of its own, ``offset`` elements into it.

    The first rank's have another magnitude.
    """
    draws = [torch.randn(offset + numel) for _ in range(world)]
    draws[0] *= magnitude
    return [values.to(kind.dtype).to(device)[offset:] for values in draws]


def ordered_sum(peers: list[Tensor], wide: torch.dtype = torch.float32) -> Tensor:
    """Add in rank order, one rounding an addition; torch's addition rounds to nearest."""
    total = peers[0].cpu().to(wide)
    for peer in peers[1:]:
        total = total + peer.cpu().to(wide)
    return total


class ReduceContract(FreshInputs):
    """A subclass names the implementation."""

    kernels: ReduceKernels

    def worlds(self, case: int) -> tuple[int, ...]:
        """Return the numbers of ranks that a case is run with, out of many that are alike."""
        return WORLDS

    @pytest.mark.parametrize("accumulate", [False, True], ids=["write", "accumulate"])
    @pytest.mark.parametrize("out", LOW, ids=str)
    @pytest.mark.parametrize("grads", LOW, ids=str)
    def test_reduce(self, grads: Precision, out: Precision, accumulate: bool) -> None:
        for world in self.worlds(LOW.index(grads) + LOW.index(out)):
            self.check_reduce(TABLES["primes"], world, grads, out, accumulate)

    @pytest.mark.parametrize("name", TABLES)
    def test_reduce_geometry(self, name: str) -> None:
        self.check_reduce(TABLES[name], 2, FP32, FP32, False)
        self.check_reduce(TABLES[name], 3, BF16, FP32, True)
        self.check_reduce(TABLES[name], 2, BF16, BF16, False, offset=1)

    def check_reduce(
        self,
        table: FragmentTable,
        world: int,
        grads: Precision,
        out: Precision,
        accumulate: bool,
        offset: int = 0,
    ) -> None:
        """Reduce with and without the norm; compare with sums that are written out."""
        device, numel = self.kernels.device, table.end + TAIL
        magnitude = 10 ** torch.empty(1).uniform_(-2, 2).item()
        peers = draw(world, numel, grads, device, offset=offset, magnitude=magnitude)
        copies = [peer.clone() for peer in peers]
        before = torch.randn(numel).to(out.dtype)
        wide = torch.float64 if torch.float64 in (grads.dtype, out.dtype) else torch.float32
        total = ordered_sum(peers, wide)
        expected = (before.to(wide) + total if accumulate else total).to(out.dtype)
        start = before.clone() if accumulate else torch.full_like(before, math.nan)
        target = start.to(device)
        again = target.clone()
        assert self.kernels.reduce(peers, target, accumulate=accumulate) is None
        assert same_bits(target, expected)
        result = self.kernels.reduce(peers, again, table=table, accumulate=accumulate)
        assert same_bits(again, expected)
        assert result is not None
        assert result.dtype == torch.float64
        assert same_bits(result, self.kernels.norm(again, table))
        inside = covered(table, numel)
        exact = sum(peer.double().cpu() for peer in copies)
        exact = exact + before.double() if accumulate else exact
        largest = max(peer.double().abs().max().item() for peer in copies)
        rounding = FP32.rtol if wide == torch.float32 else FP64.rtol
        close(again, exact, max(rounding, out.rtol), "sum", max(1.0, largest))
        squares = expected[inside].double().square().sum()
        torch.testing.assert_close(result[0].cpu(), squares, rtol=1e-6, atol=0.0)
        assert result[1].item() == 0
        for peer, copy in zip(peers, copies, strict=True):
            assert same_bits(peer, copy)

    def test_reduce_into_the_memory_of_one_rank(self) -> None:
        table = TABLES["primes"]
        for own in range(3):
            for accumulate in (False, True):
                peers = draw(3, table.end + TAIL, FP32, self.kernels.device)
                total = ordered_sum(peers)
                expected = peers[own].cpu() + total if accumulate else total
                result = self.kernels.reduce(peers, peers[own], table=table, accumulate=accumulate)
                assert same_bits(peers[own], expected)
                assert result is not None
                assert same_bits(result, self.kernels.norm(peers[own], table))

    def test_the_norm_sees_the_fragments_only(self) -> None:
        table = TABLES["primes"]
        inside = covered(table, table.end + TAIL)
        at = inside.nonzero().flatten()
        for grads in LOW:
            peers = draw(2, len(inside), grads, self.kernels.device)
            peers[1][~inside] = math.nan
            out = torch.empty(len(inside), device=self.kernels.device)
            result = self.kernels.reduce(peers, out, table=table)
            assert result is not None
            assert result.isfinite().all()
            assert result[1].item() == 0
            assert torch.equal(out.isnan().cpu(), ~inside)
            # Infinities that cancel are not finite either, and found where they are.
            peers[0][at[3]], peers[1][at[3]], peers[0][at[-1]] = math.inf, -math.inf, math.inf
            result = self.kernels.reduce(peers, out, table=table)
            assert result is not None
            assert result[1].item() == 2
            assert math.isnan(result[0].item())

    def test_reduce_keeps_the_order_of_the_ranks(self) -> None:
        # (1e8 + 1) - 1e8 is 0 in float32, and (1e8 - 1e8) + 1 is 1.
        values = (1e8, 1.0, -1e8)
        peers = [torch.full((300,), value, device=self.kernels.device) for value in values]
        out = torch.empty(300, device=self.kernels.device)
        self.kernels.reduce(peers, out)
        assert out.tolist() == [0.0] * 300
        self.kernels.reduce([peers[0], peers[2], peers[1]], out)
        assert out.tolist() == [1.0] * 300

    def test_reduce_of_nothing(self) -> None:
        empty = torch.empty(0, device=self.kernels.device)
        assert self.kernels.reduce([empty, empty.clone()], empty) is None
        result = self.kernels.reduce([empty], empty, table=FragmentTable.build(()))
        assert result is not None
        assert result.tolist() == [0.0, 0.0]

    def test_reduce_refuses_what_does_not_fit(self) -> None:
        out = torch.zeros(64, device=self.kernels.device)
        peer = torch.ones(64, device=self.kernels.device)
        beyond = FragmentTable.build([(0, 65, 0)])
        cases: list[tuple[list[Tensor], FragmentTable | None, str]] = [
            ([], None, "expected one tensor for each rank, got none"),
            ([peer, peer[:63]], None, r"peers\[1\]: expected a contiguous \[64\]"),
            ([peer, peer.bfloat16()], None, r"peers\[1\]: expected torch.float32 as \[0\]"),
            ([peer.int()], None, "expected a float dtype"),
            ([peer], beyond, "expected fragments inside"),
        ]
        for peers, table, message in cases:
            with pytest.raises(ValueError, match=message):
                self.kernels.reduce(peers, out, table=table)
        memory = torch.zeros(80, device=self.kernels.device)
        with pytest.raises(ValueError, match=r"overlap with peers\[1\]"):
            self.kernels.reduce([peer, memory[16:]], memory[:64])

# SPDX-License-Identifier: Apache-2.0
"""What every implementation of `reduce_adam` must do; see `test_reduce_adam.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import FreshInputs
from kernel_problems import (
    BF16,
    FP32,
    LOW,
    MODES,
    STEPS,
    TABLES,
    TAIL,
    Mode,
    Oracle,
    Precision,
    Problem,
    covered,
    same_bits,
)
from kernel_reduce_cases import ReduceKernels, draw, ordered_sum
from torch import Tensor

from triton_ops import _common as common
from triton_ops import reference
from triton_ops._common import AdamShard
from triton_ops._fragments import FragmentTable


def coefs_of(problem: Problem, mode: Mode) -> Tensor:
    """Return a table of coefficients; the same for every implementation that is compared."""
    coefs = torch.empty(problem.step.numel(), common.COEF_COLUMNS, dtype=torch.float64)
    state = (problem.hyper.cpu(), problem.step.cpu().clone(), problem.used.cpu())
    reference.adam_coefs(*state, None, coefs, decoupled=mode.decoupled)
    return coefs.to(problem.step.device)


def flags(mode: Mode) -> dict[str, Any]:
    return {"scale": 1 / 3, "decoupled": mode.decoupled, "maximize": mode.maximize}


def reference_step(
    peers: list[Tensor],
    shard: AdamShard,
    table: FragmentTable,
    coefs: Tensor,
    factor: Tensor,
    *,
    publish: list[Tensor],
    **options: Any,
) -> None:
    """Take the reference's step on copies on the CPU, and bring the results back."""
    host = {name: tensor.cpu().clone() for name, tensor in shard.named().items()}
    published = [tensor.cpu().clone() for tensor in publish]
    reference.reduce_adam(
        [peer.cpu() for peer in peers],
        AdamShard(grads=None, **host),
        table,
        coefs.cpu(),
        factor.cpu(),
        publish=published,
        **options,
    )
    for name, tensor in shard.named().items():
        tensor.copy_(host[name])
    for target, source in zip(publish, published, strict=True):
        target.copy_(source)


class ReduceAdamContract(FreshInputs):
    """A subclass names the implementation, and is a `ReduceContract` too."""

    kernels: ReduceKernels
    worlds: Callable[[int], tuple[int, ...]]

    @pytest.mark.parametrize("params", [None, *LOW], ids=str)
    @pytest.mark.parametrize("grads", LOW, ids=str)
    def test_step_dtypes(self, grads: Precision, params: Precision | None) -> None:
        for world in self.worlds(LOW.index(grads) + (None, *LOW).index(params)):
            self.check_steps(TABLES["primes"], world, grads, params, Mode(), n_publish=world - 1)

    @pytest.mark.parametrize("mode", MODES, ids=str)
    def test_step_modes(self, mode: Mode) -> None:
        self.check_steps(TABLES["primes"], 3, BF16, BF16, mode, n_publish=2)

    @pytest.mark.parametrize("name", TABLES)
    def test_step_geometry(self, name: str) -> None:
        self.check_steps(TABLES[name], 2, BF16, BF16, Mode(amsgrad=True), n_publish=1)
        self.check_steps(TABLES[name], 2, FP32, FP32, Mode(), n_publish=2, offset=3)

    def check_steps(
        self,
        table: FragmentTable,
        world: int,
        grads: Precision,
        params: Precision | None,
        mode: Mode,
        *,
        n_publish: int,
        offset: int = 0,
        state: Precision = FP32,
    ) -> None:
        """Take steps; compare with the oracle, and with what may not change."""
        device, numel = self.kernels.device, table.end + TAIL
        dtype = params.dtype if params else None
        problem = Problem.make(
            table, device, grads=state.dtype, params=dtype, amsgrad=mode.amsgrad, master=state.dtype
        )
        inside = covered(table, numel)
        publish = [
            torch.full((offset + numel,), math.nan, dtype=dtype or grads.dtype, device=device)[
                offset:
            ]
            for _ in range(n_publish)
        ]
        oracle, wide = Oracle(problem), torch.promote_types(grads.dtype, torch.float32)
        for number in range(STEPS):
            problem.used.copy_(torch.rand(problem.used.numel()) < 0.7)
            problem.used[0] |= number == 0
            peers = draw(world, numel, grads, device, offset=offset)
            for peer in peers:
                peer[~inside] = math.nan
            # The oracle reads these; the kernels are given none.
            assert problem.shard.grads is not None
            problem.shard.grads.copy_(ordered_sum(peers, wide))
            shard = replace(problem.shard, grads=None)
            before = {name: tensor.cpu().clone() for name, tensor in shard.named().items()}
            published = [tensor.cpu().clone() for tensor in publish]
            kept = [peer.cpu().clone() for peer in peers]
            coefs = coefs_of(problem, mode)
            self.kernels.reduce_adam(
                peers, shard, table, coefs, problem.factor, publish=publish, **flags(mode)
            )
            oracle.update(problem, mode, 1 / 3)
            problem.step += problem.used
            changed = covered(table, numel, problem.used.cpu())
            for name, tensor in shard.named().items():
                assert same_bits(tensor.cpu()[~changed], before[name][~changed]), name
            copies = [*([] if shard.params is None else [shard.params]), *publish]
            for tensor in copies:
                cast = shard.master.to(tensor.dtype)
                assert same_bits(tensor.cpu()[changed], cast.cpu()[changed])
            for tensor, old in zip(publish, published, strict=True):
                assert same_bits(tensor.cpu()[~changed], old[~changed])
            for peer, old in zip(peers, kept, strict=True):
                assert same_bits(peer, old)
        oracle.compare(problem, 3 * state.rtol)

    @pytest.mark.parametrize("mode", MODES, ids=str)
    @pytest.mark.parametrize("grads", LOW, ids=str)
    def test_a_step_has_the_bits_of_the_reference(self, grads: Precision, mode: Mode) -> None:
        for world in self.worlds(LOW.index(grads) + MODES.index(mode)):
            self.check_against(reference_step, world, grads, mode)

    @pytest.mark.parametrize("mode", MODES, ids=str)
    @pytest.mark.parametrize("grads", LOW, ids=str)
    def test_a_step_has_the_bits_of_reduce_then_adam(self, grads: Precision, mode: Mode) -> None:
        def separate(peers: list[Tensor], shard: AdamShard, *rest: Any, **options: Any) -> None:
            publish = options.pop("publish")
            total = torch.full_like(shard.master, math.nan)
            self.kernels.reduce(peers, total)
            self.kernels.adam(replace(shard, grads=total), *rest, **options)
            for tensor in publish:
                assert shard.params is not None
                inside = covered(TABLES["blocks"], len(tensor)).to(tensor.device)
                tensor[inside] = shard.params[inside]

        for world in self.worlds(LOW.index(grads) + MODES.index(mode)):
            self.check_against(separate, world, grads, mode)

    @pytest.mark.parametrize("mode", [MODES[0], MODES[-1]], ids=str)
    def test_two_ranks_have_the_bits_of_any_sum_then_adam(self, mode: Mode) -> None:
        # As a reduce-scatter gives it: of two terms there is one sum, whatever the order.
        def separate(peers: list[Tensor], shard: AdamShard, *rest: Any, **options: Any) -> None:
            del options["publish"]
            self.kernels.adam(replace(shard, grads=peers[1] + peers[0]), *rest, **options)

        self.check_against(separate, 2, FP32, mode, n_publish=0)

    def test_a_step_has_the_same_bits_each_time(self) -> None:
        self.check_against(self.kernels.reduce_adam, 4, BF16, Mode(amsgrad=True))

    def check_against(
        self,
        other: Callable[..., None],
        world: int,
        grads: Precision,
        mode: Mode,
        n_publish: int = 1,
    ) -> None:
        """Take two steps with this implementation and with another, from the same state."""
        table = TABLES["blocks"]
        numel = table.end + TAIL
        ours = Problem.make(table, self.kernels.device, amsgrad=mode.amsgrad)
        ours.used.fill_(True)
        theirs = ours.clone(self.kernels.device)
        options = flags(mode)
        coefs = coefs_of(ours, mode)
        for _ in range(2):
            peers = draw(world, numel, grads, self.kernels.device)
            results = []
            for problem, step in ((ours, self.kernels.reduce_adam), (theirs, other)):
                shard = replace(problem.shard, grads=None)
                assert shard.params is not None
                publish = [torch.full_like(shard.params, math.nan) for _ in range(n_publish)]
                step(peers, shard, table, coefs, problem.factor, publish=publish, **options)
                buffers = {f"publish[{k}]": tensor for k, tensor in enumerate(publish)}
                results.append({**shard.named(), **buffers})
            for name, tensor in results[0].items():
                assert same_bits(tensor, results[1][name]), name

    @pytest.mark.parametrize("params", [None, BF16], ids=str)
    @pytest.mark.parametrize("n_publish", [0, 1, 3])
    def test_who_gets_the_new_parameters(self, params: Precision | None, n_publish: int) -> None:
        self.check_steps(TABLES["even"], 2, FP32, params, Mode(), n_publish=n_publish)

    def test_a_non_finite_gradient_stays_in_its_element(self) -> None:
        problem = Problem.make(TABLES["even"], self.kernels.device)
        problem.used.fill_(True)
        numel = problem.shard.master.numel()
        peers = draw(3, numel, FP32, self.kernels.device)
        peers[0][3], peers[1][70], peers[2][2050] = math.nan, math.inf, -math.inf
        shard = replace(problem.shard, grads=None)
        coefs = coefs_of(problem, Mode())
        self.kernels.reduce_adam(peers, shard, problem.table, coefs, problem.factor)
        bad = shard.master[: problem.table.end].isnan().nonzero().flatten()
        assert bad.tolist() == [3, 70, 2050]

    def test_a_skipped_step_changes_no_byte(self) -> None:
        problem = Problem.make(TABLES["primes"], self.kernels.device, amsgrad=True)
        before = problem.clone("cpu")
        problem.used.fill_(False)
        shard = replace(problem.shard, grads=None)
        publish = [torch.full_like(problem.shard.master, 7.0).bfloat16()]
        peers = draw(2, shard.master.numel(), FP32, self.kernels.device)
        coefs = coefs_of(problem, Mode())
        self.kernels.reduce_adam(
            peers, shard, problem.table, coefs, problem.factor, publish=publish
        )
        assert (publish[0] == 7.0).all()
        for name, tensor in shard.named().items():
            assert same_bits(tensor, getattr(before.shard, name)), name

    def test_a_step_refuses_what_does_not_fit(self) -> None:
        problem = Problem.make(TABLES["even"], self.kernels.device)
        shard, table = replace(problem.shard, grads=None), problem.table
        peer = torch.ones_like(shard.master)
        coefs = coefs_of(problem, Mode())
        low = peer.bfloat16()
        cases: list[tuple[list[Tensor], list[Tensor], Tensor, str]] = [
            ([], [], coefs, "peers: expected one tensor for each rank, got none"),
            ([peer[1:]], [], coefs, r"peers\[0\]: expected a contiguous"),
            ([peer, low], [], coefs, r"peers\[1\]: expected torch.float32"),
            ([peer.double()], [], coefs, "expected at most float32, got float64"),
            ([peer], [peer], coefs, r"publish\[1\]: expected torch.bfloat16"),
            ([peer], [low[1:]], coefs, r"publish\[1\]: expected a contiguous"),
            ([peer], [], coefs[:1], "at least 3 rows"),
        ]
        for peers, publish, rows, message in cases:
            with pytest.raises(ValueError, match=message):
                self.kernels.reduce_adam(peers, shard, table, rows, problem.factor, publish=publish)
        with pytest.raises(ValueError, match="adam: expected a shard with gradients, got None"):
            self.kernels.adam(shard, table, coefs, problem.factor)

# SPDX-License-Identifier: Apache-2.0
"""The collective-fused step across real processes, over files that all of them map.

In the interpreter this is the kernel that runs over peers' memory on a device.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from kernel_problems import FP32, Mode, Problem, same_bits
from kernel_reduce_adam_cases import coefs_of
from kernel_reduce_cases import ReduceKernels, draw, ordered_sum

from fsdp_kernels import ops
from triton_ops import reference
from triton_ops._common import AdamShard, interpreted
from triton_ops._fragments import FragmentTable

triton = pytest.importorskip("triton", reason="triton is not installed")

from triton_ops import adam, norm, reduce, reduce_adam  # noqa: E402 - they import triton

OPS = ReduceKernels(ops.reduce, ops.reduce_adam, ops.norm, ops.adam)
TRITON = ReduceKernels(reduce.reduce, reduce_adam.reduce_adam, norm.norm, adam.adam)
STEPS = 3
SHARD = 1009  # of each rank; its bucket is world times as long


def mapped(path: Path, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Map a file that the ranks share, and read it as a flat tensor."""
    return torch.from_file(str(path), shared=True, size=numel, dtype=dtype)


def step_over_shared_memory(
    rank: int, world: int, folder: Path, kernels: ReduceKernels, clip: bool
) -> list[torch.Tensor]:
    """Train on gradients that every rank writes into its own mapped bucket.

    Returns this rank's full parameters, which the ranks' kernels wrote, and its state.
    """
    numel = world * SHARD
    grads = [mapped(folder / f"grads{k}", numel, torch.float32) for k in range(world)]
    params = [mapped(folder / f"params{k}", numel, torch.bfloat16) for k in range(world)]
    own = slice(rank * SHARD, (rank + 1) * SHARD)
    peers, copies = [g[own] for g in grads], [p[own] for p in params]
    table = FragmentTable.build([(0, 600, 0), (601, SHARD, 1)])
    problem = problem_of(rank, table)
    shard = AdamShard(None, *state_of(problem, SHARD))
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        grads[rank].copy_(torch.randn(numel))
        dist.barrier()  # every rank's gradients are complete
        factor = problem.factor
        if clip:
            total = torch.empty(SHARD)
            norm = kernels.reduce(peers, total, table=table)
            assert norm is not None
            dist.all_reduce(norm)
            factor = factor * (1.0 / (norm[0].sqrt() + 1e-6)).clamp_max(1.0)
        coefs = coefs_of(problem, Mode())
        kernels.reduce_adam(peers, shard, table, coefs, factor, publish=copies)
        problem.step += 1
        dist.barrier()  # every rank has read the gradients and published
    return [params[rank].clone(), *shard.named().values()]


def problem_of(rank: int, table: FragmentTable) -> Problem:
    torch.manual_seed(rank)
    problem = Problem.make(table)
    problem.used.fill_(True)
    return problem


def state_of(problem: Problem, numel: int) -> list[torch.Tensor]:
    shard = problem.shard
    return [t[:numel].contiguous() for t in (shard.master, shard.exp_avg, shard.exp_avg_sq)]


def expected_of(world: int, clip: bool) -> list[list[torch.Tensor]]:
    """Take the same steps in this process: sum in rank order, then the reference's Adam."""
    numel = world * SHARD
    table = FragmentTable.build([(0, 600, 0), (601, SHARD, 1)])
    problems = [problem_of(rank, table) for rank in range(world)]
    states = [state_of(problem, SHARD) for problem in problems]
    full = torch.zeros(numel, dtype=torch.bfloat16)
    for step in range(STEPS):
        grads = []
        for rank in range(world):
            torch.manual_seed(100 * step + rank)
            grads.append(torch.randn(numel))
        total = ordered_sum(grads)
        parts = [slice(rank * SHARD, (rank + 1) * SHARD) for rank in range(world)]
        norms = [ops.norm(total[part].contiguous(), table) for part in parts]
        norm = sum(norms[1:], norms[0])
        for part, problem, state in zip(parts, problems, states, strict=True):
            factor = problem.factor
            if clip:
                factor = factor * (1.0 / (norm[0].sqrt() + 1e-6)).clamp_max(1.0)
            shard = AdamShard(total[part].contiguous(), *state, params=full[part])
            reference.adam(shard, table, coefs_of(problem, Mode()), factor)
            problem.step += 1
    return [[full, *state] for state in states]


IMPLEMENTATIONS = [
    pytest.param(
        TRITON,
        id="interpreter",
        marks=pytest.mark.skipif(not interpreted(), reason="this process compiles Triton kernels"),
    ),
    pytest.param(OPS, id="ops"),
]


@pytest.mark.parametrize("clip", [False, True], ids=["one phase", "two phases"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_processes_publish_to_one_another(
    kernels: ReduceKernels, world: int, clip: bool, tmp_path: Path
) -> None:
    """Each rank sums its shard from every rank's memory and writes it into every rank's copy."""
    for rank in range(world):
        for name, size in (("grads", 4), ("params", 2)):
            (tmp_path / f"{name}{rank}").write_bytes(bytes(size * world * SHARD))
    results = run_ranks(step_over_shared_memory, world, tmp_path, kernels, clip)
    if clip:
        # The norm's own last bits are each implementation's: compare the ranks with one another,
        # and closely with the reference.
        for rank, expected in enumerate(expected_of(world, clip)):
            assert same_bits(results[rank][0], results[0][0])
            for ours, theirs in zip(results[rank][1:], expected[1:], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)
        return
    for rank, expected in enumerate(expected_of(world, clip)):
        for ours, theirs in zip(results[rank], expected, strict=True):
            assert same_bits(ours, theirs)


def test_a_gap_is_never_published(tmp_path: Path) -> None:
    """What lies between the fragments of a rank keeps the bytes that it had in every copy."""
    (tmp_path / "copy").write_bytes(bytes(2 * SHARD))
    copy = mapped(tmp_path / "copy", SHARD, torch.bfloat16)
    copy.fill_(math.pi)
    table = FragmentTable.build([(0, 600, 0), (601, SHARD - 8, 1)])
    problem = problem_of(0, table)
    shard = AdamShard(None, *state_of(problem, SHARD))
    peers = draw(2, SHARD, FP32, "cpu")
    ops.reduce_adam(peers, shard, table, coefs_of(problem, Mode()), problem.factor, publish=[copy])
    untouched = torch.tensor(math.pi, dtype=torch.bfloat16)
    assert (copy[600:601] == untouched).all()
    assert (copy[SHARD - 8 :] == untouched).all()
    assert (copy[:600] != untouched).any()

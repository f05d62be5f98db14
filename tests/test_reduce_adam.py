# SPDX-License-Identifier: Apache-2.0
"""The kernels over several ranks' memory: one contract over every implementation, and processes.

As in `test_kernels.py`, Triton interprets or compiles once for the whole process.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from kernel_problems import (
    BF16,
    FP16,
    FP32,
    FP64,
    TABLES,
    TAIL,
    Mode,
    Precision,
    Problem,
    place,
    same_bits,
)
from kernel_reduce_cases import (
    ReduceContract,
    ReduceKernels,
    coefs_of,
    draw,
    flags,
    ordered_sum,
)

from fsdp_kernels import _ext, ops
from triton_ops import _common as common
from triton_ops import reference
from triton_ops._common import AdamShard, FragmentTable, interpreted

triton = pytest.importorskip("triton", reason="triton is not installed")

from triton_ops import adam, norm, reduce, reduce_adam  # noqa: E402 - they import triton

CPP = _ext.cpu()
OPS = ReduceKernels(ops.reduce, ops.reduce_adam, ops.norm, ops.adam)
TRITON = ReduceKernels(reduce.reduce, reduce_adam.reduce_adam, norm.norm, adam.adam)
needs_cpp = pytest.mark.skipif(
    CPP is None, reason="the C++ kernels are not built (python setup.py build_ext --inplace)"
)


class Float64:
    """What the CPU implementations do in float64 too."""

    kernels: ReduceKernels

    def test_reduce_in_float64(self) -> None:
        for grads, out in ((FP64, FP64), (FP64, FP32), (FP32, FP64), (FP64, BF16)):
            for accumulate in (False, True):
                ReduceContract.check_reduce(self, TABLES["primes"], 3, grads, out, accumulate)  # type: ignore[arg-type]

    def test_step_in_float64(self) -> None:
        for params in (None, FP32, FP64):
            for grads in (FP64, FP32, BF16):
                ReduceContract.check_steps(  # type: ignore[arg-type]
                    self, TABLES["primes"], 3, grads, params, Mode(), n_publish=1, state=FP64
                )


class TestReference(ReduceContract, Float64):
    kernels = ReduceKernels(reference.reduce, reference.reduce_adam, reference.norm, reference.adam)


class TestOps(ReduceContract, Float64):
    """What a CPU run calls: C++ where it is built."""

    kernels = OPS


@needs_cpp
class TestEachLevel(ReduceContract, Float64):
    """Every instruction set that this processor has."""

    kernels = OPS

    @pytest.fixture(autouse=True, params=[] if CPP is None else CPP.levels())
    def _level(self, request: pytest.FixtureRequest) -> Iterator[None]:
        assert CPP is not None
        before = CPP.level()
        CPP.set_level(request.param)
        yield
        CPP.set_level(before)


@pytest.mark.skipif(
    not interpreted(),
    reason="this process compiles Triton kernels; TRITON_INTERPRET=1 runs the interpreter",
)
@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered")
class TestInterpreter(ReduceContract):
    kernels = TRITON

    def test_several_programs_a_range(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # As on a device. The interpreter's own block takes any range of these tests whole.
        monkeypatch.setattr(common, "INTERPRETER_BLOCK_NUMEL", 256)
        for name in ("primes", "blocks", "unaligned"):
            self.check_reduce(TABLES[name], 3, FP32, FP32, False)
            self.check_reduce(TABLES[name], 3, BF16, FP32, True, offset=1)
            self.check_steps(TABLES[name], 3, FP32, BF16, Mode(), n_publish=2)

    def test_more_ranks_than_are_unrolled(self) -> None:
        self.check_reduce(TABLES["primes"], 19, FP32, FP32, False)
        self.check_steps(TABLES["primes"], 19, BF16, BF16, Mode(), n_publish=18)


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.is_available() and interpreted(),
    reason="TRITON_INTERPRET is set: Triton compiles nothing in this process",
)
class TestDevice(ReduceContract):
    """Virtual ranks: the memory of one device is read as if it were that of several."""

    kernels = ReduceKernels(
        reduce.reduce, reduce_adam.reduce_adam, norm.norm, adam.adam, device="cuda"
    )

    def test_more_ranks_than_are_unrolled(self) -> None:
        self.check_reduce(TABLES["primes"], 19, FP32, FP32, False)
        self.check_steps(TABLES["primes"], 19, BF16, BF16, Mode(), n_publish=18)

    def test_nothing_waits_for_the_device(self) -> None:
        problem = Problem.make(TABLES["blocks"], "cuda")
        numel = problem.shard.master.numel()
        peers = draw(3, numel, FP32, "cuda")
        coefs, total = coefs_of(problem, Mode()), torch.empty(numel, device="cuda")

        def step() -> None:
            reduce.reduce(peers, total, table=problem.table)
            reduce_adam.reduce_adam(peers, problem.shard, problem.table, coefs, problem.factor)

        step()  # compiles, and uploads the tables
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


# ---- C++ beyond the contract

BIG = place([1 << 18, 1 << 17, 12345, 1, 300_007])  # enough for several threads


@needs_cpp
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("grads", [FP32, BF16, FP16], ids=str)
def test_threads_change_no_bit(threads: int, grads: Precision) -> None:
    problem = Problem.make(BIG, amsgrad=True)
    problem.used.fill_(True)
    peers = draw(3, BIG.end + TAIL, grads, "cpu")
    coefs = coefs_of(problem, Mode())
    results = []
    before = torch.get_num_threads()
    try:
        for count in (threads, 1):
            torch.set_num_threads(count)
            ours = problem.clone("cpu")
            copy = torch.zeros_like(peers[0]).bfloat16()
            total = torch.empty(BIG.end + TAIL)
            found = ops.reduce(peers, total, table=BIG)
            assert found is not None
            ops.reduce_adam(
                peers, ours.shard, BIG, coefs, ours.factor, publish=[copy], **flags(Mode())
            )
            results.append({**ours.shard.named(), "copy": copy, "total": total, "norm": found})
    finally:
        torch.set_num_threads(before)
    for name, tensor in results[0].items():
        assert same_bits(tensor, results[1][name]), name


@needs_cpp
def test_the_module_checks_its_numbers() -> None:
    assert CPP is not None
    memory = torch.zeros(64)
    at, table = memory.data_ptr(), torch.tensor([[0, 65, 0]])
    rows = (table.data_ptr(), 1)
    with pytest.raises(ValueError, match=r"reduce: expected fragments inside \[0, 64\)"):
        CPP.reduce(([at], 0), (at, 0), 64, rows, False, 1)
    with pytest.raises(ValueError, match="reduce: expected the memory of at least one rank"):
        CPP.reduce(([], 0), (at, 0), 64, (0, 0), False, 1)
    with pytest.raises(ValueError, match="reduce: expected peers, got a null pointer"):
        CPP.reduce(([at, 0], 0), (at, 0), 64, (0, 0), False, 1)
    with pytest.raises(ValueError, match="expected a dtype code from 0 to 3, got 9"):
        CPP.reduce(([at], 9), (at, 0), 64, (0, 0), False, 1)
    shard = (0, 0, at, 0, at, at, 0, 0, 0, 65)
    with pytest.raises(ValueError, match="reduce_adam: expected rows below 0, got 0"):
        CPP.reduce_adam(([at], 0), shard, ([], 0), rows, (0, 0), (1.0, True), 1)
    with pytest.raises(ValueError, match="reduce_adam: expected copies, got a null pointer"):
        CPP.reduce_adam(([at], 0), shard, ([0], 0), rows, (0, 0), (1.0, True), 1)


def test_the_reference_needs_no_triton() -> None:
    program = "import sys; sys.modules['triton'] = None; from triton_ops import reference"
    root = Path(common.__file__).parents[1]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True)


# ---- across processes

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

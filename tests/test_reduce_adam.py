# SPDX-License-Identifier: Apache-2.0
"""The kernels over several ranks' memory: one contract over every implementation.

As in `test_kernels.py`, Triton interprets or compiles once for the whole process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
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
from kernel_reduce_adam_cases import ReduceAdamContract, coefs_of, flags
from kernel_reduce_cases import WORLDS, ReduceContract, ReduceKernels, draw

from fsdp_kernels import _ext, ops
from triton_ops import _common as common
from triton_ops import reference
from triton_ops._common import interpreted

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
                ReduceAdamContract.check_steps(  # type: ignore[arg-type]
                    self, TABLES["primes"], 3, grads, params, Mode(), n_publish=1, state=FP64
                )


class TestReference(ReduceContract, ReduceAdamContract, Float64):
    kernels = ReduceKernels(reference.reduce, reference.reduce_adam, reference.norm, reference.adam)


class TestOps(ReduceContract, ReduceAdamContract, Float64):
    """What a CPU run calls: C++ where it is built."""

    kernels = OPS


@needs_cpp
class TestEachLevel(ReduceContract, ReduceAdamContract, Float64):
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
class TestInterpreter(ReduceContract, ReduceAdamContract):
    kernels = TRITON

    def worlds(self, case: int) -> tuple[int, ...]:
        # Each number of ranks meets each dtype and each mode, but not each pair of them: this is
        # slow, and compiled code and C++ do all.
        return WORLDS[case % 5], WORLDS[(case + 2) % 5]

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


class Recorder:
    """Stands in for a Triton kernel and keeps what it is launched with."""

    def __init__(self) -> None:
        self.launched: dict[str, object] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **options: self.launched.update(options)


@pytest.mark.skipif(not interpreted(), reason="the interpreter takes CPU tensors")
@pytest.mark.parametrize("unaligned", [None, "peer", "copy"])
def test_wide_accesses_are_asked_for_only_at_aligned_addresses(
    unaligned: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter reads any address; on a device a wide access at an odd one faults."""
    table = TABLES["even"]
    problem, numel = Problem.make(table), table.end + TAIL
    peers = draw(2, numel, FP32, "cpu")
    if unaligned == "peer":
        peers[1] = draw(1, numel, FP32, "cpu", offset=1)[0]
    copies = draw(1, numel, BF16, "cpu", offset=4 if unaligned == "copy" else 0)
    summing, stepping = Recorder(), Recorder()
    monkeypatch.setattr(reduce, "reduce_kernel", summing)
    monkeypatch.setattr(reduce_adam, "reduce_adam_kernel", stepping)
    reduce.reduce(peers, torch.empty(numel))
    coefs = coefs_of(problem, Mode())
    reduce_adam.reduce_adam(peers, problem.shard, table, coefs, problem.factor, publish=copies)
    assert summing.launched["ALIGNED"] == (unaligned != "peer")
    assert stepping.launched["ALIGNED"] == (unaligned is None)
    assert summing.launched["ALIGN"] == 4
    assert stepping.launched["ALIGN"] == 8


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.is_available() and interpreted(),
    reason="TRITON_INTERPRET is set: Triton compiles nothing in this process",
)
class TestDevice(ReduceContract, ReduceAdamContract):
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

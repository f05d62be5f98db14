# SPDX-License-Identifier: Apache-2.0
"""The C++ kernels beyond the contract: every instruction set, threads, forks, sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import ModuleType

import built
import pytest
import torch
from built import ADDRESS, ROOT, UNDEFINED
from kernel_cases import (
    BF16,
    FP16,
    FP32,
    FP64,
    MODES,
    Float64Contract,
    Implementation,
    KernelContract,
    Mode,
    Problem,
    place,
    same_bits,
)

from fsdp_kernels import _ext, ops
from triton_ops import reference
from triton_ops._fragments import FragmentTable

_cpu = _ext.cpu()
if _cpu is None:
    pytest.skip(
        "the C++ kernels are not built (python setup.py build_ext --inplace)",
        allow_module_level=True,
    )
CPP: ModuleType = _cpu

BIG = place([1 << 18, 1 << 17, 12345, 1, 300_007])  # enough for several threads


@pytest.fixture(params=CPP.levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Force one instruction set."""
    before = CPP.level()
    CPP.set_level(request.param)
    yield request.param
    CPP.set_level(before)


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("level")
class TestEachLevel(KernelContract, Float64Contract):
    kernels = Implementation(ops.pack, ops.norm, ops.adam_coefs, ops.adam)


def test_the_best_level_is_the_default() -> None:
    program = "from fsdp_kernels import _ext; m = _ext.cpu(); assert m.level() == m.levels()[-1]"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set_level: expected one of baseline.*, got 'mmx'"):
        CPP.set_level("mmx")


def step_with(problem: Problem, mode: Mode) -> Problem:
    implementation = Implementation(ops.pack, ops.norm, ops.adam_coefs, ops.adam)
    problem.run(implementation, mode, None, 0.5)
    return problem


def assert_same_state(ours: Problem, theirs: Problem) -> None:
    for name, tensor in theirs.shard.named().items():
        assert same_bits(getattr(ours.shard, name), tensor), name


@pytest.mark.parametrize("mode", [MODES[0], MODES[-1]], ids=str)
def test_threads_change_no_bit_of_adam(threads: int, mode: Mode) -> None:
    ours = Problem.make(BIG, amsgrad=mode.amsgrad)
    theirs = ours.clone("cpu")
    step_with(ours, mode)
    # The coefficients may differ in float64's last bit between the two, so compare with one thread.
    torch.set_num_threads(1)
    step_with(theirs, mode)
    assert_same_state(ours, theirs)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, FP64], ids=str)
def test_threads_change_no_bit_of_norm_and_pack(threads: int, dtype) -> None:
    grads = torch.randn(BIG.end).to(dtype.dtype)
    total = ops.norm(grads, BIG)
    bucket = torch.full((BIG.end + 100,), 7.0)
    pieces = [grads[:300_000].view(1000, 300), None, grads[300_000:]]
    starts = [0, 300_000, 300_032]
    ops.pack(pieces, starts, bucket)
    torch.set_num_threads(1)
    assert same_bits(ops.norm(grads, BIG), total)
    expected = torch.full_like(bucket, 3.0)
    reference.pack(pieces, starts, expected)
    assert same_bits(bucket, expected)
    ops.pack(pieces, starts, bucket, accumulate=True)
    reference.pack(pieces, starts, expected, accumulate=True)
    assert same_bits(bucket, expected)


PATTERNS = {
    "bfloat16": torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16),
    "float16": torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16),
}


def tricky_floats() -> torch.Tensor:
    """Every float16 and bfloat16 value, its neighbours, the midpoints, and random bits."""
    every = torch.cat([pattern.float() for pattern in PATTERNS.values()])
    around = [every.view(torch.int32) + step for step in (-1, 0, 1, 0x1000, 0xFFF, 0x8000, 0x7FFF)]
    noise = torch.randint(-(2**31), 2**31 - 1, (1 << 16,)).to(torch.int32)
    return torch.cat([*around, noise]).view(torch.float32)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("accumulate", [False, True])
def test_conversions_of_every_value_are_torchs(to: torch.dtype, accumulate: bool) -> None:
    values = tricky_floats()
    for source in (*PATTERNS.values(), values, values.double() * (1 + 2.0**-40)):
        ours = torch.linspace(-3, 3, source.numel()).to(to)
        theirs = ours.clone()
        ops.pack([source], [0], ours, accumulate=accumulate)
        reference.pack([source], [0], theirs, accumulate=accumulate)
        nan = theirs.isnan()
        assert torch.equal(ours.isnan(), nan)
        assert same_bits(ours[~nan], theirs[~nan])


@pytest.mark.usefixtures("level")
def test_norm_counts_what_is_not_finite() -> None:
    grads = torch.randn(100_003)
    grads[[5, 40_000, 99_999]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        table = FragmentTable.build([(0, 4, 0), (8, 50_000, 1), (50_001, 100_000, 2)])
        assert ops.norm(grads.to(dtype), table)[1] == 2
    huge = torch.full((33,), 1e300, dtype=torch.float64)  # finite, but the squares are not
    assert ops.norm(huge, FragmentTable.build([(0, 33, 0)])).tolist() == [torch.inf, 0.0]


def test_a_forked_child_computes_with_threads_too() -> None:
    ours = Problem.make(BIG)
    theirs = ours.clone("cpu")
    torch.set_num_threads(2)
    step_with(theirs, Mode())  # threads have run before the fork
    expected = theirs.shard.master.numpy().tobytes()
    torch.set_num_threads(1)
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        # torch's own parallel regions would hang here: a child may not use OpenMP after its parent.
        ops.torch.get_num_threads = lambda: 2
        same = step_with(ours, Mode()).shard.master.numpy().tobytes() == expected
        os.write(write, b"same" if same else b"different")
        os._exit(0)
    os.close(write)
    try:
        assert os.read(read, 9) == b"same"
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        os.close(read)


def test_calls_from_several_python_threads_do_not_meet() -> None:
    problems = [Problem.make(BIG) for _ in range(3)]
    copies = [problem.clone("cpu") for problem in problems]
    workers = [threading.Thread(target=step_with, args=(p, Mode())) for p in problems]
    for worker in workers:
        worker.start()
    for copy in copies:
        step_with(copy, Mode())
    for worker in workers:
        worker.join()
    for problem, copy in zip(problems, copies, strict=True):
        assert_same_state(problem, copy)


def test_the_module_checks_its_numbers() -> None:
    """`ops` checks tensors; what it cannot see, the addresses' own arguments, is checked in C++."""
    memory = torch.zeros(64)
    at, table = memory.data_ptr(), torch.tensor([[0, 65, 0]])
    rows = (table.data_ptr(), 1)
    with pytest.raises(ValueError, match=r"norm: expected fragments inside \[0, 64\), got \[0, 65"):
        CPP.norm((at, 0), 64, rows, 1)
    with pytest.raises(ValueError, match="expected a dtype code from 0 to 3, got 9"):
        CPP.norm((at, 9), 64, rows, 1)
    with pytest.raises(ValueError, match="norm: expected grads, got a null pointer"):
        CPP.norm((0, 0), 65, rows, 1)
    shard = (at, 0, at, 0, at, at, 0, 0, 0, 65)
    with pytest.raises(ValueError, match="adam: expected rows below 0, got 0"):
        CPP.adam(shard, rows, (0, 0), 1.0, True, 1)
    with pytest.raises(ValueError, match="pack: expected a gradient inside"):
        CPP.pack([(at, 0, 60, 5)], (at, 0), 64, False, 1)


@pytest.mark.slow
def test_the_kernels_are_clean_under_sanitizers() -> None:
    """Build the kernels with AddressSanitizer and UBSan and drive them at every ragged end."""
    csrc = ROOT / "csrc"
    kernels = [csrc / "cpu" / "kernels.cpp", csrc / "cpu" / "reduce_adam.cpp"]
    kernels += sorted((csrc / "cpu").glob("level*.cpp"))
    sources = [ROOT / "tests" / "sanitize_cpu.cpp", *kernels]
    flags = ["-std=c++20", "-O1", "-g1", "-ffp-contract=off", "-fno-math-errno", "-pthread"]
    flags += [*ADDRESS, *UNDEFINED, f"-I{csrc}"]
    read = [file for file in sorted((csrc / "cpu").iterdir()) if file.suffix != ".cpp"]
    program = built.program("sanitize_cpu", "sanitize_cpu", sources, flags, read)
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.startswith("checked "), ran.stdout

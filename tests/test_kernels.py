# SPDX-License-Identifier: Apache-2.0
"""The kernel contract over every implementation, and the tables and checks that they share.

Triton decides when a kernel's module is imported whether it will interpret or compile it, once per
process. `conftest.py` asks for the interpreter where there is no CUDA device. With a device this
process compiles, and ``TRITON_INTERPRET=1 pytest tests/test_kernels.py`` runs the interpreter.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import (
    BF16,
    FP32,
    TABLES,
    Float64Contract,
    Implementation,
    KernelContract,
    Mode,
)

import triton_ops
from fsdp_kernels import ops
from triton_ops import _common as common
from triton_ops import reference
from triton_ops._common import interpreted
from triton_ops._fragments import FragmentTable

triton = pytest.importorskip("triton", reason="triton is not installed")

from triton_ops import adam, norm, pack  # noqa: E402 - they import triton

TRITON = Implementation(pack.pack, norm.norm, adam.adam_coefs, adam.adam)


class TestReference(KernelContract, Float64Contract):
    kernels = Implementation(reference.pack, reference.norm, reference.adam_coefs, reference.adam)


class TestOps(KernelContract, Float64Contract):
    """What a CPU run calls: C++ where it is built."""

    kernels = Implementation(ops.pack, ops.norm, ops.adam_coefs, ops.adam)


@pytest.mark.skipif(
    not interpreted(),
    reason="this process compiles Triton kernels; TRITON_INTERPRET=1 runs the interpreter",
)
@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered")
class TestInterpreter(KernelContract):
    kernels = TRITON

    def test_several_programs_a_range(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # As on a device. The interpreter's own block takes any range of these tests whole.
        monkeypatch.setattr(common, "INTERPRETER_BLOCK_NUMEL", 256)
        for name in ("primes", "blocks", "unaligned"):
            self.check_steps(TABLES[name], FP32, BF16, Mode())
            self.test_norm(BF16, name)
        for accumulate in (False, True):
            self.check_pack([torch.randn(1000), None, torch.randn(259)], BF16, accumulate)


# ---- tables


@st.composite
def _fragments(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    fragments, start = [], 0
    for row in range(draw(st.integers(0, 6))):
        start += draw(st.integers(0, 40))
        stop = start + draw(st.integers(0, 300))
        fragments.append((start, stop, row))
        start = stop
    return fragments


@given(_fragments(), st.sampled_from([1, 8, 64, 1024]))
def test_chunks_cover_each_fragment_once(fragments: list[tuple[int, int, int]], block: int) -> None:
    table = FragmentTable.build(fragments)
    expected = [(element, row) for start, stop, row in fragments for element in range(start, stop)]
    chunks = table.chunks(block, "cpu").tolist()
    got = [(element, row) for start, stop, row in chunks for element in range(start, stop)]
    assert got == expected
    assert all(0 < stop - start <= block for start, stop, _ in chunks)
    assert all(start % min(table.align_numel, block) == 0 for start, _, _ in chunks)
    assert table.chunks(block, "cpu") is table.chunks(block, "cpu")
    assert table.host().tolist() == [list(f) for f in fragments if f[0] != f[1]]
    assert table.end == max((stop for start, stop, _ in fragments if start < stop), default=0)


@pytest.mark.parametrize(
    "fragments", [[(4, 2, 0)], [(0, 8, 0), (7, 9, 1)], [(-1, 4, 0)], [(0, 4, -1)]]
)
def test_impossible_fragments_are_refused(fragments: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ValueError, match="FragmentTable: expected disjoint non-empty fragments"):
        FragmentTable.build(fragments)


def test_a_block_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a power of two, got 12"):
        FragmentTable.build([(0, 9, 0)]).chunks(12, "cpu")


def test_the_reference_needs_no_triton() -> None:
    program = (
        "import sys; sys.modules['triton'] = None; import triton_ops.reference; "
        "assert 'triton_ops.adam' not in sys.modules"
    )
    root = Path(triton_ops.__file__).parents[1]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True)


@pytest.mark.skipif(interpreted(), reason="the interpreter takes CPU tensors")
def test_cpu_tensors_are_refused_outside_the_interpreter() -> None:
    with pytest.raises(RuntimeError, match="expected a CUDA tensor, got cpu"):
        pack.pack([], [], torch.empty(8))

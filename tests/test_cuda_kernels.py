# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels: on the host, in fibers and under sanitizers, and on a device."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import cuda_build
import pytest
import torch
from built import ADDRESS, UNDEFINED
from cuda_build import HOST
from kernel_cases import FreshInputs, Implementation, covered, place, same_bits
from kernel_move_cases import NormContract, PackContract
from kernel_problems import LOW, Precision

from fsdp_kernels import _ext, ops
from triton_ops import reference
from triton_ops._fragments import FragmentTable

DTYPES = [precision.dtype for precision in LOW]
CHUNK = 4096  # elements that a block moves


@pytest.fixture(scope="module")
def host() -> ModuleType:
    """The kernels, compiled for the host with UBSan, or AddressSanitizer where it is preloaded."""
    preloaded = "libasan" in os.environ.get("LD_PRELOAD", "")
    return cuda_build.load_module(tuple(ADDRESS if preloaded else UNDEFINED))


def absent(*args: Any, **options: Any) -> None:
    raise AssertionError("the CUDA module has no such kernel")


class TestOnHost(FreshInputs, NormContract, PackContract):
    @pytest.fixture(autouse=True)
    def _kernels(self, host: ModuleType) -> None:
        pack, norm = partial(ops.pack_with, host), partial(ops.norm_with, host)
        self.kernels = Implementation(pack, norm, absent, absent)

    @pytest.mark.parametrize("accumulate", [False, True], ids=["write", "accumulate"])
    def test_pack_at_every_alignment(self, accumulate: bool) -> None:
        """Sources and targets that start anywhere in 16 bytes, around one group and one chunk."""
        for dtype, to in itertools.product(DTYPES, DTYPES):
            for offset, start in itertools.product(range(0, 9, 2), (0, 1, 4, 7)):
                for numel in (1, 7, 8, 9, 40, CHUNK - start, CHUNK + 1):
                    source = torch.randn(numel + offset).to(dtype)[offset:]
                    self.check_against_reference(
                        [source], [start], start + numel + 3, to, accumulate
                    )

    @pytest.mark.parametrize("accumulate", [False, True], ids=["write", "accumulate"])
    def test_pack_of_more_gradients_than_one_launch_takes(self, accumulate: bool) -> None:
        gradients: list[torch.Tensor | None] = []
        starts, start = [], 0
        for index in range(300):
            rows = 1 + index % 5
            gradient = torch.randn(rows, 2 + index % 7).to(DTYPES[index % 3])
            strided = index % 4 == 1
            gradients.append(None if index % 11 == 3 else gradient.t() if strided else gradient)
            starts.append(start)
            start += gradient.numel() + index % 9
        for to in DTYPES:
            self.check_against_reference(gradients, starts, start + 5000, to, accumulate)

    def test_pack_of_large_strided_gradients(self) -> None:
        base = torch.randn(70, 2, 90)
        for gradient in (base.permute(2, 0, 1), base[::3, :, 1:], base.expand(2, 70, 2, 90)):
            for to in DTYPES:
                numel = gradient.numel()
                self.check_against_reference([gradient], [13], numel + 5013, to, accumulate=False)

    def test_pack_writes_nothing_beside_the_bucket(self) -> None:
        for to, start, numel in itertools.product(DTYPES, range(5), (0, 1, 30, CHUNK + 2)):
            memory = torch.full((numel + 64,), 7.0, dtype=to)
            self.kernels.pack([None], [0], memory[start : start + numel])
            assert memory.count_nonzero() == 64
            assert memory[start : start + numel].count_nonzero() == 0

    def check_against_reference(
        self,
        gradients: list[torch.Tensor | None],
        starts: list[int],
        numel: int,
        to: torch.dtype,
        accumulate: bool,
    ) -> None:
        ours = torch.full((numel,), math.nan).to(to)
        if accumulate:
            ours = torch.randn(numel).to(to)
        theirs = ours.clone()
        self.kernels.pack(gradients, starts, ours, accumulate=accumulate)
        reference.pack(gradients, starts, theirs, accumulate=accumulate)
        assert same_bits(ours, theirs)

    @pytest.mark.parametrize("grads", LOW, ids=str)
    def test_norm_at_every_alignment(self, grads: Precision) -> None:
        flat = torch.randn(9 * CHUNK).to(grads.dtype)
        for start, numel in itertools.product(range(9), (1, 7, 8, 9, 33, CHUNK - 1, 2 * CHUNK + 3)):
            table = FragmentTable.build([(start, start + numel, 0)])
            total, bad = self.kernels.norm(flat, table).tolist()
            expected = flat[start : start + numel].double().square().sum().item()
            assert total == pytest.approx(expected, rel=1e-6)
            assert bad == 0

    def test_norm_of_more_chunks_than_blocks(self) -> None:
        """One fragment per element or two: each block then takes several chunks."""
        table = place([1 + index % 2 for index in range(2500)], align=1, gap=1)
        flat = torch.randn(table.end)
        expected = flat[covered(table, flat.numel())].double().square().sum().item()
        assert self.kernels.norm(flat, table)[0].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(_ext.load("_cuda") == _ext.NOT_BUILT, reason="the CUDA kernels are not built")
class TestOnDevice(FreshInputs, NormContract, PackContract):
    kernels = Implementation(ops.pack, ops.norm, absent, absent, device="cuda")

    def test_equals_the_host_bit_for_bit(self, host: ModuleType) -> None:
        """The same order of additions, and no contraction: norms too have the same bits."""
        table = place([1, 7, 5 * CHUNK + 13, 2000], gap=3)
        for dtype in DTYPES:
            flat = torch.randn(table.end).to(dtype)
            here, there = ops.norm_with(host, flat, table), ops.norm(flat.cuda(), table)
            assert same_bits(here, there)

    def test_another_stream_than_the_default(self) -> None:
        gradient, out = torch.randn(1 << 20, device="cuda"), torch.empty(1 << 20, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            ops.pack([gradient], [0], out)
            copy = out.clone()
        stream.synchronize()
        assert torch.equal(copy, gradient)

    def test_nothing_waits_for_the_device(self) -> None:
        gradients = [torch.randn(33, 9, device="cuda").t(), None, torch.randn(5, device="cuda")]
        out, table = torch.empty(1024, device="cuda"), place([100, 300])
        ops.norm(out, table)  # uploads the table
        torch.cuda.set_sync_debug_mode("error")
        try:
            ops.pack(gradients, [0, 300, 400], out)
            ops.norm(out, table)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_in_a_cuda_graph(self) -> None:
        gradient, out = torch.randn(3000, device="cuda"), torch.empty(4096, device="cuda")
        table = place([3000])
        ops.norm(out, table)  # uploads the table
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ops.pack([gradient], [0], out)
            result = ops.norm(out, table)
        gradient.fill_(2.0)
        graph.replay()
        assert result.tolist() == [4.0 * 3000, 0.0]


class FakeTensor(NamedTuple):
    """As much of a CUDA tensor as the choice looks at."""

    dtype: torch.dtype
    is_cuda: bool = True


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_cuda_tensors_take_the_module_where_it_serves_them(
    monkeypatch: pytest.MonkeyPatch, built: bool, dtype: torch.dtype
) -> None:
    triton_pack = pytest.importorskip("triton_ops.pack", reason="triton is not installed")
    triton_norm = pytest.importorskip("triton_ops.norm", reason="triton is not installed")
    called: list[str] = []

    def named(name: str) -> Callable[..., None]:
        return lambda *args, **options: called.append(name)

    monkeypatch.setattr(ops, "pack_with", named("cuda"))
    monkeypatch.setattr(ops, "norm_with", named("cuda"))
    monkeypatch.setattr(triton_pack, "pack", named("triton"))
    monkeypatch.setattr(triton_norm, "norm", named("triton"))
    monkeypatch.setattr(_ext, "cuda", lambda: ModuleType("_cuda") if built else None)
    single, tensor = FakeTensor(torch.float32), FakeTensor(dtype)
    ops.pack([single, None, tensor], [0, 4, 4], single)  # type: ignore[list-item,arg-type]
    ops.pack([None], [0], tensor)  # type: ignore[arg-type]
    ops.norm(tensor, FragmentTable.build([]))  # type: ignore[arg-type]
    assert called == ["cuda" if built and dtype != torch.float64 else "triton"] * 3


def test_conversions_of_every_value_are_torchs(host: ModuleType) -> None:
    """Every float16 and bfloat16, and the floats around them and halfway between."""
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    every = [patterns.view(torch.bfloat16), patterns.view(torch.float16)]
    near = torch.cat([values.float() for values in every]).view(torch.int32)
    floats = torch.cat([near + step for step in (-1, 0, 1, 0x1000, 0xFFF, 0x8000, 0x7FFF)])
    for source in (*every, floats.view(torch.float32)):
        for to in DTYPES:
            ours, theirs = torch.empty(len(source), dtype=to), torch.empty(len(source), dtype=to)
            ops.pack_with(host, [source], [0], ours)
            reference.pack([source], [0], theirs)
            numbers = ~theirs.isnan()
            assert torch.equal(ours.isnan(), theirs.isnan())
            assert same_bits(ours[numbers], theirs[numbers])


_AT = torch.zeros(64).data_ptr()  # an address that nothing is launched with


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([(_AT, 0, 60, 5)], r"a gradient inside \[0, 64\), got \[60, 65\)"),
        ([(_AT, 0, 0, -1)], r"a gradient inside \[0, 64\), got \[0, -1\)"),
        ([(_AT, 0, 0, 8), (_AT, 0, 7, 2)], r"a gradient inside \[8, 64\), got \[7, 9\)"),
        ([(0, 0, 0, 8)], "a gradient, got a null pointer"),
        ([(_AT, 3, 0, 8)], "a dtype code from 0 to 2, got 3"),
        ([(_AT, 0, 0, 8, (2, 3), (3, 1))], "sizes and strides of 8 elements, got 2 sizes of 6"),
        ([(_AT, 0, 0, 8, (2, 4), (3,))], "sizes and strides of 8 elements, got 2 sizes of 8"),
        ([(_AT, 0, 0, 0, (2,) * 9, (3,) * 9)], "sizes and strides of 0 elements"),
    ],
)
def test_pack_checks_its_numbers(host: ModuleType, sources: list[Any], message: str) -> None:
    """`ops` checks tensors; what it cannot see is checked in C++, before anything is launched."""
    full = [(*source, None, None) if len(source) == 4 else source for source in sources]
    with pytest.raises(ValueError, match=f"expected {message}"):
        host.pack(full, (_AT, 0), 64, False, 0)


def test_pack_refuses_what_its_table_cannot_hold(host: ModuleType) -> None:
    with pytest.raises(ValueError, match="expected at most 8 dimensions that do not merge"):
        host.pack([(_AT, 0, 0, 512, (2,) * 9, (1,) * 9)], (_AT, 0), 512, False, 0)
    with pytest.raises(ValueError, match="expected a bucket, got a null pointer"):
        host.pack([], (0, 0), 64, False, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((0, 0), (_AT, 1), _AT, _AT), "gradients, got a null pointer"),
        (((_AT, 0), (0, 1), _AT, _AT), "a table of chunks, got a null pointer"),
        (((_AT, 0), (0, 0), 0, _AT), "room for partial results, got a null pointer"),
        (((_AT, 0), (0, 0), _AT, 0), "room for two results, got a null pointer"),
        (((_AT, -1), (0, 0), _AT, _AT), "a dtype code from 0 to 2, got -1"),
    ],
)
def test_norm_checks_its_numbers(host: ModuleType, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"expected {message}"):
        host.norm(*arguments, 0)


@pytest.mark.parametrize("name", ["index_cases", "fiber_cases"])
def test_in_cpp_under_sanitizers(name: str) -> None:
    """The index arithmetic by itself, and that the fibers find a barrier that is missing."""
    program = cuda_build.build(name, [HOST / f"{name}.cpp"], [*ADDRESS, *UNDEFINED])
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("checked "), done.stdout


@pytest.mark.slow
@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="this is that process")
def test_the_contract_under_address_sanitizer() -> None:
    """The same tests with the module compiled for it: every tensor has a guard on both sides."""
    cuda_build.build_module(ADDRESS)
    compiler = os.environ.get("CXX", "g++")
    libraries = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")  # it intercepts the latter's exceptions
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
    }
    # Without capture: what AddressSanitizer prints as it ends the process would be lost.
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        [*command, "-k", "OnHost or numbers or values"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout

# SPDX-License-Identifier: Apache-2.0
"""What nvcc made of the CUDA kernels, read from the module that was built; no device is needed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType

import cuda_build
import pytest
import torch

from fsdp_kernels import _ext

_found = _ext.load("_cuda")
if isinstance(_found, str):
    pytest.skip(f"the CUDA kernels: {_found}", allow_module_level=True)
CUDA: ModuleType = _found

# Kernels with their element type (of the bucket, for pack), and whether they accumulate.
PACKS = [("pack_dense", to, old) for to in ("fp32", "bf16", "fp16") for old in (False, True)]
STRIDED = [("pack_strided", to, old) for _, to, old in PACKS]
NORMS = [("norm_blocks", of, False) for of in ("fp32", "bf16", "fp16")]
Kernel = tuple[str, str, bool]
KERNELS: list[Kernel] = [*PACKS, *STRIDED, *NORMS, ("norm_total", "", False)]

MAX_REGISTERS = 64  # four blocks of 256 threads on a multiprocessor

_TYPES = {"f": "fp32", "13__nv_bfloat16": "bf16", "6__half": "fp16", None: ""}
_NAME = re.compile(
    r"Function :? ?_Z\w*?(pack_dense|pack_strided|norm_blocks|norm_total)"
    r"(?:I(f|13__nv_bfloat16|6__half)(?:Lb([01])E)?E)?"
)
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]+)")


@dataclass
class Compiled:
    """One kernel for one architecture."""

    registers: int = -1
    stack: int = -1
    local: int = -1
    instructions: list[str] = field(default_factory=list)

    def runs_of_loads(self) -> list[int]:
        """Count the 16-byte loads that follow each other with no 16-byte store between them."""
        wide = [op for op in self.instructions if re.match(r"(LDG|STG)\.E\.128", op)]
        letters = "".join(op[0] for op in wide)
        return sorted(len(run) for run in re.findall("L+", letters))


def dump(*options: str) -> list[str]:
    tool, disassembler = map(cuda_build.nvidia_tool, ("cuobjdump", "nvdisasm"))
    places = [str(disassembler.parent), os.environ.get("PATH", "")]
    command = [str(tool), *options, str(CUDA.__file__)]
    environment = {**os.environ, "PATH": os.pathsep.join(places)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@cache
def compiled() -> dict[tuple[str, Kernel], Compiled]:
    kernels: dict[tuple[str, Kernel], Compiled] = {}
    for options in (["--dump-resource-usage"], ["-sass"]):
        arch, current = "", Compiled()
        for line in dump(*options):
            if match := re.match(r"arch = (\w+)", line):
                arch = match[1]
            elif match := _NAME.search(line):
                kernel = match[1], _TYPES[match[2]], match[3] == "1"
                current = kernels.setdefault((arch, kernel), Compiled())
            elif match := _USAGE.search(line):
                current.registers, current.stack, current.local = map(int, match.groups())
            elif match := _INSTRUCTION.match(line):
                current.instructions.append(match[1])
    return kernels


ARCHITECTURES = [name for name in CUDA.architectures() if name.startswith("sm_")]


def test_every_kernel_is_there_for_every_architecture() -> None:
    assert set(compiled()) == {(arch, kernel) for arch in ARCHITECTURES for kernel in KERNELS}
    newest = ARCHITECTURES[-1].removeprefix("sm_")
    assert CUDA.architectures() == [*ARCHITECTURES, f"compute_{newest}"]
    assert any(f"sm_{newest}.ptx" in line for line in dump("-lptx"))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: "-".join(map(str, kernel)))
def test_registers_and_spills(arch: str, kernel: Kernel) -> None:
    found = compiled()[arch, kernel]
    assert 0 < found.registers <= MAX_REGISTERS
    assert (found.stack, found.local) == (0, 0)
    for op in found.instructions:
        assert not op.startswith(("LDL", "STL")), op  # a spill
        # A contracted multiply-add rounds once where the host rounds twice.
        assert not op.startswith(("FFMA", "DFMA")), op


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernel", PACKS, ids=lambda kernel: "-".join(map(str, kernel)))
def test_pack_moves_16_bytes_at_a_time(arch: str, kernel: Kernel) -> None:
    """16 elements a thread: for each gradient dtype, all loads and then all stores."""
    _, to, accumulate = kernel
    bytes_of = {"fp32": 4, "bf16": 2, "fp16": 2}
    loads = [bytes_of[source] + accumulate * bytes_of[to] for source in bytes_of]
    found = compiled()[arch, kernel]
    assert found.runs_of_loads() == sorted(loads)
    stores = [op for op in found.instructions if op.startswith("STG.E.128")]
    assert len(stores) >= 3 * bytes_of[to] + 1  # and at least one that writes zeros
    assert not [op for op in found.instructions if re.match(r"(LDG|STG)\.E\.64", op)]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernel", NORMS, ids=lambda kernel: kernel[1])
def test_norm_reads_16_bytes_at_a_time(arch: str, kernel: Kernel) -> None:
    found = compiled()[arch, kernel]
    loads = [op for op in found.instructions if op.startswith("LDG.E.128")]
    assert len(loads) >= {"fp32": 4, "bf16": 2, "fp16": 2}[kernel[1]]


def test_importing_starts_nothing() -> None:
    """No context, no driver, no thread, nothing printed; so it imports on a host without a GPU."""
    program = (
        "import os; from fsdp_kernels import _cuda; _cuda.architectures(); "
        "assert len(os.listdir('/proc/self/task')) == threads, 'a thread'; "
        "assert 'libcuda.so' not in open('/proc/self/maps').read(), 'the driver'"
    )
    before = "import os, torch, fsdp_kernels; threads = len(os.listdir('/proc/self/task')); "
    done = subprocess.run(
        [sys.executable, "-c", before + program], capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: the launch works")
def test_a_launch_without_a_device_says_so() -> None:
    message = "pack: expected the kernel to launch, got .* Run on a CUDA device"
    with pytest.raises(RuntimeError, match=message):
        CUDA.pack([], (1 << 20, 0), 64, False, 0)


@pytest.mark.parametrize("name", ["_cuda", "_nccl"])
def test_the_static_runtime_stays_inside(name: str) -> None:
    """A symbol that is visible could be bound to the copy of the runtime that torch has loaded."""
    module = _ext.load(name)
    assert isinstance(module, ModuleType)
    command = ["nm", "--dynamic", str(Path(str(module.__file__)))]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"PyInit_{name}" in listed
    assert not re.findall(r"\bcuda[A-Z]\w+|__cuda\w+", listed)

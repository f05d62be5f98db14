# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels compile for sm_80, sm_90 and sm_100 without a GPU, to the PTX we want.

What switches sum is for sm_90 and later.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import triton_ops

pytest.importorskip("triton", reason="triton is not installed")

ARCHS = (80, 90, 100)
VARIANTS = (
    "adam-fp32-None-plain",
    "adam-bf16-bf16-plain",
    "adam-fp32-bf16-plain",
    "adam-fp16-fp16-amsgrad",
    "adam_coefs",
    "norm-fp32",
    "norm-bf16",
    "pack-fp32-fp32-write",
    "pack-bf16-fp32-write",
    "pack-bf16-bf16-accumulate",
    "reduce-fp32-fp32-2-norm",
    "reduce-bf16-bf16-4-norm",
    "reduce-bf16-fp32-4",
    "reduce-bf16-bf16-8-accumulate",
    "reduce_adam-fp32-None-2",
    "reduce_adam-bf16-bf16-2",
    "reduce_adam-fp32-bf16-8",
    "reduce_adam-bf16-bf16-8-amsgrad",
    "reduce_adam-fp32-bf16-32",
)
MULTICAST = {
    "multicast-fp32": ("multimem.ld_reduce.relaxed.sys.global.add.v4.f32", r"\.ADD\.F32x4\.RN\."),
    "multicast-bf16": (
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2",
        r"\.(F32|HP)ADD\.BF16x8\.RN\.",  # what accumulates in fp32 is called HP on sm_100
    ),
    "multicast-fp16": (
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2",
        r"\.(F32|HP)ADD\.F16x8\.RN\.",
    ),
}
# With 64 registers a thread a multiprocessor holds 1024 threads: enough to hide memory latency.
MAX_REGISTERS = {"adam": 64, "adam_coefs": 64, "norm": 64, "pack": 64, "reduce": 64}
MAX_REGISTERS["multicast"] = 32
# The loads of eight ranks in flight at once; still 896 threads.
MAX_REGISTERS["reduce_adam"] = 72
_WIDE = re.compile(r"\.(v4\.[busf]32|v2\.[busf]64|v8\.[busf]16|b128)$")


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, int], dict[str, Any]]:
    """Compile everything in one process that is not in interpreter mode."""
    root = str(Path(triton_ops.__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(paths)}
    program = Path(__file__).with_name("aot_compile.py")
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {(row["variant"], row["arch"]): row for row in json.loads(done.stdout)}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_ptx(compiled: dict[tuple[str, int], dict[str, Any]], variant: str, arch: int) -> None:
    check(compiled[variant, arch])


def check(row: dict[str, Any]) -> None:
    """Look at accesses, registers, spills, and the rounding of one compiled kernel."""
    variant = row["variant"]
    wide = {"ld": 0, "st": 0}
    half_wide = []
    for access, count in row["accesses"].items():
        if _WIDE.search(access):
            wide[access[:2]] += count
        elif ".v2." in access:
            half_wide.append(access)
    # Every stream of a full block, and nothing else, moves 16 bytes at a time.
    assert wide == {"ld": row["expected_loads"], "st": row["expected_stores"]}, row
    assert half_wide == [], row
    assert not row["local"], row
    assert row["spill_bytes"] == 0, row
    assert row["registers"] <= MAX_REGISTERS[variant.split("-")[0]], row
    if variant.startswith(("adam-", "reduce")):
        # Bitwise equality with the reference rests on these.
        assert row["contracted"] == 0, row
        assert row["approximate"] == 0, row
        assert row["types"].get("scale", "fp64") == "fp64", row


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch >= 90])
@pytest.mark.parametrize("variant", MULTICAST)
def test_switches_sum_16_bytes_at_a_time(
    compiled: dict[tuple[str, int], dict[str, Any]], variant: str, arch: int
) -> None:
    row = compiled[variant, arch]
    check(row)
    load, instruction = MULTICAST[variant]
    assert len(row["switched"]) == row["expected_stores"]
    for found in row["switched"]:
        # The registers go to memory in the order in which the load fills them: no element moved.
        assert found == {"load": load, "in_order": True}
    assert len(row["switched_sass"]) == row["expected_stores"]
    assert all(re.search(instruction, sass) for sass in row["switched_sass"]), row


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["fp32-fp32-2", "bf16-bf16-4"])
def test_the_norm_of_a_sum_adds_in_the_order_of_norm(
    compiled: dict[tuple[str, int], dict[str, Any]], dtype: str, arch: int
) -> None:
    row = compiled[f"reduce-{dtype}-norm", arch]
    assert row["barriers"] == 1  # between the sum's stores and the norm's loads
    fused = row["summed_layouts"]
    assert len(fused) == 5  # block and rest, of squares and of a count; squares again in float64
    assert fused == compiled[f"norm-{dtype[:4]}", arch]["summed_layouts"]


def test_every_variant_is_looked_at(compiled: dict[tuple[str, int], dict[str, Any]]) -> None:
    expected = {(variant, arch) for variant in VARIANTS for arch in ARCHS}
    expected |= {(variant, arch) for variant in MULTICAST for arch in ARCHS if arch >= 90}
    assert set(compiled) == expected
    assert not any(compiled[variant, arch]["switched"] for variant in VARIANTS for arch in ARCHS)

# SPDX-License-Identifier: Apache-2.0
"""Compile every Triton kernel ahead of time and print what the PTX holds, as one JSON list.

A program of its own, run by `test_triton_aot.py`: compiling needs a process in which triton is not
in interpreter mode, and the test session's is. Needs no GPU; ptxas comes with triton's wheel.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver

from triton_ops import _common as common
from triton_ops import adam, norm, pack, reduce, reduce_adam

ARCHS = (80, 90, 100)
THREADS = 32 * common.NUM_WARPS
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
SAMPLES: dict[str, Any] = {
    "*fp32": torch.zeros(64),
    "*bf16": torch.zeros(64, dtype=torch.bfloat16),
    "*fp16": torch.zeros(64, dtype=torch.float16),
    "*fp64": torch.zeros(64, dtype=torch.float64),
    "*i64": torch.zeros(64, dtype=torch.int64),
    "*bool": torch.zeros(64, dtype=torch.bool),
    "float": 0.5,
    "int": 5,
}
TYPES = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel, and the streams that must move 16 bytes at a time."""

    name: str
    kernel: Any
    arguments: dict[
        str, Any
    ]  # dtype of a pointer as "*fp32", of a scalar as "i32"; else a constant
    block: int
    loads: tuple[str, ...] = ()  # dtypes of the streams read
    stores: tuple[str, ...] = ()
    since: int = 0  # the first architecture that can run it

    def vector_accesses(self, streams: tuple[str, ...]) -> int:
        """Count the 16-byte accesses that a thread needs for its part of a block's streams."""
        return sum(
            self.block * BYTES[dtype] // (THREADS * common.VECTOR_BYTES) for dtype in streams
        )


def adam_variant(grads: str, params: str | None, amsgrad: bool, decoupled: bool) -> Variant:
    state = ("fp32",) * (4 if amsgrad else 3)
    narrowest = min(BYTES[dtype] for dtype in (grads, params or "fp32"))
    return Variant(
        name=f"adam-{grads}-{params}-{'amsgrad' if amsgrad else 'plain'}",
        kernel=adam.adam_kernel,
        arguments={
            "grads": f"*{grads}",
            "master": "*fp32",
            "exp_avg": "*fp32",
            "exp_avg_sq": "*fp32",
            "max_exp_avg_sq": "*fp32" if amsgrad else None,
            "shard_params": params and f"*{params}",
            "chunks": "*i64",
            "coefs": "*fp64",
            "factor": "*fp64",
            "scale": "float",
            "DECOUPLED": decoupled,
            "MAXIMIZE": False,
            "ALIGN": common.VECTOR_BYTES // narrowest,
            "BLOCK": common.BLOCK_NUMEL,
        },
        block=common.BLOCK_NUMEL,
        loads=(grads, *state),
        stores=(*state, *([params] if params else [])),
    )


def coefs_variant() -> Variant:
    columns = {"hyper": "*fp64", "step": "*fp32", "used": "*bool", "skip": "*fp32", "out": "*fp64"}
    constants = {"n_params": "int", "DECOUPLED": True, "BLOCK": 128}
    return Variant("adam_coefs", adam.adam_coefs_kernel, {**columns, **constants}, block=128)


def norm_variant(grads: str) -> Variant:
    block = common.BLOCK_NUMEL * norm._BLOCKS
    arguments = {
        "grads": f"*{grads}",
        "chunks": "*i64",
        "partials": "*fp64",
        "ALIGN": common.VECTOR_BYTES // BYTES[grads],
        "BLOCK": block,
        "WIDE": tl.float32,
    }
    return Variant(f"norm-{grads}", norm.norm_kernel, arguments, block, loads=(grads,))


def pack_variant(grads: str, out: str, accumulate: bool) -> Variant:
    block = common.BLOCK_NUMEL * pack._BLOCKS
    arguments = {
        "out": f"*{out}",
        "addresses": "*i64",
        "chunks": "*i64",
        "DTYPE": TYPES[grads],
        "WIDE": tl.float32,
        "ACCUMULATE": accumulate,
        "ALIGN": common.VECTOR_BYTES // min(BYTES[grads], BYTES[out]),
        "BLOCK": block,
    }
    name = f"pack-{grads}-{out}-{'accumulate' if accumulate else 'write'}"
    loads = (grads, out) if accumulate else (grads,)
    return Variant(name, pack.pack_kernel, arguments, block, loads=loads, stores=(out,))


def reduce_variant(peers: str, out: str, world: int, *, accumulate: bool, table: bool) -> Variant:
    block = common.BLOCK_NUMEL * norm._BLOCKS
    arguments = {
        "peers": "*i64",
        "out": f"*{out}",
        "chunks": "*i64",
        "partials": "*fp64" if table else None,
        "n_partials": "int",
        "DTYPE": TYPES[peers],
        "WORLD": world,
        "WIDE": tl.float32,
        "ACCUMULATE": accumulate,
        "ALIGNED": True,
        "ALIGN": common.VECTOR_BYTES // min(BYTES[peers], BYTES[out]),
        "BLOCK": block,
    }
    extra = (out,) * (accumulate + table)  # read to be added to, read back by the norm
    name = f"reduce-{peers}-{out}-{world}{'-accumulate' * accumulate}{'-norm' * table}"
    loads = (*(peers,) * written_out(world), *extra)
    return Variant(name, reduce.reduce_kernel, arguments, block, loads=loads, stores=(out,))


def multicast_variant(dtype: str) -> Variant:
    """The sum in switches: each 16 bytes of a block are one load of theirs."""
    name = f"multicast-{dtype}"
    variant = reduce_variant(dtype, dtype, 1, accumulate=False, table=False)
    arguments = {**variant.arguments, "BLOCK": common.BLOCK_NUMEL, "MULTICAST": True}
    return Variant(name, variant.kernel, arguments, common.BLOCK_NUMEL, stores=(dtype,), since=90)


def reduce_adam_variant(peers: str, copy: str | None, world: int, *, amsgrad: bool) -> Variant:
    state = ("fp32",) * (4 if amsgrad else 3)
    narrowest = min(BYTES[dtype] for dtype in (peers, copy or "fp32"))
    return Variant(
        name=f"reduce_adam-{peers}-{copy}-{world}{'-amsgrad' * amsgrad}",
        kernel=reduce_adam.reduce_adam_kernel,
        arguments={
            "peers": "*i64",
            "copies": "*i64",
            "n_copies": "int",
            "master": "*fp32",
            "exp_avg": "*fp32",
            "exp_avg_sq": "*fp32",
            "max_exp_avg_sq": "*fp32" if amsgrad else None,
            "chunks": "*i64",
            "coefs": "*fp64",
            "factor": "*fp64",
            "scale": "float",
            "DTYPE": TYPES[peers],
            "WORLD": world,
            "COPY_DTYPE": TYPES[copy or "fp32"],
            "ALIGNED": True,
            "DECOUPLED": not amsgrad,
            "MAXIMIZE": False,
            "ALIGN": common.VECTOR_BYTES // narrowest,
            "BLOCK": common.BLOCK_NUMEL,
        },
        block=common.BLOCK_NUMEL,
        loads=(*(peers,) * written_out(world), *state),
        # The copies are a loop: its body is written out once.
        stores=(*state, copy or "fp32"),
    )


def written_out(world: int) -> int:
    """Count the loads of ranks' memory in the code: beyond some ranks they are a loop.

    The first rank, one turn of the loop, and the ranks that are left over.
    """
    unrolled = reduce._MAX_UNROLLED.value
    return world if world <= unrolled else 1 + unrolled + (world - 1) % unrolled


VARIANTS = (
    adam_variant("fp32", None, amsgrad=False, decoupled=True),
    adam_variant("bf16", "bf16", amsgrad=False, decoupled=True),
    adam_variant("fp32", "bf16", amsgrad=False, decoupled=True),
    adam_variant("fp16", "fp16", amsgrad=True, decoupled=False),
    coefs_variant(),
    norm_variant("fp32"),
    norm_variant("bf16"),
    pack_variant("fp32", "fp32", accumulate=False),
    pack_variant("bf16", "fp32", accumulate=False),
    pack_variant("bf16", "bf16", accumulate=True),
    reduce_variant("fp32", "fp32", 2, accumulate=False, table=True),
    reduce_variant("bf16", "bf16", 4, accumulate=False, table=True),
    reduce_variant("bf16", "fp32", 4, accumulate=False, table=False),
    reduce_variant("bf16", "bf16", 8, accumulate=True, table=False),
    reduce_adam_variant("fp32", None, 2, amsgrad=False),
    reduce_adam_variant("bf16", "bf16", 2, amsgrad=False),
    reduce_adam_variant("fp32", "bf16", 8, amsgrad=False),
    reduce_adam_variant("bf16", "bf16", 8, amsgrad=True),
    reduce_adam_variant("fp32", "bf16", 32, amsgrad=False),
    multicast_variant("fp32"),
    multicast_variant("bf16"),
    multicast_variant("fp16"),
)


class NoDevice:
    """Stands in for triton's CUDA driver, so that a launch goes as far as compiling."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_for(variant: Variant, arch: int) -> Any:
    """Launch on nothing, with 16-byte aligned pointers; return the compiled kernel."""
    driver.set_active(NoDevice(arch))
    return variant.kernel.warmup(
        **{
            name: SAMPLES[value] if isinstance(value, str) else value
            for name, value in variant.arguments.items()
        },
        **common.LAUNCH_OPTIONS,
        grid=(1,),
    )


def summed_layouts(ttgir: str) -> list[str]:
    """List how the tensors of a block that are summed lie over threads: the order of addition."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.blocked<.*>)$", ttgir, re.MULTILINE))
    summed = re.findall(r"^\s*\}\) : \(tensor<(\d+)x(\w+), (#\w+)>\) -> ", ttgir, re.MULTILINE)
    return sorted(f"{numel} {dtype} {layouts[name]}" for numel, dtype, name in summed)


def switched(ptx: str) -> list[dict[str, Any]]:
    """List the loads that switches sum: what they are, and whether they are stored as they came."""
    found = re.findall(r"(multimem\.\S+) \{([^}]+)\}", ptx)
    stored = re.findall(r"st\.global\S* \[[^]]+\], \{ ?([^}]+?) ?\}", ptx)
    return [{"load": load, "in_order": registers in stored} for load, registers in found]


def sass(cubin: bytes) -> str:
    """Disassemble with the tool that comes with triton."""
    nvdisasm = Path(get_ptxas(90).path).with_name("nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([nvdisasm, file.name], capture_output=True, text=True, check=True)
    return done.stdout


def resources(ptx: str, arch: int) -> str:
    """Return what ``ptxas -v`` says of registers and spills."""
    target = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
    assert target is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(arch).path, "-v", "--fmad=false", f"--gpu-name={target[1]}"]
        done = subprocess.run(
            [*command, file.name, "-o", os.devnull], capture_output=True, text=True, check=True
        )
    return done.stderr


def describe(variant: Variant, arch: int) -> dict[str, object]:
    """Compile one variant for one architecture and count what it does to memory."""
    compiled = compile_for(variant, arch)
    ptx, ttgir, types = compiled.asm["ptx"], compiled.asm["ttgir"], compiled.src.signature
    accesses = Counter(re.findall(r"\b((?:ld|st)\.(?:global|local)[.\w]*)", ptx))
    report = resources(ptx, arch)
    registers = re.search(r"Used (\d+) registers", report)
    spills = re.findall(r"(\d+) bytes (?:spill|stack)", report)
    assert registers is not None, report
    return {
        "variant": variant.name,
        "arch": arch,
        "types": types,
        "accesses": accesses,
        "expected_loads": variant.vector_accesses(variant.loads),
        "expected_stores": variant.vector_accesses(variant.stores),
        "streams": len(variant.loads) + len(variant.stores),
        "summed_layouts": summed_layouts(ttgir),
        "barriers": len(re.findall(r"\b(?:ttg\.barrier|gpu\.barrier)\b", ttgir)),
        "switched": (summed := switched(ptx)),
        "switched_sass": re.findall(r"LDGMC\S+", sass(compiled.asm["cubin"])) if summed else [],
        "local": ".local" in ptx,
        "contracted": len(re.findall(r"\bfma\.rn", ptx)),
        "approximate": len(re.findall(r"\b(?:div\.full|div\.approx|sqrt\.approx)", ptx)),
        "registers": int(registers[1]),
        "spill_bytes": sum(map(int, spills)),
    }


if __name__ == "__main__":
    rows = [describe(v, arch) for v in VARIANTS for arch in ARCHS if arch >= v.since]
    json.dump(rows, sys.stdout)

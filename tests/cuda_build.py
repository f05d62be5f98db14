# SPDX-License-Identifier: Apache-2.0
"""Build the CUDA kernels for the host, with sanitizers, and find the toolkit's own tools.

What was built stays under ``build/cuda_host``, in a folder named by a hash of everything that it
was made from, so that a run of the tests compiles only what changed.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

import built
import pytest
from built import ROOT

HOST = ROOT / "tests" / "cuda_host"
# Groups of elements are read through vectors, which g++ takes for other types.
_FLAGS = "-std=c++20 -O1 -g1 -fPIC -fno-strict-aliasing -ffp-contract=off -Wall -Wextra -Werror"
_FLAGS += " -Wno-unknown-pragmas"


@cache
def toolkit() -> Path:
    """Return the root of the CUDA toolkit; skip the test where there is none."""
    pytest.importorskip("ninja", reason="the build tools are not installed")
    pytest.importorskip("pybind11", reason="the build tools are not installed")
    root = Path(runpy.run_path(str(ROOT / "setup.py"))["toolkit_root"](os.environ))
    if not (root / "include" / "cuda_bf16.h").exists():
        pytest.skip(f"no CUDA headers in {root} (set CUDA_HOME)")
    return root


def build(
    name: str, sources: list[Path], sanitizers: Sequence[str], flags: Sequence[str] = ()
) -> Path:
    """Compile sources, .cu among them, into one file; return it, built now or before."""
    words = [*_FLAGS.split(), *sanitizers, f"-I{ROOT / 'csrc'}", *flags]
    words += [f"-isystem{toolkit() / 'include'}", "-include", str(HOST / "cuda_on_host.h")]
    read = sorted([*(ROOT / "csrc" / "cuda").iterdir(), *HOST.iterdir()])
    return built.program("cuda_host", name, sources, [*words, "-x", "c++"], read)


def build_module(sanitizers: Sequence[str]) -> Path:
    """Build `_cuda` for the host, as `_cuda_on_host`."""
    cuda = ROOT / "csrc" / "cuda"
    sources = [ROOT / "csrc" / "bindings_cuda.cpp", *sorted(cuda.glob("*.cu"))]
    name = f"_cuda_on_host{sysconfig.get_config_var('EXT_SUFFIX')}"
    toolkit()
    import pybind11

    places = pybind11.get_include(), sysconfig.get_paths()["include"]
    flags = ["-shared", "-DFK_CUDA_MODULE=_cuda_on_host", *(f"-isystem{p}" for p in places)]
    return build(name, sources, sanitizers, flags)


@cache
def load_module(sanitizers: tuple[str, ...]) -> ModuleType:
    """Build `_cuda` for the host and import it."""
    path = build_module(sanitizers)
    spec = importlib.util.spec_from_file_location("_cuda_on_host", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nvidia_tool(name: str) -> Path:
    """Return ``cuobjdump`` or ``nvdisasm``, the toolkit's or Triton's; skip where both lack it."""
    places = [toolkit() / "bin"]
    if (spec := importlib.util.find_spec("triton")) and spec.origin:
        places.append(Path(spec.origin).parent / "backends" / "nvidia" / "bin")
    for place in places:
        if (place / name).exists():
            return place / name
    pytest.skip(f"no {name}, neither in the CUDA toolkit nor in triton")

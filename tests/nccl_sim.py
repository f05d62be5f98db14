# SPDX-License-Identifier: Apache-2.0
"""Builds what tests/sim simulates: the communicator over a table of CUDA and NCCL calls without
either, as a module for Python (`load`) or as a program (`build_program`)."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType

import pybind11
import pytest

ROOT = Path(__file__).parents[1]
BUILT = ROOT / "build" / "nccl_sim"
PRECOMPILED = ROOT / "tests" / "sim" / "precompiled.h"
PLACES = (ROOT / "csrc", ROOT / "tests")
COMMON = ["-std=c++20", "-pthread", "-Wall", "-Wextra", "-Werror"]
COMMON += ["-DFK_SIM", "-DFK_NCCL_MODULE=_nccl_sim"]
# For the module and the programs alike, so that they share the objects.
PLAIN = ["-O1", "-g1", "-fPIC", "-fvisibility=hidden"]
SANITIZED = ["-O1", "-g1"]
# The programs' own sources, and the one that only the module has.
_MAINS = "test_*.cpp"
_BINDINGS = "bind.cpp"


@cache  # forked ranks find it done, whatever happens to the sources meanwhile
def load() -> ModuleType:
    """Import `_nccl_sim`: what `_nccl` has, over simulated devices, and the simulation's own knobs.

    Device memory is host memory and stream 0 is the host's. The first call of all processes builds
    it, the others wait for that. Skips the test where the headers are missing.
    """
    return _import(str(build_module()))


def build_module() -> Path:
    sources = [*_shared_sources(), ROOT / "csrc" / "bindings_nccl.cpp", ROOT / "tests/sim/bind.cpp"]
    return build("_nccl_sim.so", sources, PLAIN, ["-shared"])


def build_program(main: str, flags: Sequence[str] = ()) -> Path:
    """Build a program of tests/sim with the simulation, for example with a sanitizer's flags."""
    name = "-".join([main, *(flag.strip("-").replace("=", "-") for flag in flags)])
    sources = [*_shared_sources(), ROOT / "tests" / "sim" / f"{main}.cpp"]
    return build(name, sources, [*(PLAIN if not flags else SANITIZED), *flags], list(flags))


def build(name: str, sources: Sequence[Path], flags: Sequence[str], link: Sequence[str]) -> Path:
    """Compile and link, unless the same was built before; objects are shared where they can be."""
    places = [*_headers(), pybind11.get_include(), sysconfig.get_paths()["include"]]
    includes = [*(f"-I{p}" for p in PLACES), *(f"-isystem{p}" for p in places)]
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, *COMMON, *flags, *includes]
    # Never written: the compiler takes the compiled one beside it.
    digest = _digest([PRECOMPILED], command)
    header = BUILT / f"precompiled-{digest}.h"
    objects = {
        source: BUILT / f"{source.stem}-{_digest(_with_headers(source), [digest])}.o"
        for source in sources
    }
    names = sorted(path.name for path in objects.values())
    output = BUILT / f"{Path(name).stem}-{_digest([], [*names, *link])}{Path(name).suffix}"
    if output.exists():
        return output
    BUILT.mkdir(parents=True, exist_ok=True)
    # A lock for each file: several builds, of several processes, share most of them.
    _once(Path(f"{header}.gch"), [*command, "-x", "c++-header", str(PRECOMPILED)])
    command += ["-include", str(header)]
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(
            lambda item: _once(item[1], [*command, "-c", str(item[0])]), objects.items()
        )
        list(made)
    _once(output, [compiler, "-pthread", *link, *map(str, objects.values()), "-lrt"])
    return output


def _once(output: Path, command: Sequence[str]) -> None:
    with open(output.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if output.exists():
            return
        part = output.with_suffix(f".{os.getpid()}{output.suffix}")
        ran = subprocess.run(
            [*command, "-o", str(part)], capture_output=True, text=True, check=False
        )
        if ran.returncode != 0:
            pytest.fail(f"{output.name}: the compiler says\n{ran.stderr[:4000]}", pytrace=False)
        part.rename(output)


def _shared_sources() -> list[Path]:
    ours = [path for path in _tree("*.cpp", ROOT / "tests" / "sim") if not path.match(_MAINS)]
    theirs = [path for path in _tree("*.cpp", ROOT / "csrc" / "nccl") if path.name != "api.cpp"]
    return [path for path in [*ours, *theirs] if path.name != _BINDINGS]


def _tree(pattern: str, place: Path) -> list[Path]:
    return sorted(place.glob(pattern))


def _with_headers(source: Path) -> list[Path]:
    """Return a source and the headers of ours that it includes, and they include."""
    found = [source]
    for path in found:  # which grows
        for name in re.findall(r'^#include "(.+)"$', path.read_text(), re.MULTILINE):
            here = [place / name for place in PLACES if (place / name).exists()]
            found += [header for header in here if header not in found]
    return found


def _digest(paths: Sequence[Path], words: Sequence[str]) -> str:
    digest = hashlib.sha256("\0".join([sys.version, *words]).encode())
    for path in paths:
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _headers() -> list[str]:
    """Find CUDA's and NCCL's headers as setup.py does; nothing of theirs is linked."""
    spec = importlib.util.spec_from_file_location("setup_of_the_package", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = setup  # a NamedTuple looks its module up
    spec.loader.exec_module(setup)
    found = setup.find_cuda({**os.environ, "FSDP_KERNELS_CUDA": "auto"})
    if isinstance(found, str):
        pytest.skip(f"the simulated NCCL is not built: {found}", allow_module_level=True)
    return [f"{found.home}/include", f"{found.nccl}/include"]


@cache
def _import(path: str) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader("_nccl_sim", path)
    spec = importlib.util.spec_from_loader("_nccl_sim", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module

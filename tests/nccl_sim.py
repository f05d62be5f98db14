# SPDX-License-Identifier: Apache-2.0
"""Builds what tests/sim simulates: the communicator over a table of CUDA and NCCL calls without
either, as a module for Python (`load`) or as a program (`build_program`)."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType

import built
import pybind11
import pytest
from built import ROOT

BUILT = ROOT / "build" / "nccl_sim"
PRECOMPILED = ROOT / "tests" / "sim" / "precompiled.h"
PLACES = (ROOT / "csrc", ROOT / "tests")
COMMON = ["-std=c++20", "-pthread", "-Wall", "-Wextra", "-Werror"]
COMMON += ["-DFK_SIM", "-DFK_NCCL_MODULE=_nccl_sim"]
# For the module and the plain programs alike, so that they share the objects.
PLAIN = ["-O1", "-g1", "-fPIC", "-fvisibility=hidden"]
# What each sanitizer adds everywhere, and to the code under test alone: UBSan triples the time to
# compile.
SANITIZERS = {
    "thread": (["-fsanitize=thread"], []),
    "address": (built.ADDRESS, built.UNDEFINED),
}
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
    sources = [*_simulation(), *_communicator(), ROOT / "csrc" / "bindings_nccl.cpp"]
    objects = _compile([*sources, ROOT / "tests" / "sim" / _BINDINGS], PLAIN)
    return _link("_nccl_sim.so", objects, ["-shared"])


def build_program(main: str, sanitizer: str | None = None) -> Path:
    """Build a program of tests/sim: the simulation, the communicator and the program's own file."""
    ours = [*_simulation(), ROOT / "tests" / "sim" / f"{main}.cpp"]
    if sanitizer is None:
        return _link(main, _compile([*ours, *_communicator()], PLAIN), [])
    flags, theirs = SANITIZERS[sanitizer]
    objects = _compile(ours, ["-O1", "-g1", *flags])
    objects += _compile(_communicator(), ["-O1", "-g1", *flags, *theirs])
    return _link(f"{main}_{sanitizer}", objects, [*flags, *theirs])


def _compile(sources: Sequence[Path], flags: Sequence[str]) -> list[Path]:
    """Compile what is not there yet; an object's name has the digest of all that it depends on."""
    places = [*_headers(), pybind11.get_include(), sysconfig.get_paths()["include"]]
    includes = [*(f"-I{p}" for p in PLACES), *(f"-isystem{p}" for p in places)]
    command = [built.compiler(), *COMMON, *flags, *includes]
    # Never written: the compiler takes the compiled one beside it.
    digest = built.digest(command, [PRECOMPILED])
    header = BUILT / f"precompiled-{digest}.h"
    objects = {
        source: BUILT / f"{source.stem}-{built.digest([digest], _with_headers(source))}.o"
        for source in sources
    }
    missing = [source for source, made in objects.items() if not made.exists()]
    if missing:
        built.once(Path(f"{header}.gch"), [*command, "-x", "c++-header", str(PRECOMPILED)])
        command += ["-include", str(header), "-c"]

        def compile_one(source: Path) -> None:
            built.once(objects[source], [*command, str(source)])

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(compile_one, missing))
    return list(objects.values())


def _link(name: str, objects: Sequence[Path], flags: Sequence[str]) -> Path:
    path = Path(name)
    digest = built.digest([*sorted(made.name for made in objects), *flags])
    output = BUILT / f"{path.stem}-{digest}{path.suffix}"
    built.once(output, [built.compiler(), "-pthread", *flags, *map(str, objects), "-lrt"])
    return output


def _simulation() -> list[Path]:
    found = sorted((ROOT / "tests" / "sim").glob("*.cpp"))
    return [path for path in found if path.name != _BINDINGS and not path.match(_MAINS)]


def _communicator() -> list[Path]:
    """The code under test: all of csrc/nccl but the table of the real calls."""
    return [path for path in sorted((ROOT / "csrc/nccl").glob("*.cpp")) if path.name != "api.cpp"]


def _with_headers(source: Path) -> list[Path]:
    """Return a source and the headers of ours that it includes, and they include."""
    found = [source]
    for path in found:  # which grows
        for name in re.findall(r'^#include "(.+)"$', path.read_text(), re.MULTILINE):
            here = [place / name for place in PLACES if (place / name).exists()]
            found += [header for header in here if header not in found]
    return found


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
    if not found.nccl:
        pytest.skip("the simulated NCCL is not built: no nccl.h", allow_module_level=True)
    return [f"{found.home}/include", f"{found.nccl}/include"]


@cache
def _import(path: str) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader("_nccl_sim", path)
    spec = importlib.util.spec_from_loader("_nccl_sim", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module

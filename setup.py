# SPDX-License-Identifier: Apache-2.0
"""Build the compiled modules, from the files here, CUDA_HOME, NCCL_HOME, CXX, CXXFLAGS, and

FSDP_KERNELS_CUDA: ``auto`` (build the CUDA kernels, and the NCCL module, where what they need is),
``require`` (fail where it is not) or ``skip``. Nothing is downloaded, no hardware is looked at.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from glob import glob
from os.path import exists
from pathlib import Path
from typing import NamedTuple

import ninja
import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# No contraction: the kernels promise the reference's bits. No errno: it keeps sqrt from a vector.
FLAGS = "-std=c++20 -O3 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -Wall -Wextra"
# What the kernels are compiled for, as far as the toolkit can; of the last one there is PTX too, so
# that every device from compute capability 8.0 on runs one of these.
ARCHITECTURES = (80, 90, 100)
OLDEST_NCCL = [2, 27]


class Cuda(NamedTuple):
    """The CUDA toolkit's own root, where its libraries lie, and NCCL's root; "" for no NCCL."""

    home: str
    lib: str
    nccl: str


def toolkit_root(environ: Mapping[str, str]) -> str:
    """Return CUDA_HOME, else the root that nvcc reports (the one on PATH may be a wrapper)."""
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    if nvcc and not environ.get("CUDA_HOME"):
        command = [nvcc, "--dryrun", "-x", "cu", os.devnull]
        plan = subprocess.run(command, capture_output=True, text=True, check=False)
        if top := re.search(r"^#\$ TOP=(.*)$", plan.stderr, re.MULTILINE):
            return os.path.realpath(top[1])
    return environ.get("CUDA_HOME") or "/usr/local/cuda"


def find_nccl(environ: Mapping[str, str], system: str = "/usr") -> str:
    """Return NCCL's root: NCCL_HOME, else the nvidia package's or the system's; "" for none."""
    folders = getattr(importlib.util.find_spec("nvidia"), "submodule_search_locations", None) or []
    places = [*(f"{folder}/nccl" for folder in folders), system]
    for root in [environ["NCCL_HOME"]] if environ.get("NCCL_HOME") else places:
        text = Path(h).read_text() if exists(h := f"{root}/include/nccl.h") else ""
        if [int(n) for n in re.findall(r"define NCCL_(?:MAJOR|MINOR) (\d+)", text)] >= OLDEST_NCCL:
            return root
    return ""


def find_cuda(environ: Mapping[str, str]) -> Cuda | str:
    """Return what the CUDA parts are built against, or the words that say why they are not."""
    if (mode := environ.get("FSDP_KERNELS_CUDA", "auto")) not in ("auto", "require", "skip"):
        sys.exit(f"FSDP_KERNELS_CUDA: expected auto, require or skip, got {mode!r}.")
    if mode == "skip":
        return "FSDP_KERNELS_CUDA=skip"
    home = toolkit_root(environ)
    lib = f"{home}/lib64" if exists(f"{home}/lib64") else f"{home}/lib"
    needed = [f"{home}/bin/nvcc", f"{home}/include/cuda_runtime.h", f"{lib}/libcudart_static.a"]
    missing = [f"{f} (is CUDA_HOME the toolkit's root?)" for f in needed if not exists(f)]
    nccl = find_nccl(environ)
    if not missing and (nccl or mode == "auto"):
        return Cuda(home, lib, nccl)
    missing += [] if nccl else ["nccl.h of 2.27 (NCCL_HOME, or pip install nvidia-nccl-cu13)"]
    if mode == "require":
        sys.exit(f"FSDP_KERNELS_CUDA=require: cannot build without {', '.join(missing)}.")
    return f"no {', no '.join(missing)}"


def nvcc_command(home: str, cxx: str) -> str:
    """Spell nvcc with its flags; the host compiler and its flags are those of the other files."""
    command = [f"{home}/bin/nvcc", "--list-gpu-code"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    archs = [arch for arch in ARCHITECTURES if f"sm_{arch}" in listed]
    if not archs:
        sys.exit(f"{command[0]}: expected one that knows sm_80, got {listed}. Take a newer one.")
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    codes += [f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}"]
    words = shlex.split(cxx)
    flags = [word for word in words if word.startswith("-")]
    host = [f"-Xcompiler={flag}" for flag in flags if not flag.startswith(("-std=", "-O"))]
    compiler = words[words.index(flags[0]) - 1]  # there may be a launcher before it
    command = [command[0], f"-ccbin={compiler}", "-std=c++20", "-O3", "--fmad=false", *codes, *host]
    return shlex.join([*command, "-Werror=all-warnings"])


def extensions(cuda: Cuda | str) -> list[Extension]:
    """List the modules; sources are named relative to here, so no object depends on the place."""

    def module(name: str, include_dirs: list[str], link: list[str]) -> Extension:
        found = glob(f"csrc/{name}/*.cpp") + glob(f"csrc/{name}/*.cu")
        sources = [f"csrc/bindings_{name}.cpp", *sorted(found)]
        return Extension(f"fsdp_kernels._{name}", sources, include_dirs, extra_link_args=link)

    modules = [module("cpu", [], ["-pthread"])]
    if isinstance(cuda, Cuda):
        # The system's own folder is not named: that would change the order of its headers.
        includes = [f"{top}/include" for top in (cuda.home, cuda.nccl) if top not in ("", "/usr")]
        # Hidden, so that no call lands in torch's copy: that one does not know our kernels.
        libs = [f"{cuda.lib}/libcudart_static.a", "-Wl,--exclude-libs,ALL"]
        libs += ["-pthread", "-ldl", "-lrt"]
        modules.append(module("cuda", includes, libs))
        # The wheel has no libnccl.so link, hence the versioned name. When torch has loaded its own
        # copy, the loader takes that; the run path serves an import without it.
        paths = f"$ORIGIN/../nvidia/nccl/lib:{cuda.nccl}/lib"
        link = [f"-L{cuda.nccl}/lib", "-l:libnccl.so.2", f"-Wl,-rpath,{paths}", *libs]
        modules += [module("nccl", includes, link)] if cuda.nccl else []
    return modules


class NinjaBuild(build_ext):
    """Compile in parallel, and again only what changed: a file, a header that it read, a flag."""

    def build_extensions(self) -> None:
        tree, built = f"build/ninja-{sys.implementation.cache_tag}", {}
        cxx = f"{os.environ.get('CXX', 'g++')} {FLAGS} -Werror {os.environ.get('CXXFLAGS', '')}"
        rule = " depfile = $out.d\n deps = gcc\n command = {} -MMD -MF $out.d $flags -c $in -o $out"
        lines = [f"builddir = {tree}", f"cxx = {cxx}", "rule cpp", rule.format("$cxx")]
        if any(source.endswith(".cu") for ext in self.extensions for source in ext.sources):
            lines += ["rule cu", rule.format(nvcc_command(toolkit_root(os.environ), cxx))]
        lines += ["rule ld", " command = $cxx -shared $in -o $out $flags"]
        for ext in self.extensions:
            name = ext.name.rpartition(".")[2]
            system = [*ext.include_dirs, pybind11.get_include(), sysconfig.get_paths()["include"]]
            flags = " -isystem ".join(["-Icsrc", *map(shlex.quote, system)])
            objects = [f"{tree}/{name}/{source}.o" for source in ext.sources]
            for source, obj in zip(ext.sources, objects, strict=True):
                lines += [f"build {obj}: {source.rpartition('.')[2]} {source}", f" flags = {flags}"]
            built[ext.name] = f"{tree}/{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
            flags = shlex.join(ext.extra_link_args).replace("$", "$$")
            lines += [f"build {built[ext.name]}: ld {' '.join(objects)}", f" flags = {flags}"]
        self.mkpath(tree)
        Path(tree, "build.ninja").write_text("\n".join(lines) + "\n")
        subprocess.run([f"{ninja.BIN_DIR}/ninja", "-f", f"{tree}/build.ninja"], check=True)
        for name, output in built.items():  # a fresh file each: a process may map the old one
            self.mkpath(os.path.dirname(self.get_ext_fullpath(name)))
            self.copy_file(output, self.get_ext_fullpath(name))


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent)
    modules = extensions(found := find_cuda(os.environ))
    print("fsdp_kernels:", *(m.name for m in modules), "; CUDA parts:", found, flush=True)
    setup(ext_modules=modules, cmdclass={"build_ext": NinjaBuild})

# SPDX-License-Identifier: Apache-2.0
"""The build and what it leaves: setup.py's rules, environment(), the command line."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_kernels import _benches, _environment, _ext
from fsdp_kernels._environment import environment
from fsdp_kernels.cli import main

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def build() -> dict[str, Any]:
    """The names that setup.py defines; nothing is built by reading it."""
    pytest.importorskip("ninja", reason="the build tools are not installed")
    return runpy.run_path(str(ROOT / "setup.py"))


def test_setup_py_stays_small() -> None:
    # A build is a short function of its inputs. It makes three modules with two compilers.
    assert len((ROOT / "setup.py").read_text().splitlines()) <= 160


def test_no_torch_header_is_included() -> None:
    files = [file for file in (ROOT / "csrc").rglob("*") if file.is_file()]
    assert files
    for file in files:
        found = re.findall(r'#\s*include\s*[<"]((?:torch|ATen|c10)/[^>"]*)', file.read_text())
        assert not found, f"{file} includes {found}"


def test_the_build_reads_only_the_environment_that_it_names() -> None:
    text = (ROOT / "setup.py").read_text()
    named = set(re.findall(r'environ(?:\.get)?[\[(]"?\'?([A-Z_]+)', text))
    assert named == {"FSDP_KERNELS_CUDA", "CUDA_HOME", "NCCL_HOME", "CXX", "CXXFLAGS", "PATH"}
    assert "import torch" not in text


def test_skip_builds_the_cpu_module_only(build: dict[str, Any]) -> None:
    found = build["find_cuda"]({"FSDP_KERNELS_CUDA": "skip"})
    assert found == "FSDP_KERNELS_CUDA=skip"


def test_auto_says_what_is_missing(build: dict[str, Any], tmp_path: Path) -> None:
    found = build["find_cuda"]({"CUDA_HOME": str(tmp_path), "PATH": ""})
    assert isinstance(found, str)
    assert f"{tmp_path}/bin/nvcc" in found


def test_require_fails_with_a_sentence(build: dict[str, Any], tmp_path: Path) -> None:
    environ = {"FSDP_KERNELS_CUDA": "require", "CUDA_HOME": str(tmp_path)}
    message = rf"FSDP_KERNELS_CUDA=require: cannot build without {tmp_path}/bin/nvcc \(is CUDA_HOME"
    with pytest.raises(SystemExit, match=message):
        build["find_cuda"](environ)


def fake_nccl(root: Path, minor: int) -> str:
    (root / "include").mkdir(parents=True)
    header = root / "include" / "nccl.h"
    header.write_text(f"#define NCCL_MAJOR 2\n#define NCCL_MINOR {minor}\n#define NCCL_PATCH 7\n")
    return str(root)


def test_nccl_is_looked_for_where_it_is_named(
    build: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, old = fake_nccl(tmp_path / "given", 28), fake_nccl(tmp_path / "old", 26)
    package = fake_nccl(tmp_path / "nvidia" / "nccl", 27)
    system = fake_nccl(tmp_path / "usr", 30)
    find = build["find_nccl"]
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert find({"NCCL_HOME": given}, system) == given
    assert find({"NCCL_HOME": old}, system) == "", "built against another one than was named"
    assert find({}, system) == package
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert find({}, system) == system
    assert find({}, old) == ""


def test_without_nccl_the_cuda_kernels_are_built_all_the_same(
    build: dict[str, Any], tmp_path: Path
) -> None:
    home = fake_toolkit(tmp_path / "toolkit", "")
    for file in ("include/cuda_runtime.h", "lib64/libcudart_static.a"):
        (tmp_path / "toolkit" / file).parent.mkdir()
        (tmp_path / "toolkit" / file).touch()
    environ = {"CUDA_HOME": home, "NCCL_HOME": str(tmp_path)}
    found = build["find_cuda"](environ)
    assert (found.home, found.nccl) == (home, "")
    names = [one.name.rpartition(".")[2] for one in build["extensions"](found)]
    assert names == ["_cpu", "_cuda"]
    with pytest.raises(SystemExit, match=r"=require: cannot build without nccl\.h of 2\.27"):
        build["find_cuda"]({**environ, "FSDP_KERNELS_CUDA": "require"})


def test_an_unknown_mode_is_refused(build: dict[str, Any]) -> None:
    with pytest.raises(SystemExit, match="expected auto, require or skip, got 'yes'"):
        build["find_cuda"]({"FSDP_KERNELS_CUDA": "yes"})


def test_the_toolkit_root_is_the_compilers_own(build: dict[str, Any], tmp_path: Path) -> None:
    """An nvcc on PATH may be a wrapper, in a folder that has no toolkit beside it."""
    root = tmp_path / "toolkit"
    (root / "bin").mkdir(parents=True)
    wrapper = tmp_path / "nvcc"
    wrapper.write_text(f"#!/bin/sh\necho '#$ TOP={root}/bin/..' >&2\n")
    wrapper.chmod(0o755)
    assert build["toolkit_root"]({"PATH": str(tmp_path)}) == str(root)
    assert build["toolkit_root"]({"PATH": str(tmp_path), "CUDA_HOME": "/given"}) == "/given"


def fake_toolkit(root: Path, codes: str) -> str:
    """A toolkit that can only tell what it compiles for."""
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "nvcc").write_text(f"#!/bin/sh\nprintf '{codes}'\n")
    (root / "bin" / "nvcc").chmod(0o755)
    return str(root)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        (r"sm_75\nsm_80\nsm_90\nsm_100\nsm_120\n", ["sm_80", "sm_90", "sm_100", "compute_100"]),
        (r"sm_50\nsm_80\nsm_89\nsm_90\n", ["sm_80", "sm_90", "compute_90"]),
    ],
)
def test_nvcc_compiles_for_what_the_toolkit_knows(
    build: dict[str, Any], tmp_path: Path, codes: str, expected: list[str]
) -> None:
    home = fake_toolkit(tmp_path / "toolkit", codes)
    compiler = "ccache g++-12 -std=c++20 -O3 -Wall -Werror -O0 -DX='a b'"
    command = build["nvcc_command"](home, compiler)
    assert re.findall(r",code=(\w+)", command) == expected
    words = shlex.split(command)
    assert "-ccbin=g++-12" in words
    host = [word for word in words if word.startswith("-Xcompiler=")]
    assert host == ["-Xcompiler=-Wall", "-Xcompiler=-Werror", "-Xcompiler=-DX=a b"]


def test_a_toolkit_without_our_architectures_is_refused(
    build: dict[str, Any], tmp_path: Path
) -> None:
    home = fake_toolkit(tmp_path / "toolkit", r"sm_50\nsm_75\n")
    with pytest.raises(SystemExit, match=r"nvcc: expected one that knows sm_80, got \['sm_50'"):
        build["nvcc_command"](home, "g++ -O3")


@pytest.mark.slow
def test_a_wheel_holds_the_packages_and_the_modules(tmp_path: Path) -> None:
    """Build a wheel from a copy of the tracked files, without CUDA."""
    pytest.importorskip("ninja", reason="the build tools are not installed")
    source = tmp_path / "source"
    source.mkdir()
    names = ["setup.py", "pyproject.toml", "README.md", "LICENSE", "csrc", "bench"]
    subprocess.run(["cp", "-r", *names, "fsdp_kernels", "triton_ops", source], cwd=ROOT, check=True)
    for built in source.rglob("*.so"):
        built.unlink()
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps"]
    # What matters is that it builds from nothing; -O0 halves the time.
    environ = {**os.environ, "FSDP_KERNELS_CUDA": "skip", "CXXFLAGS": "-O0"}
    subprocess.run([*command, "-w", tmp_path, source], env=environ, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    modules = [name for name in inside if name.endswith(".so")]
    assert [name.split(".")[0] for name in modules] == ["fsdp_kernels/_cpu"]
    for name in ("fsdp_kernels/py.typed", "fsdp_kernels/comm/base.py", "triton_ops/reference.py"):
        assert name in inside
    tree = [path for name in ("fsdp_kernels", "triton_ops") for path in (ROOT / name).rglob("*.py")]
    assert {str(path.relative_to(ROOT)) for path in tree} <= set(inside), "pyproject: packages"
    benches = {name.rpartition("/")[2] for name in inside if name.startswith("fsdp_kernels/bench/")}
    assert {f"{name}.py" for name in _benches.NAMES} | {"rows.py", "counts.py"} <= benches
    assert not any(name.endswith(".jsonl") for name in inside)
    assert not [name for name in inside if name.startswith(("tests/", "bench/", "csrc/"))]


def test_environment_is_json_on_any_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_environment, "_picked_comm", None)
    found = environment()
    assert json.loads(json.dumps(found)) == found
    assert found["comm"] is None
    for name in ("fsdp_kernels", "python", "torch", "cpu_kernels", "nccl", "gpus"):
        assert found[name]
    _environment.note_comm("process_group")
    assert environment()["comm"] == "process_group"


def test_environment_says_what_was_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ext, "load", lambda name: _ext.NOT_BUILT)
    found = environment()
    assert found["cpu_kernels"] == "reference (not built)"
    assert found["nccl"] == "not built"
    assert _ext.cpu() is None


def test_a_module_that_does_not_load_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ext, "load", lambda name: "built, but does not load: libnccl.so.2")
    assert "libnccl" in environment()["nccl"]
    with pytest.raises(ImportError, match=r"_nccl: expected .* got built, but does not load"):
        _ext.nccl()


def test_nccl_answers_without_a_device() -> None:
    module = _ext.nccl()
    if module is None:
        pytest.skip("the CUDA parts are not built")
    assert re.fullmatch(r"2\.\d+\.\d+", environment()["nccl"]["version"])
    first, second = module.unique_id(), module.unique_id()
    assert len(first) == len(second) == 128
    assert first != second


@pytest.mark.parametrize("arguments", [["env"], ["env", "--json"]])
def test_the_env_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    if "--json" in arguments:
        assert json.loads(printed)["fsdp_kernels"] == environment()["fsdp_kernels"]
    else:
        assert printed.startswith("fsdp_kernels: ")


def test_importing_starts_nothing() -> None:
    """No CUDA context, no libnccl, no process group, nothing printed."""
    program = (
        "import sys, torch; before = 'triton' in sys.modules; import fsdp_kernels; "
        "assert ('triton' in sys.modules) == before; assert not torch.cuda.is_initialized(); "
        "assert 'fsdp_kernels._nccl' not in sys.modules; "
        "assert not torch.distributed.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")

# SPDX-License-Identifier: Apache-2.0
"""The protocol in C++ with ranks as threads, under sanitizers, and with its rules broken."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import built
import pytest
from built import ADDRESS, ROOT, UNDEFINED

SOURCES = ["epoch", "peers", "process", "protocol"]
SANITIZERS = {"thread": ["-fsanitize=thread"], "address": [*ADDRESS, *UNDEFINED]}


def build(sanitizer: str, csrc: Path = ROOT / "csrc") -> Path:
    """Build tests/arena_threads.cpp, or return what an equal build left."""
    sources = [ROOT / "tests" / "arena_threads.cpp"]
    sources += [csrc / "cpu" / f"{name}.cpp" for name in SOURCES]
    flags = ["-std=c++20", "-O1", "-g1", "-pthread", *SANITIZERS[sanitizer], f"-I{csrc}"]
    headers = sorted((csrc / "cpu").glob("*.h"))
    return built.program("arena_threads", sanitizer, sources, flags, headers)


def run(program: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [str(program), *args]
    if shutil.which("setarch"):  # an older ThreadSanitizer cannot place its memory otherwise
        command = ["setarch", "-R", *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_random_legal_schedules_are_clean(sanitizer: str) -> None:
    ran = run(build(sanitizer), "1", "1000")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout == "ran 1000 schedules\n"


@pytest.mark.parametrize("rule", ["wait_ready", "wait_released", "wait_posted", "begin", "publish"])
def test_a_broken_rule_is_noticed(rule: str) -> None:
    ran = run(build("thread"), "1", "200", rule)
    assert ran.returncode != 0
    assert "wrong: " in ran.stderr or "data race" in ran.stderr


def test_a_number_that_orders_nothing_is_noticed(tmp_path: Path) -> None:
    """Epochs read without acquiring: no x86 processor would show it, the sanitizer does."""
    shutil.copytree(ROOT / "csrc" / "cpu", tmp_path / "cpu")
    header = tmp_path / "cpu" / "epoch.h"
    text = header.read_text()
    assert text.count("std::memory_order_acquire") == 1
    header.write_text(text.replace("std::memory_order_acquire", "std::memory_order_relaxed"))
    ran = run(build("thread", tmp_path), "1", "200")
    assert ran.returncode != 0
    assert "data race" in ran.stderr

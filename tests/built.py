# SPDX-License-Identifier: Apache-2.0
"""Compile what tests run, once: what equal files have left under ``build`` is taken as it is."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Its checks as calls, not in line: they find the same, and compile in two thirds of the time.
ADDRESS = ["-fsanitize=address", "--param", "asan-instrumentation-with-call-threshold=0"]
UNDEFINED = ["-fsanitize=undefined", "-fno-sanitize-recover=all"]


def compiler() -> str:
    """Return CXX or g++; skip the test where there is none."""
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        pytest.skip(f"there is no compiler {name}")
    return name


@cache
def _version(name: str) -> bytes:
    return subprocess.run([name, "--version"], capture_output=True, check=True).stdout


def digest(words: Sequence[str], files: Iterable[Path] = ()) -> str:
    """Return a name for what this compiler makes with these words from these files."""
    found = hashlib.sha256(_version(compiler()) + "\0".join(words).encode())
    for file in files:
        found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:16]


def once(output: Path, command: Sequence[str]) -> None:
    """Make a file, unless it is there; of several processes that want it, one does."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{output}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if output.exists():
            return
        part = output.with_name(f"{os.getpid()}-{output.name}")
        ran = subprocess.run(
            [*command, "-o", str(part)], capture_output=True, text=True, check=False
        )
        if ran.returncode != 0:
            pytest.fail(f"{output.name}: the compiler says\n{ran.stderr[:4000]}", pytrace=False)
        part.rename(output)


def program(
    folder: str, name: str, sources: Sequence[Path], flags: Sequence[str], read: Iterable[Path]
) -> Path:
    """Compile sources into ``build/folder``; `read` are the other files that they include."""
    words = [flag for flag in flags if not flag.startswith("-I")]  # what is there counts, not where
    output = ROOT / "build" / folder / f"{digest(words, [*sources, *read])}-{name}"
    once(output, [compiler(), *flags, *map(str, sources)])
    return output

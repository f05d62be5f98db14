# SPDX-License-Identifier: Apache-2.0
"""What the arena leaves in /dev/shm, and what becomes of it when memory cannot be shared."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks

from fsdp_kernels import _ext
from fsdp_kernels.comm import _arena
from fsdp_kernels.comm._arena import Arena
from fsdp_kernels.comm._arena_setup import ArenaUnavailable, Identity, identity, why_apart

pytestmark = pytest.mark.skipif(_ext.cpu() is None, reason="the C++ kernels are not built")


def named() -> list[Path]:
    return sorted(Path(_arena.PLACE).glob(f"{_arena.PREFIX}*"))


def check_files(rank: int, world: int, prefix: str) -> list[tuple[int, int]]:
    _arena.PREFIX = prefix
    module: Any = _ext.cpu()
    seen: list[tuple[int, int]] = []
    create = module.Segment.create

    class Watched:
        open = module.Segment.open

        @staticmethod
        def create(path: str, nbytes: int) -> Any:
            segment = create(path, nbytes)
            status = os.stat(path)
            seen.append((stat.S_IMODE(status.st_mode), status.st_size))
            assert module.sweep(_arena.PLACE, prefix) == 0, "its creator lives"
            return segment

    original, module.Segment = module.Segment, Watched
    os.umask(0)
    arena = Arena()
    arena.allocate(5000)
    arena.exchange(torch.zeros(1), label="end")
    module.Segment = original
    assert named() == []
    return seen


def test_files_are_private_and_lose_their_names_at_once(tmp_path: Path) -> None:
    seen, other = run_ranks(check_files, 2, f"fsdp_kernels-test-{os.getpid()}-a-")
    assert [mode for mode, _ in seen] == [0o600, 0o600]
    assert seen[1][1] == 5120
    assert other == []


def check_taken_name(rank: int, world: int, prefix: str) -> str:
    _arena.PREFIX = prefix
    arena = Arena()
    module: Any = _ext.cpu()
    module.sweep = lambda place, prefix: Path(place, TAKEN[0]).write_bytes(b"")
    _arena.secrets = SameToken  # type: ignore[assignment]
    TAKEN.append(f"{prefix}{SameToken.token_hex(16)}")
    TAKEN.pop(0)
    with pytest.raises(ArenaUnavailable) as caught:
        arena.reserve(100)
    assert arena.exchange(torch.ones(1), label="goes on").sum() == world
    assert named() == []
    return str(caught.value)


TAKEN = [""]


class SameToken:
    @staticmethod
    def token_hex(count: int) -> str:
        return "ab" * count


def test_a_name_that_is_taken_is_an_error_on_every_rank() -> None:
    texts = run_ranks(check_taken_name, 2, f"fsdp_kernels-test-{os.getpid()}-b-")
    assert texts[0] == texts[1]
    assert "expected a name that is not taken, got 'File exists'" in texts[0]


LOAD = """
import importlib.util, signal, sys
spec = importlib.util.spec_from_file_location("_cpu", sys.argv[1])  # without torch: it is quick
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""
MAKE = f"""{LOAD}
segment = module.Segment.create(sys.argv[2], 1000)
print("made", flush=True)
signal.pause()
"""
FILL = f"""{LOAD}
segments = []
try:
    while True:
        segments.append(module.Segment.create(f"{{sys.argv[2]}}/{{len(segments)}}", 300 << 10))
except module.NoSpace as error:
    print(len(segments), error)
"""


def program(text: str, *args: str) -> list[str]:
    """Return the command that runs a program over the compiled module alone."""
    module: Any = _ext.cpu()
    return [sys.executable, "-S", "-c", text, module.__file__, *args]


@contextmanager
def creator(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a process that makes a segment and does not take its name away."""
    process = subprocess.Popen(program(MAKE, str(path)), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "made\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_what_a_dead_job_left_is_removed_and_nothing_else() -> None:
    module: Any = _ext.cpu()
    prefix = f"fsdp_kernels-test-{os.getpid()}-c-"
    path, other = Path(_arena.PLACE, f"{prefix}x"), Path(_arena.PLACE, f"other-{os.getpid()}")
    other.write_bytes(b"x")
    link = Path(_arena.PLACE, f"{prefix}link")
    link.symlink_to(other)
    try:
        with creator(path):
            assert module.sweep(_arena.PLACE, prefix) == 0
            assert path.exists()
        assert path.exists()  # killed
        assert module.sweep(_arena.PLACE, prefix) == 1
        assert not path.exists()
        assert link.is_symlink()
        assert other.read_bytes() == b"x"
    finally:
        for file in (path, other, link):
            file.unlink(missing_ok=True)


def test_only_the_segment_that_was_made_is_opened(tmp_path: Path) -> None:
    module: Any = _ext.cpu()
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    path.chmod(0o644)
    for nbytes, mode in [(100, 0o644), (99, 0o600)]:
        path.chmod(mode)
        with pytest.raises(RuntimeError, match="expected a file of mode 0600 with"):
            module.Segment.open(str(path), nbytes)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(RuntimeError, match="expected the segment that rank 0 made"):
        module.Segment.open(str(link), 100)
    assert module.Segment.open(str(path), 100).nbytes == 100


# -- when memory cannot be shared -----------------------------------------------------------------


def check_too_large(rank: int, world: int) -> str:
    arena = Arena()
    with pytest.raises(ArenaUnavailable) as caught:
        arena.reserve(1 << 50)
    assert arena.exchange(torch.ones(1), label="goes on").sum() == arena.world
    return str(caught.value)


def test_too_little_memory_says_how_much_is_needed_and_there() -> None:
    texts = run_ranks(check_too_large, 2)
    assert texts[0] == texts[1]
    assert "expected 1073741824.0 MiB free in /dev/shm, got" in texts[0]
    assert "docker run --shm-size" in texts[0]


def test_a_full_file_system_is_no_crash(tmp_path: Path) -> None:
    """A small file system of its own: what is promised is there, and what is not is refused."""
    script = 'mount -t tmpfs -o size=1m none "$0" && exec "$@"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, str(tmp_path)]
    command += program(FILL, str(tmp_path))
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if "unshare" in ran.stderr or "mount" in ran.stderr:
        pytest.skip(f"no file system of our own may be mounted: {ran.stderr.strip()}")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("3 shared memory: expected 0.3 MiB free in"), ran.stdout
    assert "got 0.1 MiB of 1.0 MiB" in ran.stdout


def test_why_ranks_cannot_share_memory() -> None:
    module: Any = _ext.cpu()
    here = identity(module)
    assert why_apart([here, here]) == ""
    there = replace(here, host=("another boot", *here.host[1:]))
    assert why_apart([here, here, there]).startswith("ranks 0 and 2 are on different hosts")
    other = replace(here, user=here.user + 1)
    assert "belong to different users" in why_apart([here, other])
    assert why_apart([here, identity(None)]) == "the C++ kernels are not built (rank 1)"
    assert why_apart([Identity("no Linux"), here]) == "no Linux (rank 0)"


def check_apart(rank: int, world: int) -> str:
    def pretend(module: Any) -> Identity:
        mine = identity(module)
        return replace(mine, host=(f"host {rank}",)) if rank == 1 else mine

    _arena.identity = pretend
    with pytest.raises(ArenaUnavailable) as caught:
        Arena()
    return str(caught.value)


def test_ranks_apart_are_told_the_same_reason() -> None:
    texts = run_ranks(check_apart, 2)
    assert texts == ["ranks 0 and 1 are on different hosts, or in different containers"] * 2

# SPDX-License-Identifier: Apache-2.0
"""How `make gpu-check` runs its parts and what it leaves, over parts that are made up."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"


@pytest.fixture(scope="module")
def parts() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module("parts")
    sys.path.remove(str(BENCH))


def program(*lines: str) -> tuple[str, ...]:
    return ("-c", "\n".join(lines))


def write_tests(folder: Path, *lines: str) -> tuple[str, ...]:
    """Write a file of tests that has nothing to do with this repository; return pytest's words."""
    (folder / "test_it.py").write_text("import os, time, pytest\n" + "\n".join(lines) + "\n")
    return (str(folder / "test_it.py"), "-c", os.devnull, "--rootdir", str(folder))


def test_a_part_passes(parts: ModuleType) -> None:
    result = parts.Part("a", 9, program("print('said'); print('more')")).run(30)
    assert result["status"] == "passed"
    assert result["output"] == ["said", "more"]
    assert result["seconds"] < 30


def test_a_part_fails_with_its_exit_code(parts: ModuleType) -> None:
    result = parts.Part("a", 9, program("raise ValueError('on purpose')")).run(30)
    assert (result["status"], result["why"]) == ("failed", "exit code 1")
    assert "ValueError: on purpose" in result["output"]


def test_a_part_crashes_with_its_signal_and_its_stack(parts: ModuleType) -> None:
    lines = "import os, signal", "def dies():", " os.kill(os.getpid(), signal.SIGSEGV)", "dies()"
    result = parts.Part("a", 9, program(*lines)).run(30)
    assert (result["status"], result["why"]) == ("crashed", "ended by SIGSEGV")
    assert any("in dies" in line for line in result["output"])


def end_once(parts: ModuleType, monkeypatch: pytest.MonkeyPatch, started: Path) -> None:
    """Let the time limit pass when a file is there, and not before, however slow the machine is."""
    real = parts._await

    def impatient(process: Any, limit_s: float) -> Any:
        while not started.exists() and process.poll() is None:
            time.sleep(0.01)
        return real(process, 0)

    monkeypatch.setattr(parts, "_await", impatient)


def test_a_part_that_hangs_is_ended_with_all_it_started(
    parts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grandchild holds the output open, and must neither stay nor hold up the check."""
    child, started = tmp_path / "child", tmp_path / "started"
    end_once(parts, monkeypatch, started)
    lines = (
        "import subprocess, sys, time",
        "sleeper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(999)'])",
        f"open({str(child)!r}, 'w').write(str(sleeper.pid))",
        "def hangs():",
        f" open({str(started)!r}, 'w')",
        " time.sleep(999)",
        "hangs()",
    )
    result = parts.Part("a", 9, program(*lines)).run(5)
    assert (result["status"], result["why"]) == ("timed out", "no end within 5 s")
    assert any("in hangs" in line for line in result["output"])
    assert _ends(int(child.read_text()))


def test_a_part_leaves_no_process(parts: ModuleType, tmp_path: Path) -> None:
    lines = (
        "import subprocess, sys",
        "sleeper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])",
        "print(sleeper.pid)",
    )
    result = parts.Part("a", 9, program(*lines)).run(30)
    assert result["status"] == "passed"
    assert _ends(int(result["output"][-1]))


def _ends(pid: int) -> bool:
    """Tell whether a process ends; it was told to, and may be a zombie that init has to reap."""
    state = "R"
    for _ in range(1000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return False


def test_a_part_that_prints_garbage(parts: ModuleType) -> None:
    lines = "import sys", r"sys.stdout.buffer.write(b'\xff\xfe\x00' + b'x' * 5000 + b'\n{broken')"
    result = parts.Part("a", 9, program(*lines)).run(30)
    assert result["status"] == "passed"
    assert max(map(len, result["output"])) <= parts.KEPT_COLUMNS
    json.dumps(result)
    result = parts.Part("a", 9, program(*lines), figures=True).run(30)
    assert result["status"] == "failed"
    assert result["why"] == "expected a JSON object in the last line, got '{broken'"


@pytest.mark.parametrize(
    ("said", "why"), [("''", "got no output"), ("'[1]'", "got '[1]'"), ("'3'", "got '3'")]
)
def test_a_bench_without_figures_fails(parts: ModuleType, said: str, why: str) -> None:
    result = parts.Part("a", 9, program(f"print({said})"), figures=True).run(30)
    assert result["status"] == "failed"
    assert result["why"].endswith(why)


def test_what_is_said_after_the_figures_does_no_harm(parts: ModuleType) -> None:
    lines = "print('{\"ms\": 3}')", "print('[W] destroy the process group, please')"
    assert parts.Part("a", 9, program(*lines), figures=True).run(30)["figures"] == {"ms": 3}


def test_figures_are_kept_of_a_failed_run_too(parts: ModuleType) -> None:
    for end, status in (("", "passed"), ("raise SystemExit(3)", "failed")):
        part = parts.Part(
            "a", 9, program("print('table'); print('{\"ms\": 3}')", end), figures=True
        )
        result = part.run(30)
        assert result["status"] == status
        assert result["figures"] == {"ms": 3}
    result = parts.Part("a", 9, program("raise SystemExit(3)"), figures=True).run(30)
    assert (result["status"], result["why"]) == ("failed", "exit code 3")


def test_a_program_that_is_not_there_skips_the_part(parts: ModuleType) -> None:
    result = parts.Part("a", 9, program("1"), under=("no-such-sanitizer", "--tool", "x")).run(30)
    assert result["status"] == "skipped"
    assert result["why"] == "no-such-sanitizer is not on PATH, nor in the CUDA toolkit"


def test_a_program_around_the_part(parts: ModuleType) -> None:
    part = parts.Part("a", 9, program("import os; print(os.environ['FK'])"), under=("env", "FK=5"))
    assert part.run(30)["output"] == ["5"]


def test_a_tool_that_cannot_look_into_the_device_skips_the_part(parts: ModuleType) -> None:
    lines = "print('===== Error: Device not supported.')", "raise SystemExit(1)"
    part = parts.Part("a", 9, program(*lines), skip_if=("Device not supported",))
    result = part.run(30)
    assert (result["status"], result["why"]) == ("skipped", "===== Error: Device not supported.")
    fails = parts.Part("a", 9, program(*lines), skip_if=("something else",))
    assert fails.run(30)["status"] == "failed"


def test_tests_are_counted_with_their_reasons(parts: ModuleType, tmp_path: Path) -> None:
    command = write_tests(
        tmp_path,
        "def test_good(): pass",
        "def test_bad(): assert 1 == 2, 'on purpose'",
        "@pytest.fixture",
        "def broken(): raise OSError('no fixture')",
        "def test_error(broken): pass",
        "@pytest.mark.parametrize('i', [1, 2])",
        "def test_skipped(i): pytest.skip('no such thing here')",
    )
    result = parts.Tests("a", 9, command).run(60)
    assert (result["status"], result["why"]) == ("failed", "exit code 1")
    counts = {name: result[name] for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": 5, "failures": 1, "errors": 1, "skipped": 2}
    assert result["skip_reasons"] == {"no such thing here": 2}
    assert "on purpose" in result["failed_tests"]["test_it::test_bad"]
    assert "no fixture" in result["failed_tests"]["test_it::test_error"]


@pytest.mark.parametrize(("may_skip", "status"), [(False, "failed"), (True, "skipped")])
def test_when_every_test_is_skipped(
    parts: ModuleType, tmp_path: Path, may_skip: bool, status: str
) -> None:
    command = write_tests(tmp_path, "def test_a(): pytest.skip('needs two devices')")
    result = parts.Tests("a", 9, command, may_skip=may_skip).run(60)
    assert (result["status"], result["why"]) == (status, "no test ran: needs two devices")


@pytest.mark.parametrize("may_skip", [False, True])
def test_when_no_test_is_there(parts: ModuleType, tmp_path: Path, may_skip: bool) -> None:
    result = parts.Tests("a", 9, write_tests(tmp_path, ""), may_skip=may_skip).run(60)
    assert (result["status"], result["why"]) == ("failed", "no test ran: none was collected")


def test_tests_that_hang_show_where(
    parts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    end_once(parts, monkeypatch, started)
    command = write_tests(
        tmp_path,
        "def test_good(): pass",
        "def test_bad(): assert 1 == 2, 'on purpose'",
        "def test_skipped(): pytest.skip('no such thing here')",
        "def test_hangs():",
        f"    open({str(started)!r}, 'w')",
        "    time.sleep(999)",
    )
    result = parts.Tests("a", 3, command).run(5)
    assert result["status"] == "timed out"
    assert any("in test_hangs" in line for line in result["output"])
    assert (result["tests"], result["failures"], result["skipped"]) == (4, 1, 1)
    assert [name.partition("::")[2] for name in result["passed_tests"]] == ["test_good"]
    assert [name.partition("::")[2] for name in result["unfinished_tests"]] == ["test_hangs"]
    ((bad, message),) = result["failed_tests"].items()
    assert bad.endswith("::test_bad")
    assert "on purpose" in message
    assert result["skip_reasons"] == {"no such thing here": 1}


def test_tests_that_crash_say_so(parts: ModuleType, tmp_path: Path) -> None:
    result = parts.Tests("a", 9, write_tests(tmp_path, "def test_dies(): os.abort()")).run(60)
    assert (result["status"], result["why"]) == ("crashed", "ended by SIGABRT")
    assert len(result["unfinished_tests"]) == 1


def test_workers_share_the_tests(parts: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    command = write_tests(
        tmp_path, "def test_worker(): assert os.environ['PYTEST_XDIST_WORKER'].startswith('gw')"
    )
    assert parts.Tests("a", 9, command, workers=2).run(60)["status"] == "passed"


def test_without_pytest_the_tests_fail_with_a_sentence(
    parts: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts.importlib.util, "find_spec", lambda name: None)
    result = parts.Tests("a", 9, ("tests",)).run(60)
    assert result["status"] == "failed"
    assert (
        result["why"] == "expected pytest to run the tests with, found none. Install pytest (>= 8)"
    )


def fakes(parts: ModuleType, *reserved: float) -> tuple[list[Any], list[float]]:
    """Make parts that write down the limits that they get, and take all that they are given."""
    clock, limits = [0.0], []

    class Fake(parts.Part):
        def run(self, limit_s: float) -> dict[str, Any]:
            limits.append(limit_s)
            clock[0] += limit_s if self.command else 1
            return {"status": "passed"}

    parts.time = type("Clock", (), {"monotonic": staticmethod(lambda: clock[0])})
    made = [Fake(str(i), abs(s), ("greedy",) if s < 0 else ()) for i, s in enumerate(reserved)]
    return made, limits


def test_a_part_never_takes_what_is_reserved_for_later_ones(
    parts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "time", time)
    made, limits = fakes(parts, 30, -20, 10, -40)
    report = parts.Report(tmp_path / "report.json", {})
    assert parts.run_all(made, 120, report)
    # 20 s are over at first, 49 s after the first part; the second takes them, the third leaves 9.
    assert limits == [50, 69, 10, 49]
    made, limits = fakes(parts, -10, -20, -30)
    assert parts.run_all(made, 60, report)
    assert limits == [10, 20, 30]
    made, limits = fakes(parts, -10, -20)
    assert parts.run_all(made, 15, report)
    assert limits == [10, 20], "a part gets what is reserved for it, even past the limit of all"


def test_the_report_is_complete_after_each_part(parts: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    seen: list[dict[str, str]] = []

    def after(part: Any, result: dict[str, Any]) -> bool:
        content = json.loads(path.read_text())
        assert content["versions"] == {"a": 1}
        seen.append({name: found["status"] for name, found in content["parts"].items()})
        return part.name != "last"

    made = [
        parts.Part("good", 5, program("1")),
        parts.Part("bad", 5, program("raise SystemExit(2)")),
        parts.Part("last", 5, program("1")),
        parts.Part("never", 5, program("1")),
    ]
    assert not parts.run_all(made, 60, parts.Report(path, {"versions": {"a": 1}}), after)
    assert seen == [
        {"good": "passed"},
        {"good": "passed", "bad": "failed"},
        {"good": "passed", "bad": "failed", "last": "passed"},
    ]


@pytest.mark.parametrize(("code", "good"), [(0, True), (1, False)])
def test_skipped_parts_are_no_failure(
    parts: ModuleType, tmp_path: Path, code: int, good: bool
) -> None:
    made = [
        parts.Part("absent", 5, program("1"), under=("no-such-program",)),
        parts.Part("other", 5, program(f"raise SystemExit({code})")),
    ]
    assert parts.run_all(made, 60, parts.Report(tmp_path / "report.json", {})) is good


# ---- the real list


@pytest.fixture(scope="module")
def gpu_check(parts: ModuleType) -> ModuleType:
    return importlib.import_module("gpu_check")


def test_all_parts_fit_into_eight_minutes(gpu_check: ModuleType) -> None:
    reserved = sum(part.reserved_s for part in gpu_check.PARTS)
    # Ending a part that hangs, and starting Python, take a little too.
    assert reserved + 10 <= gpu_check.LIMIT_S <= 475
    names = [part.name for part in gpu_check.PARTS]
    assert len(set(names)) == len(names)
    assert names[:2] == ["device", "build"]


def test_every_gpu_test_belongs_to_a_part(gpu_check: ModuleType) -> None:
    named = {word for part in gpu_check.PARTS for word in part.command if word.endswith(".py")}
    marked = [
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "tests").glob("*.py"))
        if re.search(r"pytest\.mark\.gpu\b", file.read_text())
    ]
    assert marked
    assert set(marked) <= named, "name the file in a part of bench/gpu_check.py"
    for name in named:
        assert (ROOT / name).is_file(), name


def test_the_list_of_parts(gpu_check: ModuleType) -> None:
    command = [sys.executable, str(BENCH / "gpu_check.py"), "--list"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for part in gpu_check.PARTS:
        assert f"{part.reserved_s:.0f} s  {part.name}" in printed


def test_unknown_parts_are_refused(gpu_check: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"--only: expected names of .* got \['nothing'\]"):
        gpu_check.chosen(["nothing"])
    assert [part.name for part in gpu_check.chosen(["two ranks"])] == [
        "device",
        "build",
        "two ranks",
    ]


def test_a_failed_build_is_tried_without_cuda(
    gpu_check: ModuleType, parts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        gpu_check, "BUILD", program("import os; print(os.environ['FSDP_KERNELS_CUDA'])")
    )
    report = parts.Report(tmp_path / "report.json", {})
    build = parts.Part("build", 9, program("1"))
    assert gpu_check.follow(build, {"status": "passed"}, report)
    assert "parts" not in report.content
    assert gpu_check.follow(build, {"status": "failed"}, report)
    assert report.content["parts"]["build without CUDA"]["output"] == ["skip"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: run make gpu-check")
def test_without_a_device_it_says_so_and_leaves_its_file(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "gpu_check.py"), "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "gpu-check: expected a CUDA device, found none" in done.stdout
    (path,) = tmp_path.glob("gpu_check-*.json")
    report = json.loads(path.read_text())
    assert report["passed"] is False
    assert report["parts"]["device"]["status"] == "failed"
    assert list(report["parts"]) == ["device"]
    assert report["versions"]["torch"] == torch.__version__

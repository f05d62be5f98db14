# SPDX-License-Identifier: Apache-2.0
"""Runs the parts of a check one after the other, each in processes of its own.

Every part has seconds that are reserved for it: it may also use what the parts before it left over,
never what is reserved for those after it. So none hides the rest, however it ends, and the whole
has a limit too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
KEPT_LINES, KEPT_COLUMNS = 60, 400
_OUTCOMES = ("started", "passed", "failed", "skipped")

Result = dict[str, Any]
"""`status`: passed, failed, crashed, timed out or skipped; `why`; `seconds`; `output`; figures."""


@dataclass(frozen=True)
class Part:
    """A command of this Python, and how its outcome is read.

    Attributes:
        name: Its key in the report.
        reserved_s: Seconds that no other part can take from it.
        command: What follows `python`.
        figures: The last line is a JSON object: the part's result.
        under: A program that runs Python here, with its options; without it the part is skipped.
        skip_if: Words in the output of a failed run that mean: cannot run here.
        environ: Variables beside the present ones.
    """

    name: str
    reserved_s: float
    command: tuple[str, ...]
    figures: bool = False
    under: tuple[str, ...] = ()
    skip_if: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)

    def run(self, limit_s: float) -> Result:
        """Run it, for so long at most; print its output."""
        program = [find_program(self.under[0]), *self.under[1:]] if self.under else []
        if None in program:
            return skipped(f"{self.under[0]} is not on PATH, nor in the CUDA toolkit")
        command = [str(word) for word in (*program, sys.executable, *self.command)]
        result, output = execute(command, limit_s, self.environ)
        if result["status"] == "failed":
            for line in output.splitlines():
                if any(words in line for words in self.skip_if):
                    return {**result, **skipped(line.strip())}
        if self.figures:
            read = read_figures(output)
            # A run that failed may have left figures too; that there are none is no news then.
            result |= read if result["status"] == "passed" or "figures" in read else {}
        return result


@dataclass(frozen=True)
class Tests(Part):
    """A part that is a run of pytest: `command` holds pytest's own arguments.

    Attributes:
        workers: How many processes share the tests, where pytest-xdist is installed.
        may_skip: Whether the part is skipped where all of its tests are; else it fails then.
    """

    workers: int = 1
    may_skip: bool = False

    def run(self, limit_s: float) -> Result:
        """Run the tests, count them, and keep the reasons of failures and skips."""
        if importlib.util.find_spec("pytest") is None:
            why = "expected pytest to run the tests with, found none. Install pytest (>= 8)"
            return {"status": "failed", "why": why, "seconds": 0.0}
        plugins = ["-p", "no:cacheprovider", "-p", "bench.kept_results"]
        options = ["-m", "pytest", "-q", *plugins, *self.command]
        if self.workers > 1 and importlib.util.find_spec("xdist") is not None:
            options += ["-n", str(self.workers)]
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "junit.xml"
            command = [sys.executable, *options, f"--junitxml={report}"]
            kept = report.with_name("kept.jsonl")
            environ = {**self.environ, "KEPT_RESULTS": str(kept)}
            result, _ = execute(command, limit_s, environ)
            if not report.exists() and kept.exists():  # a run that was cut leaves no report
                return result | _kept(kept.read_text())
            return result | self._read(report, result["status"])

    def _read(self, report: Path, status: str) -> Result:
        try:
            suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
        except (OSError, ElementTree.ParseError, StopIteration):
            return {} if status != "passed" else {"status": "failed", "why": "no test report"}
        counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors")}
        counts["skipped"] = int(suite.get("skipped", 0))
        failed, reasons = _outcomes(suite)
        found: Result = {**counts, "failed_tests": failed, "skip_reasons": reasons}
        if counts["tests"] == counts["skipped"] and status in ("passed", "failed"):
            why = "no test ran: " + ("; ".join(reasons) or "none was collected")
            found |= skipped(why) if self.may_skip and reasons else {"status": "failed", "why": why}
        return found


def _kept(lines: str) -> Result:
    """Return what is known of tests that were not all run; the last line may be half written."""
    last: dict[str, Result] = {}
    for line in lines.splitlines():
        with suppress(json.JSONDecodeError):
            read = json.loads(line)
            last[read["test"]] = read
    of = {name: [r for r in last.values() if r["outcome"] == name] for name in _OUTCOMES}
    return {
        "tests": len(last),
        "failures": len(of["failed"]),
        "skipped": len(of["skipped"]),
        "passed_tests": [one["test"] for one in of["passed"]],
        "failed_tests": {one["test"]: one["message"][: 2 * KEPT_COLUMNS] for one in of["failed"]},
        "skip_reasons": dict(Counter(one["message"] for one in of["skipped"])),
        "unfinished_tests": [one["test"] for one in of["started"]],
    }


def _outcomes(suite: ElementTree.Element) -> tuple[dict[str, str], dict[str, int]]:
    """Return what each failed test said, and how often each reason to skip occurs."""
    failed: dict[str, str] = {}
    reasons: Counter[str] = Counter()
    for case in suite.iter("testcase"):
        for outcome in case:
            message = outcome.get("message", "")
            if outcome.tag in ("failure", "error"):
                name = f"{case.get('classname')}::{case.get('name')}"
                failed[name] = message[: 2 * KEPT_COLUMNS]
            elif outcome.tag == "skipped":
                reasons[message] += 1
    return failed, dict(reasons)


def skipped(why: str) -> Result:
    """Return the result of a part that could not run, and need not."""
    return {"status": "skipped", "why": why}


def read_figures(output: str) -> Result:
    """Read the JSON object that a bench ends in; libraries may warn after it, when they unload."""
    lines = output.strip().splitlines()[-5:]
    for line in reversed(lines):
        try:
            figures = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(figures, dict):
            return {"figures": figures}
    got = repr(lines[-1][:KEPT_COLUMNS]) if lines else "no output"
    return {"status": "failed", "why": f"expected a JSON object in the last line, got {got}"}


def find_program(name: str) -> str | None:
    """Find a program on PATH or in the CUDA toolkit."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    places = [os.environ.get("PATH", ""), f"{home}/bin", f"{home}/compute-sanitizer"]
    return shutil.which(name, path=os.pathsep.join(places))


def execute(command: list[str], limit_s: float, environ: Mapping[str, str]) -> tuple[Result, str]:
    """Run a command in the repository, and end all that it started.

    Its output goes through a file: a pipe would stay open as long as some grandchild lives.
    """
    # The stacks of a process that crashes, or is told to abort, are part of the output.
    variables = {**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", **environ}
    paths = [str(ROOT), variables.get("PYTHONPATH", "")]
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    print("$", *command, flush=True)
    begin = time.monotonic()
    with tempfile.TemporaryFile() as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = _await(process, limit_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        file.seek(0)
        output = file.read().decode(errors="replace")
    print(output, flush=True)
    lines = [line[:KEPT_COLUMNS] for line in output.splitlines()[-KEPT_LINES:]]
    result = _outcome(code, limit_s)
    return result | {"seconds": round(time.monotonic() - begin, 1), "output": lines}, output


def _await(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    try:
        return process.wait(max(limit_s, 1))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # prints the Python stacks
        with suppress(subprocess.TimeoutExpired):
            process.wait(2)
        return None


def _outcome(code: int | None, limit_s: float) -> Result:
    if code is None:
        return {"status": "timed out", "why": f"no end within {limit_s:.0f} s"}
    if code < 0:
        return {"status": "crashed", "why": f"ended by {signal.Signals(-code).name}"}
    return {"status": "failed", "why": f"exit code {code}"} if code else {"status": "passed"}


@dataclass
class Report:
    """The parts' results, in a file that is complete after each: the next may hang the machine."""

    path: Path
    content: dict[str, Any]

    def note(self, name: str, result: Result) -> bool:
        """Add a result, and tell whether the part passed or was skipped."""
        self.content.setdefault("parts", {})[name] = result
        self.write()
        print(f"== {name}: {result['status']}, {result.get('why', '')}\n", flush=True)
        return result["status"] in ("passed", "skipped")

    def write(self) -> None:
        """Replace the file."""
        written = self.path.with_suffix(".part")
        written.write_text(json.dumps(self.content, indent=1) + "\n")
        written.replace(self.path)


def run_all(
    parts: Iterable[Part],
    limit_s: float,
    report: Report,
    after: Callable[[Part, Result], bool] | None = None,
) -> bool:
    """Run all parts.

    Args:
        parts: What to run, in this order.
        limit_s: For all of them together, if they reserve no more than that.
        report: Where the results go.
        after: Called after each part; False ends the run.

    Returns:
        Whether all of them passed or were skipped.
    """
    waiting, good = list(parts), True
    deadline = time.monotonic() + limit_s
    while waiting:
        part = waiting.pop(0)
        others = sum(other.reserved_s for other in waiting)
        result = part.run(max(part.reserved_s, deadline - time.monotonic() - others))
        good &= report.note(part.name, result)
        if after is not None and not after(part, result):
            return False
    return good

# SPDX-License-Identifier: Apache-2.0
"""Check everything that needs one CUDA device, offline, in under eight minutes.

Builds in place, runs the tests marked ``gpu``, then the kernel benches, with the Python that runs
this file; nothing is installed. Leaves one JSON file, also when a part fails or time runs out, and
exits 1 then.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 450
BUILD_S, TESTS_S, BENCH_S = 150, 270, 120


def run(command: list[str], limit: float, **environ: str) -> dict[str, Any]:
    """Run a command of this Python in the repository; print its output; return how it went."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environ}
    print("$ python", *command, flush=True)
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=max(limit, 1),
            check=False,
        )
        output, status = done.stdout, "passed" if done.returncode == 0 else "failed"
    except subprocess.TimeoutExpired as expired:
        partial = expired.stdout or b""
        output = partial.decode(errors="replace") if isinstance(partial, bytes) else partial
        status = f"timed out after {limit:.0f} s"
    print(output, flush=True)
    seconds = round(time.monotonic() - begin, 1)
    return {"status": status, "seconds": seconds, "output": output.splitlines()[-40:]}


def tests(limit: float, report: Path) -> dict[str, Any]:
    """Run the tests marked gpu; count them."""
    options = ["-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    result = run([*options, f"--junitxml={report}"], limit)
    if report.is_file():
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
        counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors")}
        result |= counts | {"skipped": int(suite.get("skipped", 0))}
        report.unlink()
        if counts["tests"] == result["skipped"]:
            result["status"] = "failed: no test ran"
    return result


def bench(command: list[str], limit: float) -> dict[str, Any]:
    """Run a bench; its last line is its result."""
    result = run(command, limit)
    if result["status"] == "passed":
        result["result"] = json.loads(result.pop("output")[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)
    report = args.output / f"gpu_check-{now:%Y%m%d-%H%M}.json"
    deadline = time.monotonic() + LIMIT_S

    def left(most: float) -> float:
        return min(most, deadline - time.monotonic())

    results: dict[str, Any] = {"bench": "gpu_check", "date": f"{now:%Y-%m-%d %H:%M}"}

    def note(name: str, result: dict[str, Any]) -> bool:
        results[name] = result
        report.write_text(json.dumps(results, indent=1) + "\n")  # after each part: one may hang
        return str(result["status"]) == "passed"

    device = "import torch; assert torch.cuda.is_available(), 'no CUDA device'"
    if not note("device", run(["-c", device], left(60))):
        print("gpu-check: expected a CUDA device, found none. Run it on a CUDA host.")
        return 1
    good = note("build", run(["setup.py", "build_ext", "--inplace"], left(BUILD_S)))
    good &= note("environment", run(["-m", "fsdp_kernels.cli", "env", "--json"], left(60)))
    good &= note("tests", tests(left(TESTS_S), args.output / "gpu_check.xml"))
    for dtype in ("bf16", "fp32"):
        command = ["bench/adam.py", "--device", "cuda", "--dtype", dtype, "--numel", str(1 << 28)]
        good &= note(f"adam-{dtype}", bench(command, left(BENCH_S)))
    summary = {name: part["status"] for name, part in results.items() if isinstance(part, dict)}
    print(f"wrote {report.name}")
    print(json.dumps(summary))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

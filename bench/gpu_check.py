# SPDX-License-Identifier: Apache-2.0
"""Check everything that needs one CUDA device, offline, in under eight minutes.

Builds in place, runs the tests marked ``gpu`` group by group, then the benches in a short form,
with the Python that runs this file; nothing is installed. Leaves one JSON file, complete after each
part, whatever became of it, and exits 1 unless every part passed or had a reason to be skipped.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

from parts import ROOT, Part, Report, Result, Tests, run_all

LIMIT_S = 470
BUILD = ("setup.py", "build_ext", "--inplace")
TRITON = ("-m", "gpu", "tests/test_device_kernels.py", "tests/test_reduce_adam.py")
CUDA = ("-m", "gpu", "tests/test_cuda_kernels.py")
SANITIZED = ("bench/gpu_small.py", "--device", "cuda")
# Every tensor in an allocation of its own: past its end lies nothing that may be touched.
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
KERNEL = ("--device", "cuda", "--numel", str(1 << 28), "--rounds", "7")
ADAM = ("bench/adam.py", *KERNEL)
STEP = ("bench/step.py", "--device", "cuda", "--world", "1", "--rounds", "7", "--dtype", "bf16")
STEP_SIZES = ("--dim", "1024", "--layers", "8", "--batch", "8", "--sequence", "512")


def sanitizer(tool: str) -> dict[str, tuple[str, ...]]:
    """Run a part under compute-sanitizer, where that is there and can look into the device."""
    options = ("--tool", tool, "--error-exitcode", "9", "--print-limit", "20")
    cannot = ("Device not supported", "No attachable process found")
    return {"under": ("compute-sanitizer", *options), "skip_if": cannot}


PARTS: list[Part] = [
    Part("device", 25, ("bench/gpu_device.py",), figures=True),
    Part("build", 60, BUILD, environ={"FSDP_KERNELS_CUDA": "require"}),
    Part("environment", 8, ("-m", "fsdp_kernels.cli", "env", "--json")),
    Tests("triton kernels", 50, TRITON, workers=4),
    Tests("cuda kernels", 27, CUDA, workers=4),
    Part("memcheck", 25, SANITIZED, environ=UNCACHED, **sanitizer("memcheck")),
    Part("racecheck", 20, SANITIZED, **sanitizer("racecheck")),
    Tests("one rank", 50, ("-m", "gpu", "tests/test_device.py", "tests/test_device_nccl.py")),
    Tests("streams", 25, ("-m", "gpu", "tests/test_device_streams.py")),
    Tests("two ranks", 45, ("-m", "gpu", "tests/test_device_two_ranks.py"), may_skip=True),
    Tests("peer memory", 30, ("-m", "gpu", "tests/test_device_peer.py")),
    Part("bench pack", 10, ("bench/pack.py", *KERNEL), figures=True),
    Part("bench norm", 10, ("bench/norm.py", *KERNEL), figures=True),
    Part("bench adam bf16", 20, (*ADAM, "--dtype", "bf16"), figures=True),
    Part("bench adam fp32", 15, (*ADAM, "--dtype", "fp32"), figures=True),
    Part("bench step", 25, (*STEP, *STEP_SIZES), figures=True),
    Part("bench host", 15, ("bench/host.py", "--device", "cuda", "--units", "32"), figures=True),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--only", nargs="+", metavar="PART", help="beside device and build")
    parser.add_argument(
        "--list", action="store_true", help="print the parts and what they may take"
    )
    args = parser.parse_args()
    if args.list:
        for part in PARTS:
            print(f"{part.reserved_s:>5.0f} s  {part.name}")
        print(f"{sum(part.reserved_s for part in PARTS):>5.0f} s  of {LIMIT_S} s")
        return 0
    parts = chosen(args.only)
    args.output.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)
    head = {"bench": "gpu_check", "date": f"{now:%Y-%m-%d %H:%M}", "parts": {}}
    report = Report(args.output / f"gpu_check-{now:%Y%m%d-%H%M%S}.json", head)
    good = run_all(parts, LIMIT_S, report, lambda part, result: follow(part, result, report))
    report.content["passed"] = good
    report.write()
    summarise(report.content["parts"])
    print(f"wrote {report.path}")
    return 0 if good else 1


def chosen(only: list[str] | None) -> list[Part]:
    """Return the parts with these names, and the two that all others need."""
    names = {part.name for part in PARTS}
    if unknown := set(only or ()) - names:
        sys.exit(f"--only: expected names of {sorted(names)}, got {sorted(unknown)}.")
    return [p for p in PARTS if only is None or p.name in ("device", "build", *only)]


def follow(part: Part, result: Result, report: Report) -> bool:
    """Take the versions; end without a device; without nvcc, build what needs none."""
    if part.name == "device":
        report.content["versions"] = result.get("figures", {})
        if result["status"] != "passed":
            print("gpu-check: expected a CUDA device, found none. Run it on a CUDA host.")
            print(*result.get("output", ()), sep="\n")
            return False
    if part.name == "build" and result["status"] != "passed":
        # The other parts say more with the CPU module alone than with nothing.
        without = Part("build without CUDA", 0, BUILD, environ={"FSDP_KERNELS_CUDA": "skip"})
        report.note(without.name, without.run(60))
    return True


def summarise(parts: dict[str, Any]) -> None:
    """Print a line for each part, and all of it as one line of JSON."""
    for name, result in parts.items():
        tests = f"{result['tests']} tests" if "tests" in result else ""
        why = result.get("why", "")
        print(f"{name:20}{result['status']:12}{result.get('seconds', 0):>7.1f} s  {tests}  {why}")
    print(json.dumps({name: result["status"] for name, result in parts.items()}))


if __name__ == "__main__":
    sys.exit(main())

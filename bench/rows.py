# SPDX-License-Identifier: Apache-2.0
"""What the benches share: interleaved timing, the hardware's name, rows of results."""

from __future__ import annotations

import datetime
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fsdp_kernels._environment import environment

RESULTS = Path(__file__).parent / "results"


def processor() -> str:
    """Name the CPU and count its cores; a GPU's name is in `environment`."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown'}, {len(names)} cores"


def describe() -> dict[str, Any]:
    """Print the environment and return it with the processor's name."""
    found = {**environment(), "processor": processor()}
    for name, value in found.items():
        print(f"  {name}: {value}")
    return found


def interleave(
    sides: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    before: Callable[[], object] | None = None,
    clock: Callable[[], float] | None = None,
) -> dict[str, list[float]]:
    """Time each side once a round, so that what disturbs the machine disturbs all alike.

    Every other round runs backwards, so that no side always inherits the same one's caches.

    Args:
        sides: What to time, by name.
        rounds: How often.
        before: Called, untimed, before each side: a barrier where ranks run the sides together.
        clock: Gives seconds; None is the wall clock.

    Returns:
        Seconds by side, one for each round; two rounds of warming up are not among them.
    """
    now = clock or time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 2):
        for name, side in list(sides.items())[:: 1 - 2 * (turn % 2)]:
            if before is not None:
                before()
            begin = now()
            side()
            if turn >= 2:
                seconds[name].append(now() - begin)
    return seconds


def ratio(slow: list[float], fast: list[float]) -> float:
    """Return the median over rounds of slow / fast."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def device_clock() -> float:
    """Read the wall clock after all work of the CUDA device."""
    torch.cuda.synchronize()
    return time.perf_counter()


def scale_in_place(numel: int, device: str = "cpu") -> Callable[[], object]:
    """Return the side that is the ceiling of kernels bound by memory: 8 bytes an element."""
    tensor = torch.ones(numel, device=device)
    return lambda: tensor.mul_(1.0)


def finish(bench: str, result: dict[str, Any], *, record: bool) -> None:
    """Print the result as one line of JSON, and append it to the bench's file of rows if asked."""
    row = {
        "bench": bench,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        "command": shlex.join(["python", f"bench/{bench}.py", *sys.argv[1:]]),
        **result,
    }
    line = json.dumps(row)
    if record:
        RESULTS.mkdir(exist_ok=True)
        with (RESULTS / f"{bench}.jsonl").open("a") as rows:
            rows.write(line + "\n")
    print(line)

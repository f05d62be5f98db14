# SPDX-License-Identifier: Apache-2.0
"""What the benches share: options, interleaved timing, tables, rows of results.

Every bench prints the environment, then the ceiling, checks its sides against one another, times
them in turns, prints a table, and ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from counts import Counts

from fsdp_kernels._environment import environment

HERE = Path(__file__).resolve().parent
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MOST_COPIES = 16  # of the inputs
CEILING = "ceiling"
Run = Callable[[], object]


def results() -> Path:
    """Return where rows go: beside the benches, or under the current folder if installed."""
    return HERE / "results" if (HERE / "results").is_dir() else Path.cwd() / "bench" / "results"


def parser(words: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """Make the parser with the options that every bench has."""
    made = argparse.ArgumentParser(
        prog=f"fsdp-kernels bench {Path(sys.argv[0]).stem}",
        description=words,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    made.add_argument("--rounds", type=int, default=rounds, help="how often each side is timed")
    made.add_argument(
        "--record",
        type=Path,
        nargs="?",
        const=results(),
        metavar="FOLDER",
        help="append the row to a file there; bench/results/ by default",
    )
    return made


def kernel_parser(words: str | None, *, dtype: str, clip: float | None = None) -> Any:
    """Make the parser of a bench of kernels; with the default of ``--clip``, of optimizers."""
    made = parser(words, rounds=15)
    made.add_argument("--numel", type=int, default=16 << 20, help="elements of the shard or bucket")
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--dtype", choices=DTYPES, default=dtype, help="of the gradients")
    if clip is not None:
        made.add_argument("--clip", type=float, default=clip, help="largest norm; 0: no clipping")
    return made


@dataclass(frozen=True)
class Session:
    """One run of a bench.

    Attributes:
        args: Its options.
        environment: What it runs on.
        clock: Gives seconds.
    """

    args: argparse.Namespace
    environment: dict[str, Any]
    clock: Callable[[], float]

    def options(self, *names: str) -> dict[str, Any]:
        """Return some of the options, for the row."""
        return {name: getattr(self.args, name) for name in ("device", "rounds", *names)}


def begin(args: argparse.Namespace) -> Session:
    """Print the environment and set what must be the same in every run."""
    torch.set_num_threads(getattr(args, "threads", 1))
    torch.manual_seed(0)
    print("environment")
    found = {**environment(), "processor": processor()}
    for name, value in found.items():
        print(f"  {name}: {value}")
    return Session(args, found, clock(args.device))


def processor() -> str:
    """Name the CPU and count its cores; a GPU's name is in `environment`."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown'}, {len(names)} cores"


def clock(device: str) -> Callable[[], float]:
    """Return a clock that waits for a CUDA device's work first."""
    return device_clock if device == "cuda" else time.perf_counter


def device_clock() -> float:
    """Read the wall clock after all work of the CUDA device."""
    torch.cuda.synchronize()
    return time.perf_counter()


def cache_bytes(device: str) -> int:
    """Return the bytes of the last cache before memory; 0 where the system does not say."""
    if device == "cuda":
        size: int = torch.cuda.get_device_properties(0).L2_cache_size
        return size
    units = {"": 1, "K": 1 << 10, "M": 1 << 20}
    found = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        if match := re.fullmatch(r"(\d+)([KM]?)", file.read_text().strip()):
            found.append(int(match[1]) * units[match[2]])
    return max(found)


def copies(nbytes: int, device: str) -> int:
    """Return how many inputs of so many bytes a side must go through to find none in the cache."""
    cache = cache_bytes(device)
    needed = max(math.ceil(2 * cache / max(nbytes, 1)), 1)
    made = min(needed, MOST_COPIES)
    where = "beyond" if made * nbytes >= 2 * cache else "within"
    print(f"inputs: {made} x {nbytes / 1e6:.1f} MB, {where} twice the cache ({cache / 1e6:.0f} MB)")
    return made


class Rotating:
    """Runs one of several copies of a side at each call, in turn."""

    def __init__(self, made: Sequence[Run]) -> None:
        self.made, self.turn = made, -1
        for run in made:  # first touch: memory that is new is slow once
            run()

    def __call__(self) -> object:
        self.turn = (self.turn + 1) % len(self.made)
        return self.made[self.turn]()


def interleave(
    sides: Mapping[str, Run],
    rounds: int,
    *,
    before: Run | None = None,
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


def spread(seconds: list[float]) -> float:
    """Return how far the middle half of the times reaches, as a share of their median."""
    if len(seconds) < 2:
        return 0.0
    low, median, high = statistics.quantiles(seconds, n=4)
    return (high - low) / median


def scale_in_place(numel: int, device: str = "cpu") -> Run:
    """Return the side that is the ceiling of kernels bound by memory: 8 bytes an element."""
    tensor = torch.ones(numel, device=device)
    return lambda: tensor.mul_(1.0)


def memory_ceiling(session: Session, numel: int) -> tuple[dict[str, Run], int]:
    """Print how fast memory is read and written; return the side that shows it and its bytes."""
    side = {CEILING: scale_in_place(numel, session.args.device)}
    first = statistics.median(interleave(side, 5, clock=session.clock)[CEILING])
    print(f"ceiling: {8 * numel / first / 1e9:.1f} GB/s, read plus written", flush=True)
    return side, 8 * numel


def report(
    seconds: Mapping[str, list[float]],
    counted: Mapping[str, Counts],
    ceiling: tuple[str, int],
    numel: int,
) -> dict[str, dict[str, Any]]:
    """Print the table of a bench of kernels, and return it.

    Ratios are medians over rounds of ratios within a round.

    Args:
        seconds: By side; ``ours`` is what the others are compared with.
        counted: By side, what one call does; sides that are ceilings have none.
        ceiling: The side that is the ceiling, and the bytes that it moves.
        numel: What bytes are given for each of.
    """
    name, nbytes = ceiling
    print(f"{'':24}{'median':>10}{'spread':>8}{'x ours':>8}{'B/param':>9}", end="")
    print(f"{'% of ceiling':>14}{'launches':>10}")
    table: dict[str, dict[str, Any]] = {}
    for side, times in seconds.items():
        count = counted.get(side, Counts(0, nbytes))
        row = {
            "ms": statistics.median(times) * 1e3,
            "spread": spread(times),
            "ratio_to_ours": ratio(times, seconds["ours"]),
            "ceiling_share": ratio(seconds[name], times) * count.nbytes / nbytes,
            "bytes_per_parameter": count.nbytes / numel,
            "launches": count.launches or None,
        }
        table[side] = row
        print(
            f"{side:24}{row['ms']:>7.2f} ms{row['spread']:>8.0%}{row['ratio_to_ours']:>8.2f}",
            end="",
        )
        print(f"{row['bytes_per_parameter']:>9.1f}{row['ceiling_share']:>14.0%}", end="")
        print(f"{row['launches'] or '':>10}")
    return table


def finish(bench: str, session: Session, result: dict[str, Any]) -> None:
    """Print the result as one line of JSON, and append it to the bench's file of rows if asked."""
    row = {
        "bench": bench,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        "command": shlex.join(["fsdp-kernels", "bench", bench, *sys.argv[1:]]),
        **result,
        "environment": session.environment,
    }
    line = json.dumps(row)
    if (folder := session.args.record) is not None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{bench}.jsonl").open("a") as rows:
            rows.write(line + "\n")
    print(line, flush=True)

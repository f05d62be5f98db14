# SPDX-License-Identifier: Apache-2.0
"""Bytes of a rank at rest and at the peak of a step: ours per strategy and backend, and the peers.

Training is that of `step.py`. On CPU the allocator's own events are added up, so a byte that C++
holds counts too, and memory that ranks share counts by its proportional share of each; on CUDA the
caching allocator says. At rest is after a step, gradients kept; the peak has the activations too.
What one unsharded process must hold for the same, parameters, gradients and both moments, is the
ideal that a rank's bytes are given in.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ranks
import rows
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from workloads import STRATEGIES, Shape, Side, batch, build, makers

STEPS = 3


@dataclass
class Watched:
    """Bytes beyond those held when the watch began: at most, and at its end."""

    peak: int = 0
    last: int = 0


@contextmanager
def watching(device: str) -> Iterator[Watched]:
    """Watch what is allocated and freed inside, by any thread."""
    found = Watched()
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield found
        torch.cuda.synchronize()
        found.peak = torch.cuda.max_memory_allocated() - before
        found.last = torch.cuda.memory_allocated() - before
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        yield found
    events, stack = [], list(prof.profiler.kineto_results.experimental_event_tree())
    while stack:
        node = stack.pop()
        stack.extend(node.children)
        if type(node.extra_fields).__name__ == "_ExtraFields_Allocation":
            events.append((node.start_time_ns, node.extra_fields.alloc_size))
    for _, size in sorted(events, key=lambda event: event[0]):
        found.last += size
        found.peak = max(found.peak, found.last)


def shared_bytes() -> int:
    """Return this process's proportional share of the memory that it shares."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Shmem:"):
            return int(line.split()[1]) * 1024
    return 0


def measure(rank: int, world: int, shape: Shape, name: str) -> dict[str, int]:
    """Build one side and train; its bytes on this rank."""
    gc.collect()  # what this process has from its parent must not be freed below
    before = shared_bytes()
    side: Side
    with watching(shape.device) as built:
        side = makers(shape, rank, world)[name]()
    tokens = [batch(shape, step, [rank]) for step in range(STEPS)]
    held = built.last
    with watching(shape.device) as trained:
        for step in range(STEPS):
            if step:
                side.optimizer.zero_grad()
            side.accumulate(tokens[step])
            side.finish()
        gc.collect()
    dist.barrier()  # every rank has touched what it shares
    shared = shared_bytes() - before
    dist.barrier()
    return {
        "peak_bytes": held + trained.peak + shared,
        "rest_bytes": held + trained.last + shared,
        "shared_bytes": shared,
    }


def ideal(shape: Shape) -> tuple[int, int]:
    """Return the bytes of parameters, gradients and moments in float32, and of the largest unit."""
    model = build(shape)
    units = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    return 16 * sum(p.numel() for p in model.parameters()), 4 * max(units)


def report(found: dict[str, dict[str, int]], world: int, least: tuple[int, int]) -> dict[str, Any]:
    """Print the table, and return it."""
    once, largest = least
    print(f"\none unsharded process must hold {once / 1e6:.1f} MB,", end=" ")
    print(f"the largest unit has {largest / 1e6:.1f} MB")
    print(f"{'per rank':36}{'at rest':>10}{'peak':>10}{'B/param':>9}{'x ideal':>9}{'bound':>7}")
    table: dict[str, Any] = {}
    for name, mine in found.items():
        bound = (1.15 * once + 2 * world * largest) / world
        row = {
            **mine,
            "rest_bytes_per_parameter": 16 * mine["rest_bytes"] / once,
            "rest_of_ideal": world * mine["rest_bytes"] / once,
            "rest_of_bound": mine["rest_bytes"] / bound,
        }
        table[name] = row
        print(
            f"{name:36}{row['rest_bytes'] / 1e6:>7.1f} MB{row['peak_bytes'] / 1e6:>7.1f} MB", end=""
        )
        print(f"{row['rest_bytes_per_parameter']:>9.1f}{row['rest_of_ideal']:>9.2f}", end="")
        print(f"{row['rest_of_bound']:>7.2f}")
    print("x ideal: all ranks together over one unsharded process;", end=" ")
    print("bound: over 1.15 of that and two of the largest unit for each rank")
    return table


def main() -> None:
    parser = rows.parser(__doc__, rounds=1)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="sequences a rank and step")
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--sides", nargs="+", metavar="SIDE", help="these alone")
    args = parser.parse_args()
    session = rows.begin(args)
    sizes = args.dim, args.layers, args.batch, args.sequence
    shape = Shape(*sizes, torch.float32, args.device, None, tuple(args.strategies))
    names = args.sides or names_of(shape)
    found: dict[str, dict[str, int]] = {}
    for name in names:
        # Ranks of their own for each: nothing is left over from another side.
        each = ranks.run(measure, args.world, shape, name, device=args.device)
        found[name] = {key: max(one[key] for one in each) for key in each[0]}
    result = {
        **session.options("world", "dim", "layers", "batch", "sequence"),
        "ideal_bytes": ideal(shape)[0],
        "sides": report(found, args.world, ideal(shape)),
    }
    rows.finish("memory", session, result)


def names_of(shape: Shape) -> list[str]:
    """Name the sides, without those that differ in time alone."""
    alike: Callable[[str], bool] = lambda name: name.endswith("fused AdamW")  # noqa: E731
    return [name for name in makers(shape, 0, 1) if not alike(name)]


if __name__ == "__main__":
    main()

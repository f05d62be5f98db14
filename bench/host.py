# SPDX-License-Identifier: Apache-2.0
"""Host time for each unit and step: ours against torch FSDP2, with 64 units of Linear(8, 8).

The tensors are so small that what is left is the time of the host's own code, which on a GPU limits
models of small layers. "host" is the processor time of the thread that runs the step, so waiting
for other ranks is not in it; "wall" is what a clock on the wall says. On CUDA, where backward has a
thread of its own, "host" is that of the whole process, and "wall" waits for the device.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import ranks
import rows
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fsdp_kernels

WIDTH = 8
CLOCKS: dict[str, dict[str, Callable[[], float]]] = {
    "cpu": {"host": time.thread_time, "wall": time.perf_counter},
    "cuda": {"host": time.process_time, "wall": rows.device_clock},
}


def build(units: int, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(units)]).to(device)


def models(units: int, world: int, device: str) -> dict[str, nn.Module]:
    ours = fsdp_kernels.fully_shard(build(units, device), units=nn.Linear)
    fsdp2, mesh = build(units, device), init_device_mesh(device, (world,))
    for linear in fsdp2:
        torch_fully_shard(linear, mesh=mesh)
    torch_fully_shard(fsdp2, mesh=mesh)
    return {"ours": ours, "FSDP2": fsdp2, "unsharded": build(units, device)}


def optimizers(made: dict[str, nn.Module], clip: bool) -> dict[str, Callable[[], object]]:
    """Return each side's optimizer step, on gradients that stay."""
    limit = 1.0 if clip else None
    ours = fsdp_kernels.ShardedAdamW(made["ours"].parameters(), max_grad_norm=limit)
    sides: dict[str, Callable[[], object]] = {"ours": ours.step}
    for name in ("FSDP2", "unsharded"):
        params = list(made[name].parameters())
        theirs = torch.optim.AdamW(params, foreach=True)

        def step(params: Any = params, theirs: torch.optim.Optimizer = theirs) -> None:
            if clip:
                nn.utils.clip_grad_norm_(params, 1.0)
            theirs.step()

        sides[name] = step
    return sides


def check(made: dict[str, nn.Module], x: torch.Tensor) -> None:
    """Raise unless all sides compute the same."""
    want = made["unsharded"](x)
    for name, model in made.items():
        torch.testing.assert_close(model(x), want, msg=f"{name} computes something else")


def measure(rank: int, world: int, units: int, rounds: int, device: str) -> dict[str, Any]:
    """Time every part with both clocks."""
    made = models(units, world, device)
    x = torch.randn(4, WIDTH, device=device)
    check(made, x)

    def pass_through(model: nn.Module) -> Callable[[], object]:
        def both() -> None:
            model.zero_grad()
            model(x).sum().backward()

        return both

    parts = {
        "forward, backward, zero_grad": {n: pass_through(model) for n, model in made.items()},
        "optimizer step": optimizers(made, clip=False),
        "clip and optimizer step": optimizers(made, clip=True),
    }
    return {
        part: {
            name: ranks.interleave(sides, rounds, clock) for name, clock in CLOCKS[device].items()
        }
        for part, sides in parts.items()
    }


def report(world: int, units: int, parts: dict[str, Any]) -> dict[str, Any]:
    """Print one world's table and return it."""
    names = ("ours", "FSDP2", "unsharded")
    titles = "".join(f"{name:>11}" for name in names)
    print(f"\nworld {world}: µs for each unit and step")
    print(f"{'':36}{titles}{'FSDP2 / ours':>14}")
    table: dict[str, Any] = {}
    for part, clocks in parts.items():
        for clock, seconds in clocks.items():
            micros = {n: statistics.median(seconds[n]) * 1e6 / units for n in names}
            ratio = rows.ratio(seconds["FSDP2"], seconds["ours"])
            values = "".join(f"{micros[name]:>11.1f}" for name in names)
            print(f"{part:30}{clock:6}{values}{ratio:>14.2f}")
            table.setdefault(part, {})[clock] = {"us": micros, "fsdp2_over_ours": ratio}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, default=64)
    parser.add_argument("--worlds", type=int, nargs="+", help="1 and 2 on CPU, 1 on CUDA")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--record", action="store_true", help="append to bench/results/")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("environment")
    found = rows.describe()
    tables = {}
    for world in args.worlds or ([1, 2] if args.device == "cpu" else [1]):
        sizes = args.units, args.rounds, args.device
        parts = ranks.run(measure, world, *sizes, device=args.device)[0]
        tables[str(world)] = report(world, args.units, parts)
    result = {
        "units": args.units,
        "device": args.device,
        "rounds": args.rounds,
        "worlds": tables,
        "least_ratio": min(
            clocks["host"]["fsdp2_over_ours"] for t in tables.values() for clocks in t.values()
        ),
        "environment": found,
    }
    rows.finish("host", result, record=args.record)


if __name__ == "__main__":
    main()

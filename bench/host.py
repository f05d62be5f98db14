# SPDX-License-Identifier: Apache-2.0
"""Host time for each unit and each optimizer step: ours against torch FSDP2, tiny tensors.

The first parts have 64 units of Linear(8, 8), the last one unit of 1000 parameters of 8 elements.
What is left is the time of the host's own code, which on a GPU limits models of small layers.
"host" is the processor time of the thread that runs the step, so waiting for other ranks is not in
it; "wall" is what a clock on the wall says. On CUDA, where backward has a thread of its own, "host"
is that of the whole process, and "wall" waits for the device. Launches are counted, for the whole
model.
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
from counts import count
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fsdp_kernels

WIDTH = 8
MANY = "optimizer step, many"
CLOCKS: dict[str, dict[str, Callable[[], float]]] = {
    "cpu": {"host": time.thread_time, "wall": time.perf_counter},
    "cuda": {"host": time.process_time, "wall": rows.device_clock},
}


def build(units: int, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(units)]).to(device)


class Many(nn.Module):
    """One unit of many small parameters."""

    def __init__(self, params: int) -> None:
        super().__init__()
        self.names = [f"weight{i}" for i in range(params)]
        for name in self.names:
            self.register_parameter(name, nn.Parameter(torch.randn(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.stack([getattr(self, name) for name in self.names]).mean()


def many(params: int, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Many(params)).to(device)


def models(
    make: Callable[[], nn.Sequential], unit: type[nn.Module], world: int, device: str
) -> dict[str, nn.Module]:
    ours = fsdp_kernels.fully_shard(make(), units=unit)
    fsdp2, mesh = make(), init_device_mesh(device, (world,))
    for child in fsdp2:
        torch_fully_shard(child, mesh=mesh)
    torch_fully_shard(fsdp2, mesh=mesh)
    return {"ours": ours, "FSDP2": fsdp2, "unsharded": make()}


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


def measure(rank: int, world: int, args: argparse.Namespace) -> dict[str, Any]:
    """Time every part with both clocks, and count."""
    device = args.device
    layers = models(lambda: build(args.units, device), nn.Linear, world, device)
    small = models(lambda: many(args.params, device), Many, world, device)
    x = torch.randn(4, WIDTH, device=device)
    check(layers, x)
    check(small, x)

    def pass_through(model: nn.Module) -> Callable[[], object]:
        def both() -> None:
            model.zero_grad()
            model(x).sum().backward()

        return both

    passes = {name: pass_through(model) for name, model in small.items()}
    for run in passes.values():
        run()  # the optimizers below need gradients
    parts = {
        "forward, backward, zero_grad": {n: pass_through(model) for n, model in layers.items()},
        "optimizer step": optimizers(layers, clip=False),
        "clip and optimizer step": optimizers(layers, clip=True),
        MANY: optimizers(small, clip=False),
        f"clip and {MANY}": optimizers(small, clip=True),
    }
    return {part: timed(sides, args) for part, sides in parts.items()}


def timed(sides: dict[str, Callable[[], object]], args: argparse.Namespace) -> dict[str, Any]:
    """Time one part with both clocks, and count its launches."""
    seconds = {
        name: ranks.interleave(sides, args.rounds, clock)
        for name, clock in CLOCKS[args.device].items()
    }
    return {
        "seconds": seconds,
        "launches": {name: count(run).launches for name, run in sides.items()},
    }


def report(world: int, args: argparse.Namespace, parts: dict[str, Any]) -> dict[str, Any]:
    """Print one world's table and return it."""
    names = ("ours", "FSDP2", "unsharded")
    titles = "".join(f"{name:>11}" for name in names)
    print(f"\nworld {world}: µs for each of {args.units} units and step; launches in all;", end=" ")
    print(f"many: µs for a step of one unit of {args.params} parameters")
    print(f"{'':36}{titles}{'FSDP2 / ours':>14}{'spread':>8}   launches")
    table: dict[str, Any] = {}
    for part, found in parts.items():
        per = 1 if part.endswith(MANY) else args.units
        for clock, seconds in found["seconds"].items():
            micros = {n: statistics.median(seconds[n]) * 1e6 / per for n in names}
            ratio, spread = (
                rows.ratio(seconds["FSDP2"], seconds["ours"]),
                rows.spread(seconds["ours"]),
            )
            values = "".join(f"{micros[name]:>11.1f}" for name in names)
            launches = ", ".join(str(found["launches"][name]) for name in names)
            print(f"{part:30}{clock:6}{values}{ratio:>14.2f}{spread:>8.0%}   {launches}")
            row = {"us": micros, "fsdp2_over_ours": ratio, "spread": spread}
            table.setdefault(part, {})[clock] = row
        table[part]["launches"] = found["launches"]
    return table


def main() -> None:
    parser = rows.parser(__doc__, rounds=40)
    parser.add_argument("--units", type=int, default=64)
    parser.add_argument("--params", type=int, default=1000, help="of the one unit of many")
    parser.add_argument("--worlds", type=int, nargs="+", help="1 and 2 on CPU, 1 on CUDA")
    args = parser.parse_args()
    session = rows.begin(args)
    tables = {}
    for world in args.worlds or ([1, 2] if args.device == "cpu" else [1]):
        found = ranks.run(measure, world, args, device=args.device)[0]
        tables[str(world)] = report(world, args, found)
    result = {
        **session.options("units", "params"),
        "worlds": tables,
        "least_ratio": min(
            part["host"]["fsdp2_over_ours"] for table in tables.values() for part in table.values()
        ),
    }
    rows.finish("host", session, result)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""A training step: ours against torch FSDP2, DDP and the unsharded model, on CPU or CUDA.

A step is forward, backward, clipping, optimizer and zero_grad of a small transformer. All sides
start from the same weights, see the same data, and must agree on the losses before they are timed.
"Unsharded" trains on a rank's own part of the data with nobody to talk to: what is left is the
price of the other ranks. On CPU the ranks talk over gloo, and "ours" over shared memory too; on
CUDA over NCCL, a device for each. Without clipping, one side steps in backward.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import ranks
import rows
import torch
import torch.distributed as dist
from workloads import MAX_NORM, OVERLAPPED, SHARED, Shape, Side, batch, build, mean, sides

from fsdp_kernels import ProcessGroupComm

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
CHECKED_STEPS = 4
OTHERS = {
    "fsdp2": "FSDP2",
    "fsdp2_fused": "FSDP2, fused AdamW",
    "ddp": "DDP",
    "ddp_fused": "DDP, fused AdamW",
    "unsharded": "unsharded",
    "unsharded_fused": "unsharded, fused AdamW",
    "process_group": "ours",
    "overlapped": OVERLAPPED,
}
"""Key in the last line, and side."""


@dataclass(frozen=True)
class Transfer:
    """Something that moves bytes and does nothing else."""

    run: Callable[[], object]
    nbytes: int


def check(made: dict[str, Side], shape: Shape) -> dict[str, list[float]]:
    """Take some steps with every side; raise unless their losses agree with the unsharded ones."""
    losses = {
        name: [mean(side.step(batch(shape, step, side.ranks))) for step in range(CHECKED_STEPS)]
        for name, side in made.items()
    }
    want = torch.tensor(losses["unsharded"])
    for name, got in losses.items():
        off = (torch.tensor(got) / want - 1).abs().max().item()
        if not off <= TOLERANCE[shape.dtype]:
            raise RuntimeError(
                f"{name}: expected the losses of the unsharded model, {want.tolist()}, got {got}. "
                "Do not compare times of different results."
            )
    return losses


def count(side: Side, tokens: torch.Tensor) -> dict[str, Any]:
    """Count what one step sends through torch; NCCL that we call ourselves is not seen."""
    with ranks.TrafficCounter() as counter:
        side.step(tokens)
    traffic = counter.traffic
    return {
        "collectives": traffic.collectives.total(),
        "by_operator": dict(traffic.collectives),
        "sent_mb": traffic.sent_bytes / 1e6,
    }


def transfers(shape: Shape) -> dict[str, Transfer]:
    """Make the transfers that bound a step: a copy and a gather of one block's bucket."""
    numel = sum(p.numel() for p in build(shape).blocks[0].parameters())
    world = dist.get_world_size()
    shard = torch.zeros(-(-numel // world), dtype=shape.dtype, device=shape.device)
    full, target = shard.new_zeros(2, world * shard.numel())
    comm = ProcessGroupComm()
    nbytes = full.numel() * full.element_size()
    return {
        "copy": Transfer(lambda: target.copy_(full), 2 * nbytes),
        "gather": Transfer(
            lambda: comm.all_gather(full, shard, label="ceiling").wait(),
            nbytes * (world - 1) // world,
        ),
    }


def bandwidths(made: dict[str, Transfer], seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return bytes each second, the median over rounds."""
    return {name: one.nbytes / statistics.median(seconds[name]) for name, one in made.items()}


def measure(
    rank: int, world: int, shape: Shape, rounds: int, wanted: Callable[[str], bool]
) -> dict[str, Any]:
    """Do everything that takes all ranks; rank 0 prints the ceiling first."""
    clock = rows.device_clock if shape.device == "cuda" else None
    moved = transfers(shape)
    runs = {name: one.run for name, one in moved.items()}
    first = bandwidths(moved, ranks.interleave(runs, 10, clock))
    if rank == 0:
        print(
            f"ceiling, a block's bucket: copy {first['copy'] / 1e9:.1f} GB/s read plus written, "
            f"gather {first['gather'] / 1e9:.2f} GB/s sent by a rank",
            flush=True,
        )
    made = sides(shape, rank, world, wanted)
    losses = check(made, shape)
    tokens = batch(shape, CHECKED_STEPS, [rank])
    traffic = {name: count(side, tokens) for name, side in made.items()}
    steps = {name: partial(side.step, tokens) for name, side in made.items()}
    seconds = ranks.interleave({**steps, **runs}, rounds, clock)
    return {
        "ceiling": bandwidths(moved, seconds),
        "losses": losses,
        "traffic": traffic,
        "seconds": {name: seconds[name] for name in made},
    }


def tabulate(measured: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Print the table and return it."""
    seconds, traffic = measured["seconds"], measured["traffic"]
    bandwidth = measured["ceiling"]["gather"]
    print(f"{'':22}{'median':>11}{'x ours':>8}{'collectives':>13}{'MB sent':>9}{'at ceiling':>12}")
    table = {}
    for name, times in seconds.items():
        sent = traffic[name]["sent_mb"]
        median, to_ours = statistics.median(times), rows.ratio(times, seconds["ours"])
        least = sent * 1e6 / bandwidth if sent else 0.0
        table[name] = {
            "ms": median * 1e3,
            "ratio_to_ours": to_ours,
            **traffic[name],
            "sending_at_ceiling_ms": least * 1e3,
        }
        row = f"{name:22}{median * 1e3:>8.1f} ms{to_ours:>8.2f}"
        print(row + f"{traffic[name]['collectives']:>13}{sent:>9.1f}{least * 1e3:>9.1f} ms")
    return table


def over_shared_memory(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Print and return how many times as long as ours over shared memory every other side takes."""
    if SHARED not in seconds:
        return {}
    ratios = {
        key: rows.ratio(seconds[name], seconds[SHARED])
        for key, name in OTHERS.items()
        if name in seconds
    }
    print(f"over {SHARED}:", ", ".join(f"{key} {value:.2f}" for key, value in ratios.items()))
    return ratios


def is_wanted(names: list[str] | None, side: str) -> bool:
    """Whether a side takes part; ours and the unsharded model always do."""
    return names is None or side in ("ours", SHARED, OVERLAPPED, "unsharded", *names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="sequences a rank and step")
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of computation")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--no-clip", action="store_true", help="do not clip gradients")
    parser.add_argument("--sides", nargs="+", metavar="SIDE", help="beside ours and unsharded")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--record", action="store_true", help="append to bench/results/")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("environment")
    found = rows.describe()
    sizes = args.dim, args.layers, args.batch, args.sequence
    shape = Shape(*sizes, DTYPES[args.dtype], args.device, None if args.no_clip else MAX_NORM)
    wanted = partial(is_wanted, args.sides)
    measured = ranks.run(measure, args.world, shape, args.rounds, wanted, device=args.device)[0]
    print(f"losses agree: {', '.join(f'{loss:.4f}' for loss in measured['losses']['ours'])}")
    table = tabulate(measured)
    result = {
        **{key: getattr(args, key) for key in ("world", "dim", "layers", "batch", "sequence")},
        "dtype": args.dtype,
        "device": args.device,
        "rounds": args.rounds,
        "ceiling_gb_per_s": {name: value / 1e9 for name, value in measured["ceiling"].items()},
        "losses": measured["losses"],
        "clip": not args.no_clip,
        **{
            f"speedup_over_{key}": table[name]["ratio_to_ours"]
            for key, name in OTHERS.items()
            if name in table
        },
        "shared_memory": over_shared_memory(measured["seconds"]),
        "sides": table,
        "environment": found,
    }
    rows.finish("step", result, record=args.record)


if __name__ == "__main__":
    main()

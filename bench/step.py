# SPDX-License-Identifier: Apache-2.0
"""A training step: ours against torch FSDP2, DDP and the unsharded model, on CPU or CUDA.

A step is forward, backward, clipping, optimizer and zero_grad of a small transformer. All sides
start from the same weights, see the same data, and must agree on the losses before they are timed.
"Unsharded" trains on a rank's own part of the data with nobody to talk to: what is left is the
price of the other ranks. On CPU the ranks talk over gloo, and "ours" over shared memory too; on
CUDA over NCCL, a device for each. DeepSpeed and Megatron-FSDP take part where they are installed.
Without clipping, one side steps in backward. Several values of --clip and --world make a row each.

"Tail" is clipping and the optimizer's step, wherever they run. Where one kernel sums the ranks'
gradients and steps, the sum is in it.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import others
import ranks
import rows
import torch
import torch.distributed as dist
from counts import counting
from workloads import OVERLAPPED, SHARED, STRATEGIES, Shape, Side, batch, build, makers, mean

from fsdp_kernels import ProcessGroupComm

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
CHECKED_STEPS = 10
KEYS = {
    "FSDP2, fused AdamW": "fsdp2_fused",
    "DDP, fused AdamW": "ddp_fused",
    "unsharded, fused AdamW": "unsharded_fused",
    "ours": "process_group",
    OVERLAPPED: "overlapped",
}
"""Side, and its key in the last line, where that is not the side's name in small letters."""


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
    """Count what one step sends through torch, launches, and moves in its tail.

    NCCL that we call ourselves is not seen.
    """
    with ranks.TrafficCounter() as counter, counting() as passes:
        side.accumulate(tokens)
    with counter, counting() as tail:
        side.finish()
    side.optimizer.zero_grad()
    traffic = counter.traffic
    # What steps in backward has its tail there.
    early = ("adam_coefs", "adam", "reduce_adam")
    return {
        "collectives": traffic.collectives.total(),
        "by_operator": dict(traffic.collectives),
        "sent_mb": traffic.sent_bytes / 1e6,
        "launches": passes.launches + tail.launches,
        "tail_launches": tail.launches + sum(passes.by_name[name] for name in early),
        "tail_bytes": tail.nbytes + sum(passes.bytes_by_name[name] for name in early),
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


def measure(rank: int, world: int, shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    """Do everything that takes all ranks; rank 0 prints the ceiling first."""
    if args.pin:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    clock = rows.clock(shape.device)
    moved = transfers(shape)
    runs = {name: one.run for name, one in moved.items()}
    first = bandwidths(moved, ranks.interleave(runs, 10, clock))
    if rank == 0:
        print(
            f"ceiling, a block's bucket: copy {first['copy'] / 1e9:.1f} GB/s read plus written, "
            f"gather {first['gather'] / 1e9:.2f} GB/s sent by a rank",
            flush=True,
        )
    every = makers(shape, rank, world) | others.makers(shape, rank, world)
    made = {name: make() for name, make in every.items() if is_wanted(args.sides, name)}
    losses = check(made, shape)
    tokens = batch(shape, CHECKED_STEPS, [rank])
    traffic = {name: count(side, tokens) for name, side in made.items()}
    steps = {name: partial(side.step, tokens) for name, side in made.items()}
    seconds = ranks.interleave({**steps, **runs}, args.rounds, clock)
    return {
        "ceiling": bandwidths(moved, seconds),
        "losses": losses,
        "traffic": traffic,
        "seconds": {name: seconds[name] for name in made},
    }


def tabulate(measured: dict[str, Any], numel: int) -> dict[str, dict[str, Any]]:
    """Print the table and return it."""
    seconds, traffic = measured["seconds"], measured["traffic"]
    bandwidth = measured["ceiling"]["gather"]
    print(
        f"{'':32}{'median':>11}{'spread':>8}{'x ours':>8}{'collectives':>13}{'MB sent':>9}", end=""
    )
    print(f"{'at ceiling':>12}{'launches':>10}{'tail':>6}{'tail B/param':>14}")
    table = {}
    for name, times in seconds.items():
        counted = traffic[name]
        sent = counted["sent_mb"]
        median, to_ours = statistics.median(times), rows.ratio(times, seconds["ours"])
        least = sent * 1e6 / bandwidth if sent else 0.0
        table[name] = {
            "ms": median * 1e3,
            "spread": rows.spread(times),
            "ratio_to_ours": to_ours,
            **counted,
            "tail_bytes_per_parameter": counted["tail_bytes"] / numel,
            "sending_at_ceiling_ms": least * 1e3,
        }
        row = f"{name:32}{median * 1e3:>8.1f} ms{rows.spread(times):>8.0%}{to_ours:>8.2f}"
        row += f"{counted['collectives']:>13}{sent:>9.1f}{least * 1e3:>9.1f} ms"
        row += f"{counted['launches']:>10}{counted['tail_launches']:>6}"
        print(row + f"{counted['tail_bytes'] / numel:>14.1f}")
    return table


def ratios(seconds: dict[str, list[float]], base: str) -> dict[str, float]:
    """Print and return how many times as long as one side every other side takes."""
    if base not in seconds:
        return {}
    found = {
        KEYS.get(name) or re.sub(r"\W+", "_", name.lower()): rows.ratio(times, seconds[base])
        for name, times in seconds.items()
        if name != base
    }
    print(f"over {base}:", ", ".join(f"{key} {value:.2f}" for key, value in found.items()))
    return found


def is_wanted(names: list[str] | None, side: str) -> bool:
    """Whether a side takes part; ours and the unsharded model always do."""
    return names is None or side in ("ours", SHARED, OVERLAPPED, "unsharded", *names)


def limit(words: str) -> float | None:
    """Read a value of ``--clip``."""
    return None if words == "none" else float(words)


def parse() -> argparse.Namespace:
    parser = rows.parser(__doc__, rounds=25)
    parser.add_argument("--world", type=int, nargs="+", default=[2], help="numbers of ranks")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="sequences a rank and step")
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of computation")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=["zero3"])
    parser.add_argument(
        "--clip", type=limit, nargs="+", default=[1.0], help="largest norms; none: no clipping"
    )
    parser.add_argument("--sides", nargs="+", metavar="SIDE", help="beside ours and unsharded")
    parser.add_argument("--pin", action="store_true", help="each rank to one core, in turn")
    return parser.parse_args()


def run(session: rows.Session, world: int, max_norm: float | None) -> None:
    """Measure one world with one kind of clipping, and finish its row."""
    args = session.args
    sizes = args.dim, args.layers, args.batch, args.sequence
    dtype = rows.DTYPES[args.dtype]
    strategies = tuple(dict.fromkeys(("zero3", *args.strategies)))  # zero3 is what others are to
    shape = Shape(*sizes, dtype, args.device, max_norm, strategies)
    numel = sum(p.numel() for p in build(shape).parameters())
    print(f"\n{world} ranks, {numel / 1e6:.1f} M parameters, clip {max_norm}", flush=True)
    measured = ranks.run(measure, world, shape, args, device=args.device)[0]
    print(f"losses agree: {', '.join(f'{loss:.4f}' for loss in measured['losses']['ours'])}")
    table = tabulate(measured, numel)
    found = ratios(measured["seconds"], "ours")
    result = {
        **session.options("dim", "layers", "batch", "sequence", "dtype", "pin"),
        "world": world,
        "clip": max_norm,
        "parameters": numel,
        "ceiling_gb_per_s": {name: value / 1e9 for name, value in measured["ceiling"].items()},
        "losses": measured["losses"],
        **{f"speedup_over_{key}": value for key, value in found.items()},
        "shared_memory": ratios(measured["seconds"], SHARED),
        "sides": table,
        "skipped": others.missing(args.device),
    }
    rows.finish("step", session, result)


def main() -> None:
    args = parse()
    session = rows.begin(args)
    for name, reason in others.missing(args.device).items():
        print(f"skipped: {name}: {reason}")
    for world, max_norm in product(args.world, args.clip):
        run(session, world, max_norm)


if __name__ == "__main__":
    main()

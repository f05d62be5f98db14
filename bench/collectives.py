# SPDX-License-Identifier: Apache-2.0
"""Gathers, reductions and all-reduces of buckets: ours over each backend, and torch.distributed.

Bandwidths are those of nccl-tests. The algorithm's is the full bucket's bytes over the time. The
bus's is that times what a rank must send of it, (n - 1) / n for a gather or a reduce-scatter and
2 (n - 1) / n for an all-reduce, so it can be held against what a link carries, for any n. The
ceiling is a copy of the bucket by all ranks at once. Over shared memory a gather only waits and
nothing is sent; its bandwidths are what another way would need.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import ranks
import rows
import torch
import torch.distributed as dist

from fsdp_kernels.comm import pick
from fsdp_kernels.comm.base import Comm

SENT: dict[str, Callable[[int], float]] = {
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
}
"""What a rank must send at least, as a share of the full bucket."""
TORCH = "torch.distributed"
COPIES = 3  # of each bucket, so that none is found in the cache where they are large
Sides = dict[str, dict[str, rows.Run]]
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Buffers:
    """One bucket of each kind; float32, as gradients are reduced.

    Attributes:
        full: What is reduced: rank + 1 everywhere.
        gathered: Where a gather goes.
        shard: What is gathered: rank + 1 everywhere.
        reduced: Where a reduction goes.
    """

    def __init__(self, nbytes: int, rank: int, world: int, device: str) -> None:
        numel = max(nbytes // 4 // world, 1)
        self.shard = torch.full((numel,), rank + 1.0, device=device)
        self.full = torch.full((numel * world,), rank + 1.0, device=device)
        self.gathered, self.reduced = torch.zeros_like(self.full), torch.zeros_like(self.shard)

    def check(self, operation: str, side: str) -> None:
        """Raise unless an operation left what it should."""
        world = len(self.full) // len(self.shard)
        total = world * (world + 1) / 2
        if operation == "all_gather":
            want = torch.arange(1.0, world + 1).repeat_interleave(len(self.shard))
            good = torch.equal(self.gathered.cpu(), want)
        else:
            made = self.reduced if operation == "reduce_scatter" else self.full
            good = bool((made == total).all())
        if not good:
            raise RuntimeError(f"collectives: {operation} of {side} gave something else.")


def with_torch(buffers: Buffers) -> dict[str, rows.Run]:
    """Return the operations of torch.distributed."""
    return {
        "all_gather": lambda: _gather(buffers.gathered, buffers.shard),
        "reduce_scatter": lambda: _reduce(buffers.reduced, buffers.full),
        "all_reduce": lambda: dist.all_reduce(buffers.full),
    }


def with_ours(buffers: Buffers, comm: Comm) -> dict[str, rows.Run]:
    """Return the operations of one of our backends, as a step uses them."""
    label, full = "fk.bench[0]", buffers.full
    placed = comm.place_params(full.nbytes, full.device)

    def gather() -> None:
        comm.all_gather(buffers.gathered, buffers.shard, label=label).wait()

    def gather_in_place() -> None:
        assert placed is not None
        placed.gather(label=label).wait()
        placed.release()

    def reduce() -> None:
        # Backward packs into the backend's own bucket where it has one; so the input is there.
        bucket = comm.grads_buffer(full.numel(), full.dtype, label=label)
        comm.reduce_scatter(buffers.reduced, full if bucket is None else bucket, label=label).wait()

    if placed is not None:
        placed.shard.view(torch.float32).copy_(buffers.shard)
        buffers.gathered = placed.full.view(torch.float32)
    comm.prepare_reductions(full.nbytes)
    for _ in range(2):  # it has two buckets of its own; both get the input
        if (bucket := comm.grads_buffer(full.numel(), full.dtype, label=label)) is not None:
            bucket.copy_(full)
            comm.reduce_scatter(buffers.reduced, bucket, label=label).wait()
    return {
        "all_gather": gather if placed is None else gather_in_place,
        "reduce_scatter": reduce,
        "all_reduce": lambda: comm.all_reduce(full, label=label).wait(),
    }


def backends(device: str) -> list[str]:
    """Name those of ours that can serve tensors on this device here."""
    chosen = pick.choose(device).name
    return list(dict.fromkeys(("process_group", chosen)))


def sides(nbytes: int, rank: int, world: int, device: str) -> Sides:
    """Make and check every operation of every side for buckets of one size."""
    made: Sides = {operation: {} for operation in SENT}
    makers = {TORCH: with_torch}
    for name in backends(device):
        # One communicator for a size: what it was given to place stays with it.
        comm = pick.make(name, None, torch.device(device, rank) if device == "cuda" else _CPU)
        makers[f"ours, {name}"] = lambda buffers, comm=comm: with_ours(buffers, comm)
    for side, make in makers.items():
        drawn = [Buffers(nbytes, rank, world, device) for _ in range(COPIES)]
        runs = [make(buffers) for buffers in drawn]
        for operation in SENT:
            for buffers, run in zip(drawn, runs, strict=True):
                run[operation]()
                buffers.check(operation, side)
            made[operation][side] = rows.Rotating([run[operation] for run in runs])
    return made


_CPU = torch.device("cpu")


def ceiling(nbytes: int, device: str) -> rows.Run:
    """Return the copy of a bucket."""
    source, target = torch.zeros(2, max(nbytes // 4, 1), device=device)
    return lambda: target.copy_(source)


def measure(rank: int, world: int, sizes: list[int], rounds: int, device: str) -> dict[str, Any]:
    """Time every size; rank 0 prints the ceilings first."""
    clock = rows.clock(device)
    found: dict[str, Any] = {}
    for nbytes in sizes:
        copy = {rows.CEILING: ceiling(nbytes, device)}
        first = statistics.median(ranks.interleave(copy, 5, clock)[rows.CEILING])
        if rank == 0:
            print(
                f"ceiling, {nbytes:,} bytes: copies at {2 * nbytes / first / 1e9:.1f} GB/s a rank"
            )
        made = sides(nbytes, rank, world, device)
        found[str(nbytes)] = {
            operation: ranks.interleave({**runs, **copy}, rounds, clock)
            for operation, runs in made.items()
        }
    return found


def tabulate(world: int, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Print the table, and return it: a row for each size, operation and side."""
    print(f"\n{'bytes':>12} {'operation':16}{'side':24}{'median':>12}{'spread':>8}", end="")
    print(f"{'algbw':>9}{'busbw':>9}{'% of ceiling':>14}{'x torch':>9}")
    table = []
    for size, operations in found.items():
        for operation, seconds in operations.items():
            for side, times in seconds.items():
                if side == rows.CEILING:
                    continue
                median, sent = statistics.median(times), SENT[operation](world)
                row = {
                    "bytes": int(size),
                    "operation": operation,
                    "side": side,
                    "us": median * 1e6,
                    "spread": rows.spread(times),
                    "algorithm_gb_per_s": int(size) / median / 1e9,
                    "bus_gb_per_s": int(size) * sent / median / 1e9,
                    "ceiling_share": rows.ratio(seconds[rows.CEILING], times) * sent,
                    "speedup_over_torch": rows.ratio(seconds[TORCH], times),
                }
                table.append(row)
                print(f"{row['bytes']:>12,} {operation:16}{side:24}{row['us']:>9.1f} µs", end="")
                print(f"{row['spread']:>8.0%}{row['algorithm_gb_per_s']:>9.2f}", end="")
                print(f"{row['bus_gb_per_s']:>9.2f}{row['ceiling_share']:>14.0%}", end="")
                print(f"{row['speedup_over_torch']:>9.2f}")
    return table


def main() -> None:
    parser = rows.parser(__doc__, rounds=21)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26],
        help="bytes of the full bucket",
    )
    args = parser.parse_args()
    session = rows.begin(args)
    # Whole elements for every rank.
    sizes = [-(-size // (4 * 32 * args.world)) * 4 * 32 * args.world for size in args.sizes]
    found = ranks.run(measure, args.world, sizes, args.rounds, args.device, device=args.device)[0]
    result = {**session.options("world"), "sizes": sizes, "sides": tabulate(args.world, found)}
    rows.finish("collectives", session, result)


if __name__ == "__main__":
    main()

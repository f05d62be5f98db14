# SPDX-License-Identifier: Apache-2.0
"""Benches in several processes: ranks over gloo, timing in step, counts of collectives."""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import rows
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode


def run(fn: Callable[..., Any], world: int, *args: Any, device: str = "cpu") -> list[Any]:
    """Call `fn(rank, world, *args)` in `world` forked processes, one thread each.

    With `device="cuda"` ranks talk over NCCL, each on a device of its own. This process must not
    have used CUDA.

    Returns:
        What the calls returned, in rank order.
    """
    torch.set_num_threads(1)  # a forked child of a process with OpenMP threads hangs
    sys.stdout.flush()  # or every child prints what is still in the buffer
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        store = str(Path(folder) / "store")
        processes, pipes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            setup = (rank, world, store, device)
            process = context.Process(target=_main, args=(setup, theirs, fn, args), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            return [pipe.recv() for pipe in pipes]
        except EOFError:
            raise SystemExit(
                f"bench: expected a result from all {world} ranks, one ended without. "
                "Its traceback is above."
            ) from None
        finally:
            for process in processes:
                process.join(5)
                process.kill()


def _main(
    setup: tuple[int, int, str, str],
    pipe: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    rank, world, store, device = setup
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    result = fn(rank, world, *args)
    dist.barrier()
    pipe.send(result)
    dist.destroy_process_group()


def interleave(
    sides: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] | None = None
) -> dict[str, list[float]]:
    """Time sides that the ranks run together; a round counts as long as its slowest rank."""
    mine = rows.interleave(sides, rounds, before=dist.barrier, clock=clock)
    everyone: list[dict[str, list[float]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    return {
        name: [max(times) for times in zip(*(rank[name] for rank in everyone), strict=True)]
        for name in sides
    }


@dataclass
class Traffic:
    """What collectives one rank took part in.

    Attributes:
        collectives: How many, by operator.
        sent_bytes: What a rank must send for them, at least, with the algorithms that gloo has:
            its reduce-scatter is an all-reduce of a copy.
    """

    collectives: Counter[str] = field(default_factory=Counter)
    sent_bytes: float = 0.0


class TrafficCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives as torch dispatches them, whoever asks for them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.traffic = Traffic()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, Parameter) for kind in types):
            # Sharded tensors dispatch again, to the collectives inside.
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().split("::")[1].strip("_")
            share = next((share for key, share in _SHARES.items() if key in name), None)
            if share is not None:
                world = dist.get_world_size()
                self.traffic.collectives[name] += 1
                self.traffic.sent_bytes += share * _largest_bytes(args) * (world - 1) / world
        return func(*args, **(kwargs or {}))


_SHARES = {
    "allgather": 1,
    "all_gather": 1,
    "reduce_scatter": 2,
    "allreduce": 2,
    "all_reduce": 2,
    "alltoall": 1,
    "all_to_all": 1,
    "broadcast": 1,
}
"""Of the full buffer's bytes, times (world - 1) / world."""


def _largest_bytes(args: Any) -> int:
    """Find the full buffer among a collective's arguments: the largest list or tensor."""
    if isinstance(args, Tensor):
        return args.numel() * args.element_size()
    if isinstance(args, (list, tuple)):
        if args and all(isinstance(item, Tensor) for item in args):
            return sum(map(_largest_bytes, args)) if isinstance(args, list) else _most(args)
        return _most(args)
    return 0


def _most(args: Any) -> int:
    return max(map(_largest_bytes, args), default=0)

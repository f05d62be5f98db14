# SPDX-License-Identifier: Apache-2.0
"""The collective-fused optimizer tail: ours against a plain copy and against torch's operators.

The gradients of several ranks, and the copies of the parameters, lie in shared memory (CPU). Ours
sums them, takes an Adam step and publishes the new parameters in one pass; with clipping in two,
the sum with its norm first. torch does it as sum, norm, scale, fused AdamW, cast. The ceiling is a
copy of as many bytes as ours must at least read and write.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import rows
import torch
from torch import Tensor

from fsdp_kernels import ops
from triton_ops import COEF_COLUMNS, AdamShard, FragmentTable

LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.1
STATE = 3 * 2 * 4  # bytes an element: master and both moments, read and written
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Problem:
    """What both sides are given: one shard, and the part of every rank's gradients that is its."""

    peers: list[Tensor]
    master: Tensor
    copies: int
    clip: float | None


def shared(tensor: Tensor) -> Tensor:
    """Move a CPU tensor to memory that processes share; its pages are others than malloc's."""
    return tensor if tensor.is_cuda else tensor.share_memory_()


class Ours:
    """The kernels of a step over shared memory."""

    def __init__(self, problem: Problem) -> None:
        numel, device = problem.master.numel(), problem.master.device
        self.clip, self.peers = problem.clip, problem.peers
        self.table = FragmentTable.build([(0, numel, 0)])
        self.master = problem.master.clone()
        low = problem.peers[0].dtype
        self.copies = [
            shared(torch.empty(numel, dtype=low, device=device)) for _ in range(problem.copies)
        ]
        self.sum = None if self.clip is None else torch.empty_like(self.master)
        moments = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.shard = AdamShard(self.sum, self.master, *moments, params=self.copies[0])
        hyper = [[LR, *BETAS, EPS, WEIGHT_DECAY]]
        self.hyper = torch.tensor(hyper, dtype=torch.float64, device=device)
        self.step = torch.zeros(1, device=device)
        self.used = torch.ones(1, dtype=torch.bool, device=device)
        self.coefs = torch.empty(1, COEF_COLUMNS, dtype=torch.float64, device=device)
        self.mean = torch.full((1,), 1 / len(self.peers), dtype=torch.float64, device=device)

    def __call__(self) -> None:
        ops.adam_coefs(self.hyper, self.step, self.used, None, self.coefs, decoupled=True)
        peers, factor = self.peers, self.mean
        if self.sum is not None and self.clip is not None:
            found = ops.reduce(peers, self.sum, table=self.table)
            assert found is not None
            norm = found[:1].sqrt() * self.mean
            factor = (self.clip / (norm + 1e-6)).clamp_max(1.0) * self.mean
            peers = [self.sum]  # the second phase: the sum is the only rank's
        ops.reduce_adam(peers, self.shard, self.table, self.coefs, factor, publish=self.copies[1:])


class Torch:
    """The same with torch's operators, all buffers kept."""

    def __init__(self, problem: Problem) -> None:
        self.peers, self.clip = problem.peers, problem.clip
        self.master = problem.master.clone()
        self.sum = torch.empty_like(self.master)
        self.copies = [torch.empty_like(self.peers[0]) for _ in range(problem.copies)]
        self.optimizer = torch.optim.AdamW(
            [self.master], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
        )

    def __call__(self) -> None:
        self.sum.copy_(self.peers[0])
        for peer in self.peers[1:]:
            self.sum.add_(peer)
        self.sum.mul_(1 / len(self.peers))
        if self.clip is not None:
            norm = torch.linalg.vector_norm(self.sum)
            self.sum.mul_((self.clip / (norm + 1e-6)).clamp_max(1.0))
        self.master.grad = self.sum
        self.optimizer.step()
        for copy in self.copies:
            copy.copy_(self.master)


def minimal_bytes(problem: Problem) -> int:
    """Count what ours must read and write, an element."""
    low = problem.peers[0].element_size()
    phases = 0 if problem.clip is None else 2 * 4  # the sum, written and read
    return len(problem.peers) * low + phases + STATE + problem.copies * low


def copiers(n_bytes: int, device: str) -> dict[str, Callable[[], object]]:
    """Return the ways to copy that move ``n_bytes`` in all, half read and half written."""
    source, target = (torch.ones(n_bytes // 2, dtype=torch.uint8, device=device) for _ in range(2))
    ways: dict[str, Callable[[], object]] = {"copy, torch": lambda: target.copy_(source)}
    if device == "cpu":
        # Asked for their addresses at each call, so that the call keeps the tensors alive.
        ways["copy, memcpy"] = lambda: ctypes.memmove(
            target.data_ptr(), source.data_ptr(), source.nbytes
        )
    return ways


def check(problem: Problem) -> None:
    """Take three steps with both sides and compare; raise if they differ by more than rounding."""
    ours, torchs = Ours(problem), Torch(problem)
    for _ in range(3):
        ours()
        torchs()
    torch.testing.assert_close(ours.master, torchs.master, rtol=1e-5, atol=1e-6)
    exact = ours.master.to(ours.copies[0].dtype)
    assert all(torch.equal(copy, exact) for copy in ours.copies), "a copy is not the master rounded"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=16 << 20, help="elements of the shard")
    parser.add_argument("--world", type=int, default=2, help="ranks whose gradients are summed")
    parser.add_argument("--copies", type=int, default=1, help="copies of the parameters written")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--clip", type=float, default=0.0, help="largest norm; 0: no clipping")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="gradients and copies")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--record", action="store_true", help="append to bench/results/")
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    clock = rows.device_clock if args.device == "cuda" else None
    print("environment")
    found = rows.describe()

    dtype = DTYPES[args.dtype]
    draws = (torch.randn(args.numel, device=args.device) for _ in range(args.world))
    peers = [shared(values.to(dtype)) for values in draws]
    master = torch.randn(args.numel, device=args.device)
    problem = Problem(peers, master, args.copies, args.clip or None)
    cost = minimal_bytes(problem)
    ways = copiers(args.numel * cost, args.device)
    first = rows.interleave(ways, 5, clock=clock)
    ceiling = min(ways, key=lambda name: statistics.median(first[name]))
    seconds = statistics.median(first[ceiling])
    print(f"ceiling: {ceiling}, {args.numel * cost / seconds / 1e9:.1f} GB/s, read plus written")
    print(f"at it, ours takes {seconds * 1e3:.1f} ms for {cost} bytes an element", flush=True)
    check(problem)

    sides: dict[str, Callable[[], object]] = {
        "ours": Ours(problem),
        "torch": Torch(problem),
        **ways,
    }
    times = rows.interleave(sides, args.rounds, clock=clock)
    best = min(ways, key=lambda name: statistics.median(times[name]))
    names = ("numel", "world", "copies", "threads", "device", "clip", "dtype")
    result = {
        **{name: getattr(args, name) for name in names},
        "bytes_per_parameter": cost,
        "ceiling": best,
        "ceiling_gb_per_s": args.numel * cost / statistics.median(times[best]) / 1e9,
        "share_of_copy": rows.ratio(times[best], times["ours"]),
        "speedup": rows.ratio(times["torch"], times["ours"]),
        "sides": report(times, best),
        "environment": found,
    }
    rows.finish("reduce_adam", result, record=args.record)


def report(times: dict[str, list[float]], ceiling: str) -> dict[str, dict[str, Any]]:
    """Print the table; return it. Ratios are medians over rounds of ratios within a round."""
    print(f"{'':16}{'median':>10}{'x ours':>8}{'speed, % of copy':>18}")
    table = {}
    for name, taken in times.items():
        ms = statistics.median(taken) * 1e3
        ratio, share = rows.ratio(taken, times["ours"]), rows.ratio(times[ceiling], taken)
        table[name] = {"ms": ms, "ratio_to_ours": ratio, "share_of_copy": share}
        print(f"{name:16}{ms:>7.1f} ms{ratio:>8.2f}{share:>18.0%}")
    return table


if __name__ == "__main__":
    main()

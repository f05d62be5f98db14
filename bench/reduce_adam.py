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

import rows
import torch
from counts import count
from tails import STATE, Coefficients, adamw, clip_factor
from torch import Tensor

from fsdp_kernels import ops
from triton_ops import AdamShard, FragmentTable


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
        self.coefs = Coefficients(device)
        self.mean = torch.full((1,), 1 / len(self.peers), dtype=torch.float64, device=device)

    def __call__(self) -> None:
        coefs, peers, factor = self.coefs(), self.peers, self.mean
        if self.sum is not None and self.clip is not None:
            found = ops.reduce(peers, self.sum, table=self.table)
            assert found is not None
            norm = found[:1].sqrt() * self.mean
            factor = clip_factor(norm, self.clip) * self.mean
            peers = [self.sum]  # the second phase: the sum is the only rank's
        ops.reduce_adam(peers, self.shard, self.table, coefs, factor, publish=self.copies[1:])


class Torch:
    """The same with torch's operators, all buffers kept."""

    def __init__(self, problem: Problem) -> None:
        self.peers, self.clip = problem.peers, problem.clip
        self.master = problem.master.clone()
        self.sum = torch.empty_like(self.master)
        self.copies = [torch.empty_like(self.peers[0]) for _ in range(problem.copies)]
        self.optimizer = adamw(self.master, fused=True)

    def __call__(self) -> None:
        self.sum.copy_(self.peers[0])
        for peer in self.peers[1:]:
            self.sum.add_(peer)
        self.sum.mul_(1 / len(self.peers))
        if self.clip is not None:
            norm = torch.linalg.vector_norm(self.sum)
            self.sum.mul_(clip_factor(norm, self.clip))
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


def draw(args: argparse.Namespace) -> Problem:
    """Draw every rank's gradients and the parameters."""
    dtype = rows.DTYPES[args.dtype]
    draws = (torch.randn(args.numel, device=args.device) for _ in range(args.world))
    peers = [shared(values.to(dtype)) for values in draws]
    master = torch.randn(args.numel, device=args.device)
    return Problem(peers, master, args.copies, args.clip or None)


def main() -> None:
    parser = rows.kernel_parser(__doc__, dtype="fp32", clip=0.0)
    parser.add_argument("--world", type=int, default=2, help="ranks whose gradients are summed")
    parser.add_argument("--copies", type=int, default=1, help="copies of the parameters written")
    args = parser.parse_args()
    session = rows.begin(args)
    problem = draw(args)
    cost = minimal_bytes(problem)
    nbytes = args.numel * cost
    ways = copiers(nbytes, args.device)
    first = rows.interleave(ways, 5, clock=session.clock)
    ceiling = min(ways, key=lambda name: statistics.median(first[name]))
    seconds = statistics.median(first[ceiling])
    print(f"ceiling: {ceiling}, {nbytes / seconds / 1e9:.1f} GB/s, read plus written")
    print(f"at it, ours takes {seconds * 1e3:.1f} ms for {cost} bytes an element", flush=True)
    check(problem)

    makers: dict[str, Callable[[Problem], Callable[[], object]]] = {"ours": Ours, "torch": Torch}
    counted = {}
    for name, make in makers.items():
        step = make(problem)
        step()  # the first makes torch's state
        counted[name] = count(step)
    problems = [draw(args) for _ in range(rows.copies(nbytes, args.device))]
    sides = {name: rows.Rotating([make(p) for p in problems]) for name, make in makers.items()}
    times = rows.interleave({**sides, **ways}, args.rounds, clock=session.clock)
    best = min(ways, key=lambda name: statistics.median(times[name]))
    table = rows.report(times, counted, (best, nbytes), args.numel)
    result = {
        **session.options("numel", "world", "copies", "threads", "clip", "dtype"),
        "bytes_per_parameter": cost,
        "ceiling": best,
        "ceiling_gb_per_s": nbytes / table[best]["ms"] / 1e6,
        "share_of_copy": table["ours"]["ceiling_share"],
        "speedup": table["torch"]["ratio_to_ours"],
        "sides": table,
    }
    rows.finish("reduce_adam", session, result)


if __name__ == "__main__":
    main()

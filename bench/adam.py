# SPDX-License-Identifier: Apache-2.0
"""The optimizer tail after a reduce-scatter: ours against torch's, on CPU or one CUDA device.

Low-precision gradients in, low-precision parameters out, float32 master and moments, the gradient
norm clipped. torch does it as cast, norm, scale, AdamW (fused or foreach), cast; here it is two
passes, norm and Adam, the second of which does everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import rows
import torch
from counts import count
from tails import Coefficients, adamw, clip_factor
from torch import Tensor

from fsdp_kernels import ops
from triton_ops import AdamShard, FragmentTable


@dataclass(frozen=True)
class Problem:
    """What all sides are given."""

    grads: Tensor
    master: Tensor
    clip: float | None


class Ours:
    """The kernels that `ShardedAdamW.step` calls."""

    def __init__(self, problem: Problem) -> None:
        self.clip = problem.clip
        self.table = FragmentTable.build([(0, problem.master.numel(), 0)])
        self.master = problem.master.clone()
        # Parameters in float32 are the master itself: nothing is cast.
        low = problem.grads.dtype != torch.float32
        self.params = torch.empty_like(problem.grads) if low else None
        moments = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.shard = AdamShard(problem.grads, self.master, *moments, params=self.params)
        self.coefs = Coefficients(self.master.device)
        self.one = torch.ones(1, dtype=torch.float64, device=self.master.device)

    def __call__(self) -> None:
        factor = self.one
        if self.clip is not None:
            assert self.shard.grads is not None
            norm = ops.norm(self.shard.grads, self.table)[:1].sqrt()
            factor = clip_factor(norm, self.clip)
        ops.adam(self.shard, self.table, self.coefs(), factor)


class Torch:
    """The same with torch's operators and one form of its AdamW.

    `keep` reuses one buffer for the float32 gradients; without it the cast allocates, as
    ``grads.float()`` in a training script does, and the pages are new every time.
    """

    def __init__(self, problem: Problem, *, keep: bool = False, **form: bool) -> None:
        self.grads, self.clip = problem.grads.clone(), problem.clip
        low = problem.grads.dtype != torch.float32
        self.wide = torch.empty_like(problem.master) if keep and low else None
        self.params = torch.empty_like(problem.grads) if low else None
        self.master = problem.master.clone()
        self.optimizer = adamw(self.master, **form)

    def __call__(self) -> None:
        grads = self.grads.float() if self.wide is None else self.wide.copy_(self.grads)
        if self.clip is not None:
            grads.mul_(clip_factor(torch.linalg.vector_norm(grads), self.clip))
        self.master.grad = grads
        self.optimizer.step()
        if self.params is not None:
            self.params.copy_(self.master)


def alone(problem: Problem, **form: bool) -> Callable[[], object]:
    """Return a step of torch's AdamW on float32 gradients that are there already: no tail."""
    master = problem.master.clone()
    master.grad = problem.grads.float()
    return adamw(master, **form).step


SIDES: dict[str, Callable[[Problem], Callable[[], object]]] = {
    "ours": Ours,
    "torch": lambda problem: Torch(problem, fused=True),
    "torch, buffer kept": lambda problem: Torch(problem, fused=True, keep=True),
    "torch, foreach": lambda problem: Torch(problem, foreach=True),
    "fused AdamW alone": lambda problem: alone(problem, fused=True),
    "foreach AdamW alone": lambda problem: alone(problem, foreach=True),
}


def draw(numel: int, dtype: torch.dtype, device: str, clip: float | None) -> Problem:
    """Draw gradients and parameters."""
    grads, master = (torch.randn(numel, device=device) for _ in range(2))
    return Problem(grads.to(dtype), master, clip)


def check(problem: Problem) -> None:
    """Take three steps with each side and compare; raise if they differ by more than rounding."""
    ours = Ours(problem)
    others = [Torch(problem, fused=True, keep=True), Torch(problem, foreach=True)]
    for _ in range(3):
        for side in (ours, *others):
            side()
    for other in others:
        torch.testing.assert_close(ours.master, other.master, rtol=1e-5, atol=1e-6)
    if ours.params is not None:
        exact = ours.master.to(ours.params.dtype)
        assert torch.equal(ours.params, exact), "the parameters are not the rounded master"


def main() -> None:
    args = rows.kernel_parser(__doc__, dtype="bf16", clip=1.0).parse_args()
    session = rows.begin(args)
    ceiling, ceiling_bytes = rows.memory_ceiling(session, args.numel)
    form = args.numel, rows.DTYPES[args.dtype], args.device, args.clip or None
    check(draw(*form))
    counted = {}
    for name, make in SIDES.items():
        step = make(draw(*form))
        step()  # the first makes torch's state
        counted[name] = count(step)
    nbytes = counted["ours"].nbytes
    problems = [draw(*form) for _ in range(rows.copies(nbytes, args.device))]
    sides = {name: rows.Rotating([make(p) for p in problems]) for name, make in SIDES.items()}
    seconds = rows.interleave({**sides, **ceiling}, args.rounds, clock=session.clock)
    table = rows.report(seconds, counted, (rows.CEILING, ceiling_bytes), args.numel)
    result = {
        **session.options("numel", "threads", "clip", "dtype"),
        "ceiling_gb_per_s": ceiling_bytes / table[rows.CEILING]["ms"] / 1e6,
        "speedup": table["torch"]["ratio_to_ours"],
        "speedup_buffer_kept": table["torch, buffer kept"]["ratio_to_ours"],
        "speedup_foreach": table["torch, foreach"]["ratio_to_ours"],
        "sides": table,
    }
    rows.finish("adam", session, result)


if __name__ == "__main__":
    main()

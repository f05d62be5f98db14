# SPDX-License-Identifier: Apache-2.0
"""The optimizer tail after a reduce-scatter: ours against torch's, on CPU or one CUDA device.

Low-precision gradients in, low-precision parameters out, float32 master and moments, the gradient
norm clipped. torch does it as cast, norm, scale, fused AdamW, cast; here it is two passes, norm and
Adam, the second of which does everything else.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import rows
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_kernels import ops
from triton_ops import COEF_COLUMNS, AdamShard, FragmentTable

LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.1
MOMENTS = 2 * 2 * 4  # bytes an element: both moments read and written
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Problem:
    """What both sides are given."""

    grads: Tensor
    master: Tensor
    clip: float | None


class Ours:
    """The kernels that `ShardedAdamW.step` calls."""

    def __init__(self, problem: Problem) -> None:
        numel, device = problem.master.numel(), problem.master.device
        self.clip, self.launches = problem.clip, 2 if problem.clip is None else 3
        self.table = FragmentTable.build([(0, numel, 0)])
        self.master = problem.master.clone()
        # Parameters in float32 are the master itself: nothing is cast.
        low = problem.grads.dtype != torch.float32
        self.params = torch.empty_like(problem.grads) if low else None
        moments = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.shard = AdamShard(problem.grads, self.master, *moments, params=self.params)
        hyper = [[LR, *BETAS, EPS, WEIGHT_DECAY]]
        self.hyper = torch.tensor(hyper, dtype=torch.float64, device=device)
        self.step = torch.zeros(1, device=device)
        self.used = torch.ones(1, dtype=torch.bool, device=device)
        self.coefs = torch.empty(1, COEF_COLUMNS, dtype=torch.float64, device=device)
        self.one = torch.ones(1, dtype=torch.float64, device=device)

    def __call__(self) -> None:
        factor = self.one
        if self.clip is not None:
            norm = ops.norm(self.shard.grads, self.table)[:1].sqrt()
            factor = (self.clip / (norm + 1e-6)).clamp_max(1.0)
        ops.adam_coefs(self.hyper, self.step, self.used, None, self.coefs, decoupled=True)
        ops.adam(self.shard, self.table, self.coefs, factor)


class Torch:
    """The same with torch's operators and its fused AdamW.

    `keep` reuses one buffer for the float32 gradients; without it the cast allocates, as
    ``grads.float()`` in a training script does, and the pages are new every time.
    """

    def __init__(self, problem: Problem, *, keep: bool) -> None:
        self.grads, self.clip = problem.grads.clone(), problem.clip
        low = problem.grads.dtype != torch.float32
        self.wide = torch.empty_like(problem.master) if keep and low else None
        self.params = torch.empty_like(problem.grads) if low else None
        self.master = problem.master.clone()
        self.optimizer = adamw(self.master, fused=True)

    def __call__(self) -> None:
        grads = self.grads.float() if self.wide is None else self.wide.copy_(self.grads)
        if self.clip is not None:
            norm = torch.linalg.vector_norm(grads)
            grads.mul_((self.clip / (norm + 1e-6)).clamp_max(1.0))
        self.master.grad = grads
        self.optimizer.step()
        if self.params is not None:
            self.params.copy_(self.master)


def adamw(master: Tensor, **form: bool) -> torch.optim.AdamW:
    """Make torch's AdamW over one tensor, in one of its forms."""
    return torch.optim.AdamW(
        [master], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, **form
    )


def alone(problem: Problem, **form: bool) -> Callable[[], object]:
    """Return a step of torch's AdamW on float32 gradients that are there already: no tail."""
    master = problem.master.clone()
    master.grad = problem.grads.float()
    optimizer = adamw(master, **form)
    return optimizer.step


class Counter(TorchDispatchMode):
    """Counts the operators that torch dispatches."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "detach" not in str(func)
        return func(*args, **(kwargs or {}))


def bytes_per_parameter(itemsize: int, clip: bool) -> dict[str, int]:
    """Count what each side must read and write, an element."""
    low = itemsize < 4
    adam = MOMENTS + 2 * 4  # and the master
    casts = 2 * (itemsize + 4) if low else 0
    torchs = casts + (4 + 8 if clip else 0) + 4 + adam
    return {
        "ours": (itemsize if clip else 0) + itemsize + adam + (itemsize if low else 0),
        "torch": torchs,
        "torch, buffer kept": torchs,
        "fused AdamW alone": 4 + adam,
        "foreach AdamW alone": 4 + adam,
        "ceiling": 8,
    }


def check(problem: Problem) -> None:
    """Take three steps with both sides and compare; raise if they differ by more than rounding."""
    ours, torchs = Ours(problem), Torch(problem, keep=True)
    for _ in range(3):
        ours()
        torchs()
    torch.testing.assert_close(ours.master, torchs.master, rtol=1e-5, atol=1e-6)
    if ours.params is not None:
        exact = ours.master.to(ours.params.dtype)
        assert torch.equal(ours.params, exact), "the parameters are not the rounded master"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=16 << 20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm; 0: no clipping")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="gradients and parameters")
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
    draws = [torch.randn(args.numel, device=args.device) for _ in range(2)]
    problem = Problem(draws[0].to(dtype), draws[1], args.clip or None)
    cost = bytes_per_parameter(dtype.itemsize, problem.clip is not None)
    scale = {"ceiling": rows.scale_in_place(args.numel, args.device)}
    first = statistics.median(rows.interleave(scale, 5, clock=clock)["ceiling"])
    print(f"ceiling: {8 * args.numel / first / 1e9:.1f} GB/s, read plus written", flush=True)
    print(f"at it, ours takes {first * cost['ours'] / 8 * 1e3:.1f} ms", flush=True)
    check(problem)

    ours, torchs = Ours(problem), Torch(problem, keep=False)
    sides: dict[str, Callable[[], object]] = {
        "ours": ours,
        "torch": torchs,
        "torch, buffer kept": Torch(problem, keep=True),
        "fused AdamW alone": alone(problem, fused=True),
        "foreach AdamW alone": alone(problem, foreach=True),
        **scale,
    }
    torchs()  # its first step makes the state
    with Counter() as counter:
        torchs()
    launches = {"ours": ours.launches, "torch": counter.count}
    seconds = rows.interleave(sides, args.rounds, clock=clock)
    table = report(seconds, cost, launches)
    names = ("numel", "threads", "device", "clip", "dtype")
    result = {
        **{name: getattr(args, name) for name in names},
        "ceiling_gb_per_s": 8 * args.numel / statistics.median(seconds["ceiling"]) / 1e9,
        "speedup": table["torch"]["ratio_to_ours"],
        "speedup_buffer_kept": table["torch, buffer kept"]["ratio_to_ours"],
        "sides": table,
        "environment": found,
    }
    rows.finish("adam", result, record=args.record)


def report(
    seconds: dict[str, list[float]], cost: dict[str, int], launches: dict[str, int]
) -> dict[str, dict[str, Any]]:
    """Print the table; return it. Ratios are medians over rounds of ratios within a round."""
    print(f"{'':22}{'median':>10}{'x ours':>8}{'bytes':>7}{'% of ceiling':>14}{'launches':>10}")
    table = {}
    for name, times in seconds.items():
        ms = statistics.median(times) * 1e3
        share = rows.ratio(seconds["ceiling"], times) * cost[name] / cost["ceiling"]
        ratio, count = rows.ratio(times, seconds["ours"]), launches.get(name)
        table[name] = {"ms": ms, "ratio_to_ours": ratio, "ceiling_share": share}
        table[name] |= {"bytes_per_parameter": cost[name], "launches": count}
        line = f"{name:22}{ms:>7.1f} ms{ratio:>8.2f}{cost[name]:>7}{share:>14.0%}"
        print(line + f"{'' if count is None else count:>10}")
    return table


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""The kernels around a reduction, pack and norm: ours against torch's, on CPU or one CUDA device.

Pack casts the gradients of a transformer's block into one flat bucket in the dtype of the reduction
and fills what has none with zeros; torch does it as zeros and a foreach copy into views. Norm takes
the sum of squares and counts what is not finite in one pass over the reduced shard.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from typing import Any

import rows
import torch
from torch import Tensor

from fsdp_kernels import ops
from triton_ops import FragmentTable

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHARES = (3, 1, 4, 4)  # of a block's elements: qkv, out, up, down; vectors of a row between them
ALIGN = 64
Sides = dict[str, Callable[[], object]]
Gradients = list[Tensor | None]


def block(numel: int, dtype: torch.dtype, device: str) -> tuple[Gradients, list[int], int]:
    """Make a block's gradients: matrices, vectors, and one that backward did not reach.

    Returns:
        The gradients, the first element of each in the bucket, and the bucket's elements.
    """
    dim = max(math.isqrt(numel // sum(SHARES)) // 8 * 8, 8)
    grads: Gradients = []
    for share in SHARES:
        grads.append(torch.randn(dim, share * dim, device=device).to(dtype))
        grads.append(torch.randn(share * dim, device=device).to(dtype))
    grads.append(None)
    starts, end = [], 0
    for grad in grads:
        starts.append(end)
        end += -(-(dim if grad is None else grad.numel()) // ALIGN) * ALIGN
    return grads, starts, end


def pack_sides(
    grads: Gradients, starts: list[int], bucket: Tensor
) -> dict[str, tuple[Callable[[], object], Tensor]]:
    """Make each way to pack, with a bucket of its own."""
    ours, theirs = torch.empty_like(bucket), torch.empty_like(bucket)
    present = [grad for grad in grads if grad is not None]
    views = [
        theirs[start : start + grad.numel()].view(grad.shape)
        for grad, start in zip(grads, starts, strict=True)
        if grad is not None
    ]

    def with_torch() -> None:
        theirs.zero_()
        torch._foreach_copy_(views, present)

    sides: dict[str, tuple[Callable[[], object], Tensor]] = {
        "ours": (lambda: ops.pack(grads, starts, ours), ours),
        "torch": (with_torch, theirs),
    }
    if bucket.is_cuda:
        from triton_ops.pack import pack

        triton = torch.empty_like(bucket)
        sides["triton"] = (lambda: pack(grads, starts, triton), triton)
    return sides


def norm_sides(flat: Tensor, table: FragmentTable) -> dict[str, Callable[[], Tensor]]:
    """Make each way to take the norm; torch's own does not count what is not finite."""

    def with_count() -> Tensor:
        return torch.stack((torch.linalg.vector_norm(flat).double() ** 2, (~flat.isfinite()).sum()))

    sides: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: ops.norm(flat, table),
        "torch": lambda: torch.linalg.vector_norm(flat),
        "torch, with the count": with_count,
    }
    if flat.is_cuda:
        from triton_ops.norm import norm

        sides["triton"] = lambda: norm(flat, table)
    return sides


def report(
    title: str, seconds: dict[str, list[float]], nbytes: dict[str, int]
) -> dict[str, dict[str, float]]:
    """Print a table; return it. The ceiling reads and writes as fast as the device can."""
    print(f"\n{title:24}{'median':>10}{'x ours':>8}{'% of ceiling':>14}")
    table = {}
    for name, times in seconds.items():
        ms, ratio = statistics.median(times) * 1e3, rows.ratio(times, seconds["ours"])
        moved = nbytes.get(name, nbytes["all"])
        share = rows.ratio(seconds["ceiling"], times) * moved / nbytes["ceiling"]
        table[name] = {"ms": ms, "ratio_to_ours": ratio, "ceiling_share": share}
        print(f"{name:24}{ms:>7.2f} ms{ratio:>8.2f}{share:>14.0%}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, help="of the bucket; 16 Mi on CPU, 256 Mi on CUDA")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the gradients")
    parser.add_argument("--reduce-dtype", choices=DTYPES, default="fp32", help="of the bucket")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--record", action="store_true", help="append to bench/results/")
    args = parser.parse_args()
    args.numel = args.numel or (1 << 28 if args.device == "cuda" else 1 << 24)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    clock = rows.device_clock if args.device == "cuda" else None
    print("environment")
    found = rows.describe()

    dtype, reduce_dtype = DTYPES[args.dtype], DTYPES[args.reduce_dtype]
    grads, starts, numel = block(args.numel, dtype, args.device)
    bucket = torch.empty(numel, dtype=reduce_dtype, device=args.device)
    packs = pack_sides(grads, starts, bucket)
    ceiling: Sides = {"ceiling": rows.scale_in_place(numel, args.device)}
    first = statistics.median(rows.interleave(ceiling, 5, clock=clock)["ceiling"])
    print(f"ceiling: {8 * numel / first / 1e9:.1f} GB/s, read plus written", flush=True)

    for run, _ in packs.values():
        run()
    for name, (_, made) in packs.items():
        assert torch.equal(made, packs["torch"][1]), f"pack: {name} and torch differ"
    runs: Sides = {name: run for name, (run, _) in packs.items()}
    seconds = rows.interleave({**runs, **ceiling}, args.rounds, clock=clock)
    moved = numel * (dtype.itemsize + reduce_dtype.itemsize)
    packed = report("pack", seconds, {"all": moved, "ceiling": 8 * numel})

    flat, table = packs["ours"][1], FragmentTable.build([(0, numel, 0)])
    norms = norm_sides(flat, table)
    want = norms["torch, with the count"]()
    for name, run in norms.items():
        if name != "torch":
            # Loose: torch sums in float32.
            torch.testing.assert_close(run(), want, rtol=1e-3, atol=0.0, msg=f"norm: {name} is off")
    seconds = rows.interleave({**norms, **ceiling}, args.rounds, clock=clock)
    normed = report("norm", seconds, {"all": flat.nbytes, "ceiling": 8 * numel})
    result: dict[str, Any] = {
        **{name: getattr(args, name) for name in ("device", "dtype", "reduce_dtype", "rounds")},
        "numel": numel,
        "ceiling_gb_per_s": 8 * numel / statistics.median(seconds["ceiling"]) / 1e9,
        "pack": packed,
        "norm": normed,
        "pack_speedup": packed["torch"]["ratio_to_ours"],
        "norm_speedup": normed["torch"]["ratio_to_ours"],
        "environment": found,
    }
    rows.finish("kernels", result, record=args.record)


if __name__ == "__main__":
    main()

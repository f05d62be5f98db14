# SPDX-License-Identifier: Apache-2.0
"""The norm of a reduced bucket, and what is not finite in it: ours against torch's.

Ours takes the sum of squares in float64 and counts what is not finite, in one pass. torch's
`vector_norm` and `_foreach_norm` (one for each parameter, as `clip_grad_norm_` takes it) do not
count; ``torch, with the count`` does, in further passes.
"""

from __future__ import annotations

from collections.abc import Callable

import blocks
import rows
import torch
from blocks import Block
from counts import count
from torch import Tensor

from fsdp_kernels import ops
from triton_ops import FragmentTable

Side = Callable[[], Tensor]
"""Returns the norm, or the sum of squares and the count."""


def bucket(block: Block, dtype: torch.dtype) -> Tensor:
    """Fill a bucket with a block's gradients."""
    out = block.present[0].new_empty(block.numel, dtype=dtype)
    ops.pack(block.grads, block.starts, out)
    return out


def ours(block: Block, flat: Tensor) -> Side:
    table = FragmentTable.build([(0, flat.numel(), 0)])
    return lambda: ops.norm(flat, table)


def triton(block: Block, flat: Tensor) -> Side:
    from triton_ops.norm import norm

    table = FragmentTable.build([(0, flat.numel(), 0)])
    return lambda: norm(flat, table)


def vector_norm(block: Block, flat: Tensor) -> Side:
    return lambda: torch.linalg.vector_norm(flat)


def foreach_norm(block: Block, flat: Tensor) -> Side:
    views = block.views(flat)
    return lambda: torch.linalg.vector_norm(torch.stack(torch._foreach_norm(views)))


def with_count(block: Block, flat: Tensor) -> Side:
    def run() -> Tensor:
        return torch.stack((torch.linalg.vector_norm(flat).double() ** 2, (~flat.isfinite()).sum()))

    return run


SIDES: dict[str, Callable[[Block, Tensor], Side]] = {
    "ours": ours,
    "torch vector_norm": vector_norm,
    "torch _foreach_norm": foreach_norm,
    "torch, with the count": with_count,
}


def check(block: Block, dtype: torch.dtype) -> None:
    """Take the norm with each; raise if they differ by more than sums in the bucket's dtype do."""
    flat = bucket(block, dtype)
    want = flat.double().square().sum().sqrt()
    for name, make in SIDES.items():
        got = make(block, flat)()
        if got.numel() == 2:
            assert got[1] == 0, f"norm: {name} counts {got[1]} that are not finite, of none"
            got = got[0].sqrt()
        torch.testing.assert_close(
            got.double().reshape(()), want, rtol=1e-2, atol=0.0, msg=f"norm: {name} is off"
        )
    flat[1], flat[-1] = float("inf"), float("nan")
    for name in ("ours", "torch, with the count"):
        assert SIDES[name](block, flat)()[1] == 2, f"norm: {name} misses what is not finite"


def main() -> None:
    args = rows.kernel_parser(__doc__, dtype="fp32").parse_args()
    session = rows.begin(args)
    if args.device == "cuda":
        SIDES["triton"] = triton
    dtype = rows.DTYPES[args.dtype]
    block = blocks.draw(args.numel, dtype, args.device)
    ceiling, ceiling_bytes = rows.memory_ceiling(session, block.numel)
    check(block, dtype)
    flat = bucket(block, dtype)
    counted = {name: count(make(block, flat)) for name, make in SIDES.items()}
    buckets = [bucket(block, dtype) for _ in range(rows.copies(flat.nbytes, args.device))]
    sides = {
        name: rows.Rotating([make(block, one) for one in buckets]) for name, make in SIDES.items()
    }
    seconds = rows.interleave({**sides, **ceiling}, args.rounds, clock=session.clock)
    table = rows.report(seconds, counted, (rows.CEILING, ceiling_bytes), block.numel)
    result = {
        **session.options("threads", "dtype"),
        "numel": block.numel,
        "ceiling_gb_per_s": ceiling_bytes / table[rows.CEILING]["ms"] / 1e6,
        "speedup": table["torch vector_norm"]["ratio_to_ours"],
        "speedup_with_count": table["torch, with the count"]["ratio_to_ours"],
        "sides": table,
    }
    rows.finish("norm", session, result)


if __name__ == "__main__":
    main()

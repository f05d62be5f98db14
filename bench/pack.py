# SPDX-License-Identifier: Apache-2.0
"""Gradients into a flat bucket, cast to the dtype of the reduction: ours against torch's two ways.

The gradients are those of a transformer's block; what has none is filled with zeros. ``torch
_foreach_copy_`` is zeros and a copy into views, the same result; ``torch _chunk_cat`` is what FSDP2
does: the parts of every rank one after the other, so another order, and no place for what has no
gradient.
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

Side = tuple[Callable[[], object], Tensor]
"""Packs; and the bucket that it fills."""


def ours(block: Block, dtype: torch.dtype, world: int) -> Side:
    out = bucket(block, dtype)
    return lambda: ops.pack(block.grads, block.starts, out), out


def triton(block: Block, dtype: torch.dtype, world: int) -> Side:
    from triton_ops.pack import pack

    out = bucket(block, dtype)
    return lambda: pack(block.grads, block.starts, out), out


def foreach_copy(block: Block, dtype: torch.dtype, world: int) -> Side:
    out = bucket(block, dtype)
    views, present = block.views(out), block.present

    def run() -> None:
        out.zero_()
        torch._foreach_copy_(views, present)

    return run, out


def chunk_cat(block: Block, dtype: torch.dtype, world: int) -> Side:
    present = block.present
    # Each rank's part of a gradient is as many of its rows, the last filled up with zeros.
    numel = sum(-(-len(grad) // world) * grad[0].numel() for grad in present)
    out = present[0].new_empty(world, numel, dtype=dtype)
    return lambda: torch._chunk_cat(present, dim=0, num_chunks=world, out=out), out


def bucket(block: Block, dtype: torch.dtype) -> Tensor:
    return block.present[0].new_empty(block.numel, dtype=dtype)


SIDES = {"ours": ours, "torch _foreach_copy_": foreach_copy, "torch _chunk_cat": chunk_cat}


def check(block: Block, dtype: torch.dtype, world: int) -> None:
    """Pack once with each; raise unless every bucket is what it should be, bit for bit."""
    made = {name: make(block, dtype, world) for name, make in SIDES.items()}
    for run, out in made.values():
        out.fill_(float("nan"))
        run()
    want = torch.zeros(block.numel, dtype=dtype, device=block.present[0].device)
    for view, grad in zip(block.views(want), block.present, strict=True):
        view.copy_(grad)
    parts: list[list[Tensor]] = [[] for _ in range(world)]
    for grad in block.present:
        size = -(-len(grad) // world)
        for rank, part in enumerate(parts):
            piece = grad[rank * size : (rank + 1) * size].to(dtype)
            part += [piece.flatten(), piece.new_zeros((size - len(piece)) * grad[0].numel())]
    chunked = torch.stack([torch.cat(part) for part in parts])
    for name, (_, out) in made.items():
        assert torch.equal(out, chunked if "_chunk" in name else want), f"pack: {name} is wrong"


def main() -> None:
    parser = rows.kernel_parser(__doc__, dtype="bf16")
    parser.add_argument("--reduce-dtype", choices=rows.DTYPES, default="fp32", help="of the bucket")
    parser.add_argument("--world", type=int, default=2, help="parts of _chunk_cat")
    args = parser.parse_args()
    session = rows.begin(args)
    if args.device == "cuda":
        SIDES["triton"] = triton
    dtype, reduce_dtype = rows.DTYPES[args.dtype], rows.DTYPES[args.reduce_dtype]
    block = blocks.draw(args.numel, dtype, args.device)
    ceiling, ceiling_bytes = rows.memory_ceiling(session, block.numel)
    check(block, reduce_dtype, args.world)
    one = {name: make(block, reduce_dtype, args.world)[0] for name, make in SIDES.items()}
    counted = {name: count(run) for name, run in one.items()}
    copies = rows.copies(counted["ours"].nbytes, args.device)
    drawn = [blocks.draw(args.numel, dtype, args.device) for _ in range(copies)]
    sides = {
        name: rows.Rotating([make(block, reduce_dtype, args.world)[0] for block in drawn])
        for name, make in SIDES.items()
    }
    seconds = rows.interleave({**sides, **ceiling}, args.rounds, clock=session.clock)
    table = rows.report(seconds, counted, (rows.CEILING, ceiling_bytes), block.numel)
    result = {
        **session.options("threads", "dtype", "reduce_dtype", "world"),
        "numel": block.numel,
        "ceiling_gb_per_s": ceiling_bytes / table[rows.CEILING]["ms"] / 1e6,
        "speedup_over_foreach_copy": table["torch _foreach_copy_"]["ratio_to_ours"],
        "speedup_over_chunk_cat": table["torch _chunk_cat"]["ratio_to_ours"],
        "sides": table,
    }
    rows.finish("pack", session, result)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""A plan as a table, as sentences and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp_kernels.plan.formulas import Figure
from fsdp_kernels.plan.job import Job
from fsdp_kernels.plan.memory import KINDS, PASSING, STEADY, Memory
from fsdp_kernels.plan.sizes import show_bytes


def as_json(memory: Memory, smallest: int | None) -> dict[str, Any]:
    """Return one object of `--json`: all bytes are of one GPU."""
    found: dict[str, Any] = {"world": memory.world, "strategy": memory.job.strategy}
    found |= {f"{kind}_bytes": memory.nbytes(kind) for kind in KINDS}
    found |= {
        "steady_bytes": memory.steady,
        "gather_whole_bytes": memory.gather_whole.nbytes,
        "reserve_bytes": memory.job.reserve_bytes,
        "peak_bytes": memory.peak,
        "memory_bytes": memory.job.memory_bytes,
        "fits": memory.fits,
        "smallest_world": smallest,
    }
    if memory.host.nbytes:
        found["host_bytes"] = memory.host.nbytes
    if memory.first is not None:
        found["first_gpu_bytes"] = memory.first.nbytes
    return found


def as_text(memories: Sequence[Memory], smallest: int | None) -> str:
    """Return a table with a row for each kind and a column for each world."""
    job = memories[0].job
    rows = [_row(job.strategy, [f"{m.world} GPU{'s' * (m.world > 1)}" for m in memories])]
    rows += _kinds(memories, STEADY)
    rows.append(_row("steady", [show_bytes(m.steady) for m in memories]))
    rows += _kinds(memories, PASSING)
    if job.reserve_bytes:
        rows.append(_row("reserved", [show_bytes(job.reserve_bytes)] * len(memories)))
    rows.append(_row("peak", [show_bytes(m.peak) for m in memories]))
    firsts = [m.first.nbytes for m in memories if m.first]
    if firsts:
        rows.append(_row("peak of the first GPU", [show_bytes(first) for first in firsts]))
    if job.memory_bytes is not None:
        fits = ["yes" if memory.fits else "no" for memory in memories]
        rows.append(_row(f"fits in {show_bytes(job.memory_bytes)}", fits))
    if any(memory.host.nbytes for memory in memories):
        rows.append(_row("host memory", [show_bytes(m.host.nbytes) for m in memories]))
    return "\n".join([*_aligned(rows), *_sentences(memories[-1], smallest)])


def explain(memory: Memory) -> str:
    """Return every figure of a world as a formula with its numbers."""
    job = memory.job
    lines = [f"{job.strategy} on {memory.world} GPUs, each holds"]
    rows = [[kind, show_bytes(memory.nbytes(kind)), f.formula] for kind, f in _shown(memory)]
    steady = " + ".join(kind for kind in STEADY if memory.nbytes(kind))
    rows.append(["steady", show_bytes(memory.steady), steady])
    rows.append(["peak", show_bytes(memory.peak), _peak(memory)])
    if memory.first is not None:
        rows.append(["first GPU", show_bytes(memory.first.nbytes), memory.first.formula])
    if memory.host.nbytes:
        rows.append(["host", show_bytes(memory.host.nbytes), memory.host.formula])
    if job.memory_bytes is not None:
        word = "<=" if memory.fits else ">"
        verdict = f"{show_bytes(memory.largest)} {word} {show_bytes(job.memory_bytes)}"
        rows.append(["fits", "yes" if memory.fits else "no", verdict])
    name, number = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines += [f"  {a.ljust(name)}  {b.rjust(number)} = {c}" for a, b, c in rows]
    return "\n".join(lines)


def _peak(memory: Memory) -> str:
    """The terms of the peak: what stays, and the moment when most passes."""
    moment = memory.highest
    terms = ["steady", *(kind for kind in ("gather", "reduce") if memory.nbytes(kind))]
    if moment.activation:
        terms.append(f"activations {show_bytes(moment.activation)}")
    if moment.autograd:
        terms.append(f"autograd {show_bytes(moment.autograd)}")
    if moment.stepping:
        terms.append(f"stepping {show_bytes(sum(moment.stepping.values()))}")
    if memory.job.reserve_bytes:
        terms.append(f"reserved {show_bytes(memory.job.reserve_bytes)}")
    return f"{' + '.join(terms)}, at '{moment.what}'"


def _shown(memory: Memory) -> list[tuple[str, Figure]]:
    """All kinds, but for second copies and steps in backward that there are not."""
    hidden = ("params_shard", "grads_shard", "stepping")
    return [(kind, f) for kind, f in memory.figures.items() if f.nbytes or kind not in hidden]


def _row(title: str, cells: list[str]) -> list[str]:
    return [title, *cells]


def _kinds(memories: Sequence[Memory], kinds: Sequence[str]) -> list[list[str]]:
    return [
        _row(f"  {KINDS[kind]}", [show_bytes(memory.nbytes(kind)) for memory in memories])
        for kind in kinds
        if any(memory.nbytes(kind) for memory in memories)
    ]


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for title, *cells in rows:
        right = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([title.ljust(widths[0]), *right]))
    lines.insert(1, "-" * len(lines[0]))
    return lines


def _sentences(memory: Memory, smallest: int | None) -> list[str]:
    """What the table leaves open: the smallest world, and the whole model at once."""
    job, lines = memory.job, []
    if job.memory_bytes is not None:
        lines.append(f"smallest world that fits: {_smallest(job, smallest)}")
    gather, whole = memory.nbytes("gather"), memory.gather_whole.nbytes
    if 0 < gather < whole:
        lines.append(
            f"gathering unit by unit takes {show_bytes(gather)}; the whole model at once would "
            f"take {show_bytes(whole)}"
        )
    return lines


def _smallest(job: Job, smallest: int | None) -> str:
    if smallest is not None:
        return f"{smallest} GPU{'s' * (smallest > 1)}"
    if not job.shards:
        return f"none; {job.strategy} does not shard: take --strategy zero3"
    return (
        "none; try a smaller unit or batch, --checkpoint-activations, --offload optimizer, or a "
        "larger --shard"
    )

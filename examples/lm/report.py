# SPDX-License-Identifier: Apache-2.0
"""What the example tells about a training: memory by kind, and the loss curve."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_kernels.bucket_shards import Dtypes
from fsdp_kernels.plan.job import Job, PlannedBucket, PlannedUnit
from fsdp_kernels.plan.memory import Memory, plan
from fsdp_kernels.plan.model import widths_of
from fsdp_kernels.plan.sharded import planned

KINDS = {
    "params": "parameters, in the dtype of computation",
    "master": "parameters, fp32 master",
    "moments": "Adam's two moments, fp32",
    "grads": "gradients, fp32",
    "full_params": "full buckets of parameters, at most",
    "full_grads": "full buckets of gradients, at most",
}


def ddp_bytes(model: nn.Module, dtype: torch.dtype) -> dict[str, int]:
    """Compute what DistributedDataParallel holds on every rank: everything, nothing in buckets."""
    numel = sum(p.numel() for p in model.parameters())
    dtypes = Dtypes(own=torch.float32, compute=dtype, reduce=torch.float32)
    bucket = PlannedBucket(("everything",), (numel,), widths_of(dtypes))
    job = Job((PlannedUnit("", (bucket,)),), strategy="ddp")
    return by_kind(plan(job, world=1))  # the same whatever the world


def by_kind(memory: Memory) -> dict[str, int]:
    """Sort a plan's bytes as `measured_bytes` finds them: shards here, full buckets there."""
    at = memory.nbytes
    shards = {"params": at("params_shard"), "grads": at("grads_shard")}
    return {
        "params": shards["params"] or at("params"),
        "master": at("master"),
        "moments": at("optimizer"),
        "grads": shards["grads"] or at("grads"),
        "full_params": at("gather") + (at("params") if shards["params"] else 0),
        "full_grads": at("reduce") + (at("grads") if shards["grads"] else 0),
    }


def buckets_of(model: Any) -> list[Any]:
    """List the buckets of a sharded model, the root's first.

    NOTE: buckets are not part of the public interface; a training program of your own does not
    need them. They are looked at here to show how many bytes there really are.
    """
    return [bucket for unit in model.units for bucket in unit.buckets]


def comm_name(model: nn.Module) -> str:
    """Name the communication backend that a sharded model uses."""
    return str(buckets_of(model)[0].comm.name)


def planned_bytes(model: Any, accumulate: int, overlap: bool = False) -> dict[str, int]:
    """Compute what a rank of a sharded model will hold, padding included, from its layout."""
    return by_kind(planned(model, no_sync=accumulate > 1, overlap_backward=overlap))


def shared_bytes(model: nn.Module) -> int:
    """Bytes of full parameters that lie in shared memory, once for all ranks; 0: nothing does."""
    return sum(b.placed.full.numel() for b in buckets_of(model) if b.placed is not None)


def measured_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Add up the tensors that a rank of a sharded model holds. Call it before `zero_grad`."""
    buckets = buckets_of(model)
    own = [bucket for bucket in buckets if bucket.placed is None]
    shared = sum(b.placed.shard.numel() for b in buckets if b.placed is not None)
    params = [bucket.shard_params for bucket in own]
    # A view of what ranks share costs nothing, once edits are published.
    masters = [bucket.shard_master for bucket in buckets if bucket.master_view is None]
    moments = [
        value.to_local()
        for state in optimizer.state.values()
        for name, value in state.items()
        if name.startswith("exp_avg")
    ]
    pools = buckets[0].runtime.resources
    packed = buckets[0].comm.grads_nbytes if shared else 0
    return {
        "params": shared + storage_bytes(params),
        "master": storage_bytes(masters, beside=params),
        "moments": storage_bytes(moments),
        "grads": storage_bytes([b.shard_grads for b in buckets if b.shard_grads is not None]),
        "full_params": pools.params.peak_bytes,
        "full_grads": pools.grads.peak_bytes + packed,
    }


def storage_bytes(tensors: Iterable[Tensor], beside: Iterable[Tensor] = ()) -> int:
    """Add up the memory under some tensors, once where they share it, without that of others."""
    counted = {tensor.untyped_storage().data_ptr() for tensor in beside}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(nbytes for pointer, nbytes in storages.items() if pointer not in counted)


def table(columns: dict[str, dict[str, int]]) -> str:
    """Lay out bytes by kind, one column for each dictionary, and their totals."""
    rows = [["bytes per rank", *columns]]
    rows += [[text, *(f"{c[kind]:,}" for c in columns.values())] for kind, text in KINDS.items()]
    rows += [["together", *(f"{sum(c.values()):,}" for c in columns.values())]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    rule = "-" * len(lines[0])
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def draw_curve(path: Path, losses: Sequence[float], held_out: Sequence[tuple[int, float]]) -> str:
    """Draw training and held-out loss as a PNG; returns its path, or why there is none."""
    try:
        import matplotlib
    except ImportError:
        return "not drawn: install matplotlib to have it"
    matplotlib.use("agg")
    from matplotlib import pyplot

    bits = [loss / math.log(2) for loss in losses]
    around = [bits[max(0, i - 10) : i + 11] for i in range(len(bits))]
    smooth = [sum(part) / len(part) for part in around]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    steps = range(1, len(bits) + 1)
    axes.plot(steps, bits, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth, color="tab:blue", label="training")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="tab:orange", label="held-out files")
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return str(path)

# SPDX-License-Identifier: Apache-2.0
"""What operations do to a bucket's buffers, for the log of a recorded schedule.

One call for each operation, with constant arguments: it costs a function call when nobody records.
Buffers are named by what they are in the bucket; a slot of a pool has a name of its own, since
several buckets use it one after the other.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from fsdp_kernels import trace
from fsdp_kernels.streams import Place

if TYPE_CHECKING:
    from fsdp_kernels.bucket import Bucket

LEAF_GRADS = ("leaf grads",)  # of those leaves that have one
FULL_GRADS = ("full_grads",)
FULL_PARAMS = ("full_params",)
REDUCED = ("reduced",)
SHARD_GRADS = ("shard_grads",)
SHARD_MASTER = ("shard_master",)
SHARD_PARAMS = ("shard_params",)
STEPPED = ("shard_master", "shard_params", "optimizer state")
WHOLE = ("whole",)

_arrivals: weakref.WeakKeyDictionary[Bucket, dict[int, str]] = weakref.WeakKeyDictionary()
_NOTHING: tuple[str, ...] = ()


def note(
    bucket: Bucket,
    verb: str,
    reads: tuple[str, ...] = _NOTHING,
    writes: tuple[str, ...] = _NOTHING,
    place: Place | None = None,
) -> None:
    """Note an operation that was queued on the current stream.

    Args:
        bucket: Whose buffers it touches.
        verb: What it does; with the bucket it makes the label.
        reads: What it reads: constants of this module.
        writes: What it writes. Memory that is allocated or let go counts as written.
        place: The stream, where it is not the current one: memory goes back where it came from.
    """
    if trace.recorders:
        name = trace.label(verb, bucket.unit.name, bucket.index)
        stream = bucket.resources.streams.name(place)
        trace.access(name, stream, _names(bucket, reads), _names(bucket, writes))


def announce(bucket: Bucket, label: str, reads: tuple[str, ...], writes: tuple[str, ...]) -> None:
    """Say what the collective that is issued next with a label reads and writes."""
    if trace.recorders:
        trace.announce(label, _names(bucket, reads), _names(bucket, writes))


def hold(bucket: Bucket, kind: tuple[str, ...]) -> None:
    """Note that memory of a kind is held for a bucket now; ask `trace.recorders` first."""
    trace.moment("hold", f"{kind[0]}[{bucket.label}]", _nbytes(bucket, kind))


def drop(bucket: Bucket, kind: tuple[str, ...]) -> None:
    """Note that it is let go; ask `trace.recorders` first."""
    trace.moment("drop", f"{kind[0]}[{bucket.label}]", _nbytes(bucket, kind))


def _nbytes(bucket: Bucket, kind: tuple[str, ...]) -> int:
    layout, dtypes = bucket.layout, bucket.dtypes
    if kind is FULL_PARAMS:
        return layout.full_numel * dtypes.compute.itemsize
    if kind is FULL_GRADS:
        return layout.full_numel * dtypes.reduce.itemsize
    dtype = dtypes.reduce if kind is REDUCED else dtypes.own
    return layout.shard_numel * dtype.itemsize


def note_arrival(bucket: Bucket, index: int) -> None:
    """Note that autograd has left a gradient in a leaf, while somebody records."""
    stream = bucket.resources.streams.name()
    _arrivals.setdefault(bucket, {})[index] = stream
    name = trace.label("arrive", bucket.unit.name, bucket.index)
    trace.access(name, stream, writes=(_leaf_grad(bucket, index),))
    trace.moment("hold", _leaf_label(bucket, index), bucket.leaves[index].nbytes)


def note_leaf_grads_gone(bucket: Bucket) -> None:
    """Note that the memory of the leaves' gradients goes back to the streams it came from."""
    name = trace.label("let go", bucket.unit.name, bucket.index)
    for index, stream in _arrivals.pop(bucket, {}).items():
        trace.access(name, stream, writes=(_leaf_grad(bucket, index),))
        trace.moment("drop", _leaf_label(bucket, index), bucket.leaves[index].nbytes)


def _leaf_label(bucket: Bucket, index: int) -> str:
    return f"leaf_grads[{bucket.names[index]}]"


def _names(bucket: Bucket, kinds: tuple[str, ...]) -> tuple[str, ...]:
    if kinds is LEAF_GRADS:
        has_grad = (i for i, leaf in enumerate(bucket.leaves) if leaf.grad is not None)
        return tuple(_leaf_grad(bucket, i) for i in has_grad)
    return tuple(_name(bucket, kind) for kind in kinds)


def _leaf_grad(bucket: Bucket, index: int) -> str:
    return f"leaf grad[{bucket.label}.{index}]"


def _name(bucket: Bucket, kind: str) -> str:
    slot = {"full_params": bucket.slot, "full_grads": bucket.grads.slot}.get(kind)
    if slot is not None:
        return slot.name
    if kind == "shard_params" and bucket.shard_params is bucket.shard_master:
        kind = "shard_master"
    generation = {
        "shard_grads": bucket.grads.generation,
        "reduced": bucket.grads.target_generation,
    }.get(kind)
    if generation:
        return f"shard_grads[{bucket.label}]#{generation}"
    return f"{kind}[{bucket.label}]"

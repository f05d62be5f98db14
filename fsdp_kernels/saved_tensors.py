# SPDX-License-Identifier: Apache-2.0
"""Backward's guarantee: whoever unpacks a saved weight gets the gathered weight.

While a unit's forward runs, this pair of saved-tensor hooks replaces every saved view of a full
buffer by its geometry. The graph then holds no parameter memory, and unpacking asks the unit to be
full and rebuilds the view. All other tensors go to the hook pair outside ours: torch calls only the
innermost one, so without that activation checkpointing or `save_on_cpu` around a unit would be
silently off. Hooks also switch off autograd's own check that a saved tensor was not changed since,
so it is made here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor

from fsdp_kernels.bucket import Bucket

if TYPE_CHECKING:
    from fsdp_kernels.runtime import Runtime
    from fsdp_kernels.unit import Unit

_PackPair = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class _SavedView:
    """A view of a full buffer: bucket, geometry, and the versions that it was saved under."""

    __slots__ = (
        "bucket",
        "dtype",
        "index",
        "leaf_version",
        "offset",
        "size",
        "stride",
        "version",
        "wanted",
    )

    def __init__(self, bucket: Bucket, view: Tensor) -> None:
        self.bucket = bucket
        self.wanted = bucket.wanted
        self.dtype = view.dtype
        self.size = view.size()
        self.stride = view.stride()
        self.offset = view.storage_offset()
        at = self.offset * view.dtype.itemsize // bucket.compute_dtype.itemsize
        self.index = max(bisect_right(bucket.grads.starts, at) - 1, 0)
        self.version = bucket.version
        self.leaf_version = bucket.leaves[self.index]._version

    def check(self) -> None:
        """Raise as plain torch does when a saved weight was changed before its backward."""
        bucket = self.bucket
        if (
            bucket.version != self.version
            or bucket.leaves[self.index]._version != self.leaf_version
        ):
            raise RuntimeError(
                f"parameter '{bucket.names[self.index]}': expected it unchanged between forward "
                "and backward, got an in-place change (an edit, a load or an optimizer step). "
                "Run backward before changing parameters."
            )

    def rebuild(self) -> Tensor:
        """The same view, of wherever the unit is gathered now."""
        bucket = self.bucket
        full = bucket.full_params if self.dtype == bucket.compute_dtype else None
        if full is None:
            full = bucket.slot_view(self.dtype)
        return full.as_strided(self.size, self.stride, self.offset)


_Kept = tuple[Tensor, int]
"""A tensor that is no parameter, with the version that it was saved under: most saved tensors."""


def _refuse_changed(tensor: Tensor, version: int) -> NoReturn:
    """Raise for a tensor that was changed; the message has the words of torch's own check."""
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; "
        f"expected version {version} instead. Do not change a tensor in place that backward still "
        "needs."
    )


class _Passed:
    """What the hook pair outside ours made of a tensor."""

    __slots__ = ("payload", "unpack")

    def __init__(self, outer: _PackPair, tensor: Tensor) -> None:
        self.payload = outer[0](tensor)
        self.unpack = outer[1]


class SavedTensors:
    """One pair of hooks: what it does not know goes to the pair that was innermost before it."""

    __slots__ = ("_outer", "_runtime")

    def __init__(self, runtime: Runtime, outer: _PackPair | None) -> None:
        self._runtime = runtime
        self._outer = outer

    def pack(self, tensor: Tensor) -> Any:
        """Called by autograd for each tensor that an operation saves."""
        runtime = self._runtime
        runtime.saved += 1
        bucket = runtime.gathers.owner_of(tensor)
        if bucket is not None:
            bucket.unit.packed += 1
            return _SavedView(bucket, tensor)
        if self._outer is not None:
            return _Passed(self._outer, tensor)
        # An operation that saves its own output hands it over with its graph node: kept as it is,
        # node and tensor would own each other for ever. A detached alias has the same version
        # counter, and autograd gives the node back on unpacking.
        kept: _Kept = (tensor if tensor.is_leaf else tensor.detach(), tensor._version)
        return kept

    def unpack(self, saved: Any) -> Tensor:
        """Called by autograd when the operation's backward needs the tensor."""
        kind = type(saved)
        if kind is tuple:
            tensor, version = cast(_Kept, saved)
            if tensor._version != version:
                _refuse_changed(tensor, version)
            return tensor
        if kind is _SavedView:
            saved.check()
            unit: Unit = saved.bucket.unit
            # NOTE: not our runtime: an ancestor may have been sharded since, and taken the unit.
            return unit.runtime.backward.read(unit, saved.rebuild)
        return saved.unpack(saved.payload)  # type: ignore[no-any-return]


def is_innermost() -> bool:
    """Whether the innermost pair of hooks is one of ours."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and isinstance(getattr(top[0], "__self__", None), SavedTensors)


def push(runtime: Runtime) -> bool:
    """Make our pair the innermost one, unless it is already; whether `pop` is due."""
    if is_innermost():
        return False
    hooks = SavedTensors(runtime, torch._C._autograd._top_saved_tensors_default_hooks(True))
    torch._C._autograd._push_saved_tensors_default_hooks(hooks.pack, hooks.unpack)
    return True


def pop() -> None:
    """Undo one `push` that returned True."""
    torch._C._autograd._pop_saved_tensors_default_hooks()

# SPDX-License-Identifier: Apache-2.0
"""Logs every torch operation on a sharded model's buffers, from the dispatcher.

The runtime notes what it does itself. What a module's forward and backward do with gathered weights
it cannot see, only when they begin and end. Here each operation is an access of its own, on the
stream that is current then, found by the address of its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_kernels import trace
from fsdp_kernels.flat_shard import FlatShard
from fsdp_kernels.runtime import Runtime

_SHAPE_ONLY = {"new_empty", "empty_like", "new_zeros", "zeros_like", "ones_like", "full_like"}


class WatchedOps(TorchDispatchMode):
    """Logs operations on the buffers of a runtime.

    Args:
        runtime: Whose buffers.
        stream: Returns the current stream's name.
    """

    def __init__(self, runtime: Runtime, stream: Callable[[], str]) -> None:
        super().__init__()
        self._runtime = runtime
        self._stream = stream
        self.paused = False
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.paused and not func.is_view and _name(func) not in _SHAPE_ONLY:
            self._log(func, args, kwargs)
        return func(*args, **kwargs)

    def _log(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = dict(self._names())
        reads = _found(names, (args, kwargs))
        writes: list[str] = []
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                operand = args[i] if i < len(args) else kwargs.get(argument.name)
                writes += _found(names, operand)
        if reads or writes:
            self.seen.update(name.split("[")[0].rstrip(" 0123456789") for name in reads)
            trace.access(_name(func), self._stream(), tuple(reads), tuple(writes))

    def _names(self) -> Iterator[tuple[int, str]]:
        """The names of buffers by address, as the runtime's own notes call them."""
        for pool in (self._runtime.resources.params, self._runtime.resources.grads):
            for slot in (*pool._used, *pool._free, *(held.slot for held in pool._held)):
                yield slot.pointer, slot.name
        for bucket in self._runtime.buckets:
            grads = bucket.grads
            yield _address(bucket.shard_params), f"shard_params[{bucket.label}]"
            yield _address(bucket.shard_master), f"shard_master[{bucket.label}]"
            if grads.target is not None:
                yield _address(grads.target), f"reduced[{bucket.label}]"
            if grads.shard_grads is not None:
                name = f"shard_grads[{bucket.label}]#{grads.generation}"
                yield _address(grads.shard_grads), name


def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


def _found(names: dict[int, str], operands: Any) -> list[str]:
    tensors = [leaf for leaf in tree_leaves(operands) if isinstance(leaf, Tensor)]
    return list(dict.fromkeys(names[a] for a in map(_address, tensors) if a in names))


def _address(tensor: Tensor) -> int:
    if isinstance(tensor, FlatShard):
        tensor = tensor._local
    if tensor.layout is not torch.strided or not tensor.numel():
        return 0
    return tensor.untyped_storage().data_ptr()

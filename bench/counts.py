# SPDX-License-Identifier: Apache-2.0
"""Counts what a step launches, and the bytes that it reads and writes: no clock, so no noise.

An operator that torch dispatches is one launch, as on a GPU (views and empty tensors are none); it
reads its operands and writes its results, each once. A kernel of ours is one launch, and what it
must read and write follows from its arguments. So the counts are the same on every machine; caches
and what an operator does inside itself do not enter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_kernels import _ext, ops
from triton_ops import AdamShard, FragmentTable


@dataclass
class Counts:
    """What was counted.

    Attributes:
        launches: Operators and kernels.
        nbytes: Read plus written.
        by_name: Launches by operator or kernel.
        bytes_by_name: Bytes by operator or kernel.
    """

    launches: int = 0
    nbytes: int = 0
    by_name: Counter[str] = field(default_factory=Counter)
    bytes_by_name: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, nbytes: int) -> None:
        self.launches += 1
        self.nbytes += nbytes
        self.by_name[name] += 1
        self.bytes_by_name[name] += nbytes


@contextmanager
def counting() -> Iterator[Counts]:
    """Count what runs inside."""
    counts = Counts()
    with ExitStack() as stack:
        operators = stack.enter_context(_Operators(counts))
        for name, cost in KERNELS.items():
            counted = _kernel(name, getattr(ops, name), cost, operators)
            stack.enter_context(mock.patch.object(ops, name, counted))
        yield counts


def count(run: Callable[[], object]) -> Counts:
    """Call once, and count."""
    with counting() as counts:
        run()
    return counts


def _covered(table: FragmentTable) -> int:
    return sum(table.stops) - sum(table.starts)


def _pack(
    grads: Sequence[Tensor | None], starts: Any, out: Tensor, *, accumulate: bool = False
) -> int:
    read = sum(grad.nbytes for grad in grads if grad is not None)
    return read + out.nbytes * (1 + accumulate)


def _norm(grads: Tensor, table: FragmentTable) -> int:
    return _covered(table) * grads.element_size()


def _adam_coefs(
    hyper: Tensor, step: Tensor, used: Tensor, skip: Any, out: Tensor, **how: Any
) -> int:
    return hyper.nbytes + 2 * step.nbytes + used.nbytes + out.nbytes


def _adam(shard: AdamShard, table: FragmentTable, *args: Any, **how: Any) -> int:
    """State is read and written, gradients are read, parameters written."""
    each = sum(
        tensor.element_size() * (1 if name in ("grads", "params") else 2)
        for name, tensor in shard.named().items()
    )
    return each * _covered(table)


def _reduce(
    peers: Sequence[Tensor], out: Tensor, *, table: Any = None, accumulate: bool = False
) -> int:
    return sum(peer.nbytes for peer in peers) + out.nbytes * (1 + accumulate)


def _reduce_adam(
    peers: Sequence[Tensor],
    shard: AdamShard,
    table: FragmentTable,
    *args: Any,
    publish: Sequence[Tensor] = (),
    **how: Any,
) -> int:
    state = [tensor for name, tensor in shard.named().items() if name not in ("grads", "params")]
    copies = [*publish] if shard.params is None else [shard.params, *publish]
    each = sum(2 * tensor.element_size() for tensor in state)
    each += sum(tensor.element_size() for tensor in (*peers, *copies))
    return each * _covered(table)


KERNELS: dict[str, Callable[..., int]] = {
    "pack": _pack,
    "norm": _norm,
    "adam_coefs": _adam_coefs,
    "adam": _adam,
    "reduce": _reduce,
    "reduce_adam": _reduce_adam,
}
"""The bytes that each kernel must read and write, from its arguments."""


def _kernel(
    name: str, run: Callable[..., Any], cost: Callable[..., int], operators: _Operators
) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        if not first.is_cuda and _ext.cpu() is None:
            return run(*args, **kwargs)  # the reference is operators of torch
        operators.counts.add(name, cost(*args, **kwargs))
        # On the host an operator inside only wraps a result; on a device it is a launch.
        outer, operators.paused = operators.paused, not first.is_cuda
        try:
            return run(*args, **kwargs)
        finally:
            operators.paused = outer

    return counted


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, counts: Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, Parameter) for kind in types):
            return NotImplemented  # sharded tensors dispatch again, to the operators inside
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if not self.paused and not func.is_view and name not in _NOTHING:
            self.counts.add(name, _bytes(func, name, args, kwargs, result))
        return result


_NOTHING = {
    *("detach", "alias", "lift_fresh", "_unsafe_view", "set_", "resize_"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
}
_WRITE_ONLY = {"copy_", "_foreach_copy_", "zero_", "_foreach_zero_", "fill_", "new_zeros"}
_SHAPE_ONLY = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}


def _bytes(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> int:
    """Add up the bytes that an operator reads and writes."""
    if "::" in name and name.startswith(("c10d", "_c10d")):
        return 0  # what is sent is counted elsewhere
    read = written = 0
    for i, argument in enumerate(func._schema.arguments):
        nbytes = _nbytes(args[i] if i < len(args) else kwargs.get(argument.name))
        writes = argument.alias_info is not None and argument.alias_info.is_write
        # Declared as written for unscaling, which nobody asks for here.
        writes = writes and not (name.startswith("_fused_adam") and argument.name == "grads")
        written += nbytes if writes else 0
        if not argument.is_out and not (writes and name in _WRITE_ONLY) and name not in _SHAPE_ONLY:
            read += nbytes
    fresh = all(value.alias_info is None for value in func._schema.returns)
    return read + written + (_nbytes(result) if fresh else 0)


def _nbytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))

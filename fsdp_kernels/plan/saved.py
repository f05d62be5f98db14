# SPDX-License-Identifier: Apache-2.0
"""What a forward keeps for its backward, counted without memory or arithmetic.

The model runs once on fake tensors (`FakeTensorMode`), which have shapes and storages but no data.
A saved-tensor hook sees what autograd keeps: each storage counts once, for the unit that saved it
first; parameters do not count. What a caller holds, the output, counts too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only


@dataclass(slots=True)
class Saved:
    """What one unit's forward keeps, as storages with their bytes.

    Attributes:
        storages: What autograd saved while the unit ran, and nothing before it had.
        inputs: What the unit was called with.
    """

    storages: dict[int, int] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)


def run(
    model: nn.Module,
    units: list[nn.Module],
    call: Callable[[nn.Module], Any],
    compute: torch.dtype | None,
) -> tuple[dict[nn.Module, Saved], list[nn.Module]]:
    """Run a forward on fake tensors.

    Args:
        model: With fake parameters; they are cast to `compute`.
        units: The model first.
        call: Runs the model's forward; called in the fake mode that made the model.
        compute: The dtype that units' inputs are cast to; None: they stay.

    Returns:
        What each unit keeps, and the units in the order in which they ran.
    """
    found = {unit: Saved() for unit in units}
    order: list[nn.Module] = []
    stack: list[nn.Module] = []
    known = {_key(tensor) for tensor in (*model.parameters(), *model.buffers())}
    held: list[Tensor] = []  # a storage that is gone would give its number to another

    def note(tensor: Tensor, where: dict[int, int]) -> None:
        key = _key(tensor)
        if key not in known:
            known.add(key)
            held.append(tensor)
            where[key] = tensor.untyped_storage().nbytes()

    def pack(tensor: Tensor) -> Tensor:
        note(tensor, found[stack[-1] if stack else model].storages)
        return tensor

    def enter(unit: nn.Module, args: Any, kwargs: Any) -> Any:
        if unit not in order:
            order.append(unit)
        stack.append(unit)
        if compute is not None:
            args, kwargs = _cast((args, kwargs), compute)
        if unit is not model:
            for tensor in _tensors((args, kwargs)):
                held.append(tensor)
                found[unit].inputs[_key(tensor)] = tensor.untyped_storage().nbytes()
        return args, kwargs

    def leave(*_: Any) -> None:
        stack.pop()

    with _hooked(units, enter, leave), saved_tensors_hooks(pack, lambda packed: packed):
        for tensor in _tensors(call(model)):
            note(tensor, found[model].storages)
    parameters = {_key(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for saved in found.values():
        for key in parameters & saved.inputs.keys():
            del saved.inputs[key]
    return found, order


@contextmanager
def _hooked(units: list[nn.Module], enter: Any, leave: Any) -> Iterator[None]:
    handles = []
    for unit in units:
        handles.append(unit.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(unit.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> list[Tensor]:
    if hasattr(tree, "__dict__") and not isinstance(tree, (dict, Tensor)):
        tree = vars(tree)
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, cast, tree)

# SPDX-License-Identifier: Apache-2.0
"""An optimizer's state by parameter name, so that it can be stored and given back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_kernels._sharded_adam import ShardedAdamBase
from fsdp_kernels.flat_shard import FlatShard

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True)
class NamedState:
    """What an optimizer holds.

    Attributes:
        sharded: Parameter name to key to `FlatShard`.
        values: Parameter name to key to everything else, such as step counts; tensors are copies.
        groups: Hyper-parameters of each group; "params" are names.
    """

    sharded: dict[str, dict[str, FlatShard]]
    values: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, optimizer: Optimizer, names: Mapping[Tensor, str], where: str) -> NamedState:
        """Read an optimizer of any class.

        Raises:
            ValueError: If it has a parameter without a name.
        """
        sharded: dict[str, dict[str, FlatShard]] = {}
        values: dict[str, dict[str, Any]] = {}
        groups = []
        for group in optimizer.param_groups:
            own = [_name(p, names, where) for p in group["params"]]
            groups.append({k: v for k, v in group.items() if k != "params"} | {"params": own})
            for p, name in zip(group["params"], own, strict=True):
                for key, value in optimizer.state.get(p, {}).items():
                    if isinstance(value, FlatShard):
                        sharded.setdefault(name, {})[key] = value
                    else:
                        copy = value.detach().cpu().clone() if isinstance(value, Tensor) else value
                        values.setdefault(name, {})[key] = copy
        return cls(sharded, values, groups)


def _name(p: Tensor, names: Mapping[Tensor, str], where: str) -> str:
    name = names.get(p)
    if name is None:
        raise ValueError(
            f"{where}: expected an optimizer of this model's parameters, got one with another of "
            f"shape {tuple(p.shape)}. Pass the model and its own optimizer."
        )
    return name


def unfit(
    optimizer: Optimizer, names: Mapping[Tensor, str], saved: list[dict[str, Any]], where: str
) -> str | None:
    """Say why the saved groups do not fit the optimizer's, or None."""
    groups = [[_name(p, names, where) for p in g["params"]] for g in optimizer.param_groups]
    if len(groups) != len(saved):
        return (
            f"{where}: expected {len(saved)} parameter groups, as were saved, got "
            f"{len(groups)}. Build it with the same groups."
        )
    for number, (own, group) in enumerate(zip(groups, saved, strict=True)):
        differ = sorted(set(own) ^ set(group["params"]))
        if differ:
            return (
                f"{where}: expected group {number} with the parameters that were saved, got one "
                f"that differs in {', '.join(differ[:8])}. Build it with the same groups."
            )
    return None


def targets(
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    saved: Mapping[str, Mapping[str, torch.dtype]],
) -> dict[str, dict[str, FlatShard]]:
    """Return the tensors to load sharded state into: where it will live, if that can be.

    Args:
        optimizer: Its state may not exist yet.
        names: Names of the model's tensors.
        saved: Parameter name to key to dtype.
    """
    params = {names[p]: p for group in optimizer.param_groups for p in group["params"]}
    if isinstance(optimizer, ShardedAdamBase):
        optimizer.materialise(params[name] for name in saved)
    found: dict[str, dict[str, FlatShard]] = {}
    for name, keys in saved.items():
        p = params[name]
        assert isinstance(p, FlatShard)  # only sharded parameters have sharded state
        for key, dtype in keys.items():
            held = optimizer.state.get(p, {}).get(key)
            if not isinstance(held, FlatShard) or held.dtype != dtype:
                held = FlatShard.like(p, torch.empty_like(p.to_local(), dtype=dtype))
            found.setdefault(name, {})[key] = held
    return found


def restore(optimizer: Optimizer, names: Mapping[Tensor, str], state: NamedState) -> None:
    """Give an optimizer a state back, hyper-parameters included."""
    entries: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    first = 0
    for group, saved in zip(optimizer.param_groups, state.groups, strict=True):
        indices = list(range(first, first + len(group["params"])))
        first += len(indices)
        groups.append({k: v for k, v in saved.items() if k != "params"} | {"params": indices})
        for index, p in zip(indices, group["params"], strict=True):
            name = names[p]
            entry = {**state.values.get(name, {}), **state.sharded.get(name, {})}
            if entry:
                entries[index] = entry
    optimizer.load_state_dict({"state": entries, "param_groups": groups})

# SPDX-License-Identifier: Apache-2.0
"""Checks of the sharded optimizers' hyper-parameters, and of the states that they load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import chain
from numbers import Real
from typing import Any

from torch import Tensor

from fsdp_kernels.flat_shard import FlatShard

# What torch.optim keeps in its groups to choose an implementation; ours has one.
_TORCH_ONLY = ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")
_REQUIRED = ("step", "exp_avg", "exp_avg_sq")
# Arguments of the whole optimizer; in a group they would be kept and never read.
_WHOLE = ("max_grad_norm", "overlap_backward", "master_weights")
_NOT_BELOW_0 = {
    "lr": "Pass maximize=True to ascend.",
    "eps": "The default is 1e-8.",
    "weight_decay": "0 is no decay.",
}
_FLAT = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")


def check_hyper(where: str, hyper: Mapping[str, Any]) -> None:
    """Raise unless every hyper-parameter of a group is in range.

    Args:
        where: The optimizer's name.
        hyper: The group, with the defaults of what it leaves out.

    Raises:
        TypeError: A setting that is not a number.
        ValueError: One out of range, or of the whole optimizer and not of a group.
    """
    lr, betas = hyper["lr"], hyper["betas"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(
            f"{where}: expected lr to be a number or a tensor of one element, got shape "
            f"{tuple(lr.shape)}. Use one parameter group for each learning rate."
        )
    if not isinstance(betas, Sequence) or not all(map(_is_number, betas)):
        raise TypeError(
            f"{where}: expected betas to be two numbers, got {betas!r}. "
            "The default is (0.9, 0.999)."
        )
    if len(betas) != 2 or not all(0.0 <= float(beta) < 1.0 for beta in betas):
        raise ValueError(
            f"{where}: expected betas to be two numbers in [0, 1), got {betas}. "
            "The default is (0.9, 0.999)."
        )
    for name, advice in _NOT_BELOW_0.items():
        if not _is_number(hyper[name]):
            raise TypeError(
                f"{where}: expected {name} to be a number, got {hyper[name]!r}. "
                "Convert it first, as in float(text)."
            )
        if not float(hyper[name]) >= 0.0:
            raise ValueError(f"{where}: expected {name} of at least 0, got {hyper[name]}. {advice}")
    for name in _WHOLE:
        if name in hyper:
            raise ValueError(
                f"{where}: expected {name} to be the optimizer's own argument, got it in a "
                f"parameter group, where nothing reads it. Pass {where}(..., {name}=...)."
            )


def check_flags(where: str, flags: Mapping[str, Any]) -> None:
    """Raise TypeError, naming one, unless all of an optimizer's switches are True or False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{where}: expected {name} to be True or False, got {value!r}.")


def check_max_norm(where: str, max_grad_norm: Any) -> None:
    """Raise TypeError or ValueError unless the norm to clip to is None or a number above 0."""
    if max_grad_norm is None:
        return
    text = (
        f"{where}: expected max_grad_norm above 0, got {max_grad_norm!r}. "
        "Pass None for no clipping."
    )
    if not _is_number(max_grad_norm):
        raise TypeError(text)
    if not float(max_grad_norm) > 0.0:
        raise ValueError(text)


def _is_number(value: object) -> bool:
    return isinstance(value, (Real, Tensor))


def matching_groups(
    where: str,
    saved: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    defaults: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Return new parameter groups: the saved hyper-parameters with our parameters.

    Args:
        where: The optimizer's name.
        saved: `state_dict["param_groups"]`.
        groups: The optimizer's groups.
        defaults: What a saved group lacks.

    Raises:
        ValueError: If the groups are not of the same lengths.
    """
    wanted, got = [len(g["params"]) for g in groups], [len(g["params"]) for g in saved]
    if wanted != got:
        raise ValueError(
            f"{where}: expected groups of {wanted} parameters, got {got}. "
            "Build the optimizer with the same groups as when the state was saved."
        )
    merged = []
    for new, own in zip(saved, groups, strict=True):
        kept = {k: deepcopy(v) for k, v in new.items() if k not in (*_TORCH_ONLY, "params")}
        names = {"param_names": own["param_names"]} if "param_names" in own else {}
        merged.append({**defaults, **names, **kept, "params": own["params"]})
    return merged


def matching_entries(
    where: str, state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> dict[FlatShard, dict[str, Any]]:
    """Return the saved state by parameter, each tensor as this rank's fragment.

    Args:
        where: The optimizer's name.
        state_dict: Its groups have the lengths of `groups`.
        groups: The groups as they will be, with sharded parameters.

    Raises:
        ValueError: If a tensor is missing or has another shape.
    """
    keys = chain.from_iterable(g["params"] for g in state_dict["param_groups"])
    owners = [(p, g) for g in groups for p in g["params"]]
    by_key = dict(zip(keys, owners, strict=True))
    entries = {}
    for key, entry in state_dict["state"].items():
        if key in by_key and entry:
            p, group = by_key[key]
            entries[p] = _fragments(f"{where}: state {key}", p, entry, group)
    return entries


def _fragments(
    where: str, p: FlatShard, entry: Mapping[str, Any], group: Mapping[str, Any]
) -> dict[str, Any]:
    required = (*_REQUIRED, "max_exp_avg_sq") if group["amsgrad"] else _REQUIRED
    for name in required:
        if name not in entry:
            raise ValueError(
                f"{where}: expected {', '.join(required)}, got no {name}. "
                "Load the state of an Adam or AdamW with the same amsgrad."
            )
    parts = {
        name: fragment_of(p, entry[name], f"{where}, {name}") for name in _FLAT if name in entry
    }
    return {"step": entry["step"], **parts}


def fragment_of(p: FlatShard, value: object, where: str) -> Tensor:
    """Return this rank's 1-D part of a state tensor of parameter p.

    Args:
        p: The parameter.
        value: A `FlatShard` of the same geometry, or a tensor of the whole parameter's shape.
        where: Names the entry in errors.

    Raises:
        ValueError: On anything else.
    """
    if isinstance(value, Tensor) and value.shape == p.shape:
        if not isinstance(value, FlatShard):
            return value.detach().reshape(-1)[p.fragment.start : p.fragment.stop]
        span = (value.fragment.start, value.fragment.stop)
        if span == (p.fragment.start, p.fragment.stop):
            return value.to_local().detach()
        raise ValueError(
            f"{where}: expected elements {(p.fragment.start, p.fragment.stop)} of the parameter, "
            f"got {span}. Load it through fsdp_kernels.checkpoint, or pass full tensors."
        )
    got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise ValueError(
        f"{where}: expected a tensor of shape {tuple(p.shape)}, got {got}. "
        "Load the state of the same model."
    )

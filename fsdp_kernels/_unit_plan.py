# SPDX-License-Identifier: Apache-2.0
"""What `fully_shard` will do: who becomes a unit, who owns which parameter, and what is refused.

Everything here only looks; nothing is changed before all of it has passed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from fsdp_kernels.flat_shard import FlatShard
from fsdp_kernels.unit import Unit

UnitSpec = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool] | int | None


@dataclass
class Entry:
    """One parameter to be sharded: its first name, and every place where it is registered."""

    name: str
    param: nn.Parameter
    sites: list[tuple[nn.Module, str]] = field(default_factory=list)


@dataclass
class Plan:
    """What `fully_shard` will do; made and checked before anything is changed."""

    where: str
    owners: dict[nn.Module, list[Entry]]
    device: torch.device

    def described(self) -> list[str]:
        """Return a line for each parameter: its unit's number, and what makes its bucket."""
        return [
            f"'{entry.name}' {tuple(param.shape)} {param.dtype}, requires_grad="
            f"{param.requires_grad}, in unit {number}"
            for number, entries in enumerate(self.owners.values())
            for entry in entries
            for param in (entry.param,)
        ]


def find_units(module: nn.Module) -> list[Unit]:
    """The units of a module and below, outermost first."""
    return [m.__dict__["_fk_unit"] for m in module.modules() if "_fk_unit" in m.__dict__]


# -- who becomes a unit ---------------------------------------------------------------------------


def _choose(where: str, root: nn.Module, spec: UnitSpec) -> set[nn.Module]:
    """The modules that become units now, the root included; never one that was sharded before."""
    if spec is None:
        return {root}
    if isinstance(spec, int) and not isinstance(spec, bool):
        return {root} | _by_numel(where, root, spec)
    matches: Callable[[nn.Module], bool]
    if isinstance(spec, type) or (
        isinstance(spec, tuple) and all(isinstance(c, type) for c in spec)
    ):
        classes = spec

        def matches(module: nn.Module) -> bool:
            return isinstance(module, classes)
    elif callable(spec):
        matches = spec
    else:
        raise TypeError(
            f"{where}: expected units to be None, a class, a tuple of classes, a predicate or a "
            f"number of parameters, got {spec!r}."
        )
    # Attention reads its children's weights without calling them: they cannot be units.
    inside_attention = {
        child
        for module in root.modules()
        if isinstance(module, nn.MultiheadAttention)
        for child in module.children()
    }
    chosen = {
        m
        for m in root.modules()
        if m is not root
        and "_fk_unit" not in m.__dict__
        and m not in inside_attention
        and matches(m)
    }
    for module in chosen:
        if type(module).forward is nn.Module.forward:
            raise ValueError(
                f"{where}: expected units with a forward, got {type(module).__name__}, which is "
                "never called. Choose the modules inside it."
            )
    if not chosen and isinstance(spec, (type, tuple)):
        raise ValueError(
            f"{where}: expected a submodule of class {spec}, got none. Check `units`, or pass None."
        )
    return {root} | chosen


def _by_numel(where: str, root: nn.Module, least: int) -> set[nn.Module]:
    if least < 1:
        raise ValueError(f"{where}: expected units to be at least 1 parameter, got {least}.")
    chosen: set[nn.Module] = set()

    def left(module: nn.Module) -> int:
        """Parameters of a subtree that no chosen unit has taken."""
        if "_fk_unit" in module.__dict__:
            return 0
        calls_children = not isinstance(module, nn.MultiheadAttention)
        below = [left(child) if calls_children else _numel(child) for child in module.children()]
        own = sum(p.numel() for p in module.parameters(recurse=False)) + sum(below)
        callable_ = type(module).forward is not nn.Module.forward
        if module is not root and callable_ and own >= least:
            chosen.add(module)
            return 0
        return own

    left(root)
    return chosen


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# -- who owns which parameter ---------------------------------------------------------------------


def plan_units(
    where: str,
    root: nn.Module,
    spec: UnitSpec,
    *,
    check: Callable[[str, Entry], None] | None = None,
) -> Plan:
    """Decide units and owners; refuse what cannot be sharded before anything is changed.

    Args:
        where: Begins every message.
        root: The module.
        spec: See `fully_shard`.
        check: Refuses a parameter; None: `check_kind`, and everything that a swap needs.
    """
    chosen = _choose(where, root, spec)
    entries: dict[int, Entry] = {}
    chains: dict[int, list[list[nn.Module]]] = {}

    def walk(module: nn.Module, path: str, chain: list[nn.Module]) -> None:
        if module in chosen or "_fk_unit" in module.__dict__:
            chain = [*chain, module]
        for name, param in module._parameters.items():
            if param is None:
                continue
            full_name = f"{path}.{name}" if path else name
            entry = entries.setdefault(id(param), Entry(full_name, param))
            entry.sites.append((module, name))
            chains.setdefault(id(param), []).append(chain)
        for name, child in module._modules.items():
            if child is not None:
                walk(child, f"{path}.{name}" if path else name, chain)

    walk(root, "", [])
    with _rnn_references_dropped(root):
        plan = _assign(where, root, chosen, entries, chains)
        for entry in (entry for found in plan.owners.values() for entry in found):
            (check or _check)(where, entry)
        return plan


def _assign(
    where: str,
    root: nn.Module,
    chosen: set[nn.Module],
    entries: dict[int, Entry],
    chains: dict[int, list[list[nn.Module]]],
) -> Plan:
    owners: dict[nn.Module, list[Entry]] = {m: [] for m in root.modules() if m in chosen}
    for key, entry in entries.items():
        owner = _common(chains[key])
        if isinstance(entry.param, FlatShard):
            _check_shared_outside(where, entry, owner)
            continue
        owners[owner].append(entry)
    fresh = [entry for found in owners.values() for entry in found]
    return Plan(where, owners, _one_device(where, fresh))


@contextmanager
def _rnn_references_dropped(root: nn.Module) -> Iterator[None]:
    """Drop the weak references that nn.RNNBase keeps to its weights, for good if all goes well.

    It compares them with its attributes to find replaced weights; units keep its list in step.
    """
    rnns = [m for m in root.modules() if isinstance(m, nn.RNNBase)]
    for rnn in rnns:
        rnn._flat_weight_refs = [None] * len(rnn._flat_weights_names)
    try:
        yield
    except BaseException:
        for rnn in rnns:
            rnn._flat_weight_refs = [
                None if weight is None else weakref.ref(weight) for weight in rnn._flat_weights
            ]
        raise


def _common(chains: list[list[nn.Module]]) -> nn.Module:
    """The innermost unit that contains every use of a shared weight."""
    common = chains[0]
    for chain in chains[1:]:
        length = next(
            (i for i, (a, b) in enumerate(zip(common, chain, strict=False)) if a is not b),
            min(len(common), len(chain)),
        )
        common = common[:length]
    return common[-1]


def _check_shared_outside(where: str, entry: Entry, owner: nn.Module) -> None:
    holder = entry.param.bucket.unit  # type: ignore[attr-defined]
    if holder.module is not owner:
        raise ValueError(
            f"{where}: parameter '{entry.name}': expected a parameter that is used in one unit, "
            f"got one that unit '{holder.label}', sharded before, shares with modules outside it. "
            "Shard both with one fully_shard(..., units=...) call, which gives it to their "
            "closest common ancestor."
        )


def check_kind(where: str, entry: Entry) -> None:
    """Refuse a parameter of a kind that cannot be sharded, whether it has data or not."""
    param = entry.param
    problem = None
    if isinstance(param, UninitializedParameter):
        problem = "an initialised parameter, got a lazy one. Run one forward first"
    elif param.layout is not torch.strided:
        problem = f"a dense parameter, got layout {param.layout}"
    elif param.is_complex():
        problem = f"a real parameter, got {param.dtype}. Store it as real (torch.view_as_real)"
    if problem is not None:
        raise ValueError(f"{where}: parameter '{entry.name}': expected {problem}.")
    for module, _ in entry.sites:
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ValueError(
                f"{where}: parameter '{entry.name}': expected dense gradients, got sparse=True. "
                "Build the embedding with sparse=False."
            )


def _check(where: str, entry: Entry) -> None:
    param = entry.param
    problem = None
    if type(param) not in (nn.Parameter, Tensor, UninitializedParameter):
        problem = (
            f"a plain nn.Parameter, got {type(param).__name__}. Shard before any other wrapper"
        )
    elif param.is_meta and not isinstance(param, UninitializedParameter):
        problem = "a parameter with data, got one on meta. Call to_empty() and initialise first"
    elif not param.is_leaf:
        problem = "a leaf, got the result of an operation"
    elif param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
        problem = (
            "no gradient hooks, got some: gradients never pass through the sharded parameter. "
            "Remove them, and change p.grad after backward instead"
        )
    elif weakref.getweakrefs(param):
        problem = "no weak references to it, got some: they would go stale. Drop them first"
    elif param.grad is not None:
        problem = "no gradient yet, got one. Call zero_grad() first"
    if problem is not None:
        raise ValueError(f"{where}: parameter '{entry.name}': expected {problem}.")
    check_kind(where, entry)
    _check_swappable(where, entry)


def _check_swappable(where: str, entry: Entry) -> None:
    """What `swap_tensors` would refuse half-way: live views of the parameter."""
    uses = entry.param._use_count()  # type: ignore[attr-defined]
    if uses > 2:
        raise ValueError(
            f"{where}: parameter '{entry.name}': expected no live views of it or graphs that use "
            f"it, got {uses - 1}. Delete them (outputs of an earlier forward, detached aliases) "
            "first."
        )


def _one_device(where: str, entries: list[Entry]) -> torch.device:
    devices = {entry.param.device: entry.name for entry in entries}
    if len(devices) > 1:
        listed = ", ".join(f"'{name}' on {device}" for device, name in devices.items())
        raise ValueError(
            f"{where}: expected parameters on one device, got {listed}. Move them first."
        )
    return next(iter(devices), torch.device("cpu"))

# SPDX-License-Identifier: Apache-2.0
"""`fully_shard` and the mixin that it adds to a module's class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.utils._pytree import tree_map_only

from fsdp_kernels._environment import note_comm
from fsdp_kernels._unit_plan import Plan, UnitSpec, find_units, plan_units
from fsdp_kernels._wrap import Options, build_units, pick_comm, sync_buffers
from fsdp_kernels.comm.base import Comm
from fsdp_kernels.flat_shard import FlatShard
from fsdp_kernels.full_params import open_full_params
from fsdp_kernels.runtime import Runtime
from fsdp_kernels.strategy import STRATEGIES
from fsdp_kernels.unit import Unit

_DEFAULT_POLICY = MixedPrecisionPolicy()
_DEFAULT_OFFLOAD = OffloadPolicy()
# What is computed and summed in; a sum in anything narrower, or in integers, is no mean.
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class ShardedModule:
    """What `fully_shard` adds to a module, whose class becomes `FSDP<Class>`."""

    _fk_unit: Unit
    _fk_policy: MixedPrecisionPolicy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Gather, run the module's own call (its hooks included), free."""
        unit = self._fk_unit
        return unit.runtime.run(unit, self._run, args, kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        policy = self._fk_policy
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = _cast((args, kwargs), policy.param_dtype)
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        return output if policy.output_dtype is None else _cast(output, policy.output_dtype)

    @property
    def units(self) -> list[Unit]:
        """The units of this module and below, outermost first; each has `name` and `state`."""
        return find_units(self)  # type: ignore[arg-type]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only; the next backward outside reduces them too."""
        before = [(unit, unit.sync) for unit in self.units]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, sync in before:
                unit.sync = sync

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Say whether backwards from now on reduce the gradients of this module's units."""
        for unit in self.units:
            unit.sync = bool(requires_gradient_sync)

    def unshard(self) -> None:
        """Gather this module's own unit now (collective); the next forward uses it and frees it."""
        self._fk_unit.runtime.ensure_full(self._fk_unit)

    def reshard(self) -> None:
        """Free this module's own unit now; does nothing where it is sharded already."""
        if self._fk_unit.state != "SHARDED":
            self._fk_unit.free()

    @contextmanager
    def full_params(self) -> Iterator[dict[str, nn.Parameter]]:
        """Gather all parameters in their own dtype (collective), for reading or editing them.

        Inside, attributes such as `model.fc.weight` are the full parameters; `named_parameters()`
        still gives the sharded ones. On leaving, each rank writes its part of the edits back, so
        make the same edits on every rank. An exception inside discards them.

        Yields:
            The full parameters by name, shapes and dtypes as before sharding.
        """
        with open_full_params(self, find_units(self)) as params:  # type: ignore[arg-type]
            yield params

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the global norm of all gradients (collective), as torch's does; return the norm."""
        parameters = self.parameters()  # type: ignore[attr-defined]
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget (or zero) every gradient, and what is pending under `no_sync`, by buckets."""
        for param in self.parameters():  # type: ignore[attr-defined]
            # Never look at a FlatShard's gradient here: showing it costs a pass over the bucket.
            if not isinstance(param, FlatShard) and param.grad is not None:
                param.grad = None if set_to_none else param.grad.zero_()
        for unit in self.units:
            unit.runtime.recover()
            for bucket in unit.buckets:
                bucket.grads.check_there()
                if set_to_none:
                    bucket.drop_grads()
                else:
                    bucket.grads.zero()

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load full tensors or `FlatShard`s, as `nn.Module` does; `assign=True` is refused."""
        if assign:
            raise ValueError(
                "load_state_dict: expected assign=False on a sharded module, got True: assigned "
                "tensors would not be sharded. Load without assign, or use "
                "fsdp_kernels.load_full_state_dict."
            )
        return super().load_state_dict(state_dict, strict=strict)  # type: ignore[misc]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Parameters first: a refused move must not leave the buffers moved.
        for param in self.parameters():  # type: ignore[attr-defined]
            with torch.no_grad():
                fn(param)
        return super()._apply(fn, recurse)  # type: ignore[misc]

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError(_no_copy(self, "deepcopy"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(_no_copy(self, "pickle or torch.save"))


def _no_copy(module: Any, what: str) -> str:
    return (
        f"{type(module).__name__}: expected a module that is not sharded, got {what} of a sharded "
        "one. Copy it before fully_shard, or use `fsdp_kernels.full_state_dict(model)` or "
        "`fsdp_kernels.checkpoint.save`."
    )


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return tree_map_only(Tensor, cast, tree)


_classes: dict[type, type] = {}


def _sharded_class(cls: type) -> type:
    if issubclass(cls, ShardedModule):
        return cls
    made = _classes.get(cls)
    if made is None:
        made = type(f"FSDP{cls.__name__}", (ShardedModule, cls), {"__module__": cls.__module__})
        _classes[cls] = made
    return made


def fully_shard(
    module: nn.Module,
    *,
    units: UnitSpec = None,
    mesh: DeviceMesh | None = None,
    strategy: str = "zero3",
    mp_policy: MixedPrecisionPolicy = _DEFAULT_POLICY,
    offload_policy: OffloadPolicy = _DEFAULT_OFFLOAD,
    comm: str | Comm | None = None,
    prefetch: int = 1,
    sync_module_states: bool = True,
) -> nn.Module:
    """Shard a module's parameters over the ranks, in place (collective).

    Every parameter stays the same object under the same name with the same global shape, and
    becomes a `FlatShard` that holds this rank's fragment. Forward and backward gather each unit
    when it is needed and free it afterwards; gradients arrive reduced, as the mean over ranks.
    (ZeRO stage 3: https://arxiv.org/abs/1910.02054.) Other strategies send less and keep more;
    their numbers are the same.

    Args:
        module: The module, with real (not meta) parameters on one device.
        units: Which submodules become units; the module itself is one too and takes the rest. None:
            this module alone (call bottom-up, inner modules first). A class or a tuple of classes;
            a predicate on modules; or a number: the smallest submodules with at least so many
            parameters not yet taken.
        mesh: 1-D device mesh, or 2-D: replicate x shard. None means all ranks of the default
            process group.
        strategy: What is sharded. "zero3": parameters, gradients and optimizer state. "zero2":
            parameters stay full, and a step gathers them once. "zero1": gradients, too, stay whole
            on each rank until the step reduces them. "replicate": nothing; gradients are
            all-reduced. Units sharded before keep theirs.
        mp_policy: torch's `MixedPrecisionPolicy`: dtypes of computation, reduction and output.
        offload_policy: Only the default, no offload, for now.
        comm: Backend: None picks, or a name, or a `Comm`.
        prefetch: Units gathered ahead of the one that computes.
        sync_module_states: Start from rank 0's parameters and buffers.

    Returns:
        The same module, its class extended by `ShardedModule`.

    Raises:
        TypeError, ValueError: An argument or a parameter that cannot be sharded, named, or one that
            differs between ranks (on every rank); nothing was changed then.
        RuntimeError: No process group.
    """
    where = f"fully_shard({type(module).__name__})"
    policies = mp_policy, offload_policy
    _check_arguments(where, module, strategy, policies, prefetch, sync_module_states)
    plan = plan_units(where, module, units)
    kind = STRATEGIES[strategy]
    runtimes = {unit.runtime for unit in find_units(module)}
    for inner in runtimes:
        inner.come_to_rest()  # first: it settles what a failed backward left, with the other ranks
    options = Options(mp_policy, kind, prefetch, sync_module_states)
    chosen = pick_comm(where, comm, mesh, plan, options)
    for inner in runtimes:
        if _place(inner.comm) != _place(chosen):
            raise ValueError(
                f"{where}: expected the modules sharded before to be on the same ranks, got rank "
                f"{_place(inner.comm)} beside {_place(chosen)}. Pass the same mesh or comm to "
                "every call, and strategy='replicate' to all of them or to none."
            )
    note_comm(chosen.name)
    runtime = Runtime(chosen, plan.device)
    runtime.gathers.prefetch_units = prefetch
    made = build_units(plan, mp_policy, runtime.resources, kind, sync_module_states)
    if sync_module_states:
        sync_buffers(module, chosen)
    _install(module, plan, made, runtime, mp_policy)
    return module


def _check_arguments(
    where: str, module: Any, strategy: str, policies: tuple[Any, Any], prefetch: Any, sync: Any
) -> None:
    mp_policy, offload_policy = policies
    if not isinstance(module, nn.Module):
        raise TypeError(f"{where}: expected an nn.Module, got {type(module).__name__}.")
    if isinstance(module, ShardedModule):
        raise ValueError(
            f"{where}: expected a module that is not sharded yet. Shard each module once."
        )
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        raise ValueError(
            f"{where}: expected strategy {', '.join(map(repr, STRATEGIES))}, got {strategy!r}. "
            "'zero3' keeps the least, 'replicate' is what DDP does."
        )
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(
            f"{where}: expected mp_policy to be torch's MixedPrecisionPolicy, got "
            f"{type(mp_policy).__name__}. As in MixedPrecisionPolicy(param_dtype=torch.bfloat16)."
        )
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(mp_policy, name)
        if dtype is not None and dtype not in _DTYPES:
            raise ValueError(
                f"{where}: expected {name} to be None, {', '.join(map(str, _DTYPES))}, got "
                f"{dtype!r}. Pass one of them in mp_policy."
            )
    if type(offload_policy) is not OffloadPolicy:
        raise ValueError(
            f"{where}: expected no offload, got {type(offload_policy).__name__}. Offload does not "
            "exist yet."
        )
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise ValueError(f"{where}: expected prefetch to be a number from 0, got {prefetch!r}.")
    if not isinstance(sync, bool):
        raise TypeError(
            f"{where}: expected sync_module_states to be True or False, got {sync!r}. False keeps "
            "what each rank has."
        )


def _place(comm: Comm) -> str:
    """Say which rank this is, and of how many."""
    replicas = comm.everyone.world // comm.world
    times = f" in each of {replicas} replicas" if replicas > 1 else ""
    return f"{comm.rank} of {comm.world}{times}"


def _install(
    module: nn.Module, plan: Plan, made: list[Unit], runtime: Runtime, policy: MixedPrecisionPolicy
) -> None:
    for unit in made:
        unit.module.__class__ = _sharded_class(type(unit.module))
        unit.module.__dict__["_fk_unit"] = unit
        unit.module.__dict__["_fk_policy"] = (
            policy if unit.module is module else replace(policy, output_dtype=None)
        )
        for submodule in {site.module for bucket in unit.buckets for site in bucket.leaves.sites}:
            if submodule is not unit.module:
                _ensure_full_before(submodule, unit)
    for inner in module.modules():
        if isinstance(inner, nn.TransformerEncoderLayer):
            _forbid_fused_path(inner)
    everything = find_units(module)
    paths = {id(submodule): name for name, submodule in module.named_modules()}
    for unit in everything:
        unit.name = paths[id(unit.module)]
    runtime.adopt(everything, module._fk_unit)  # type: ignore[arg-type]


def _forbid_fused_path(layer: nn.TransformerEncoderLayer) -> None:
    """Let a layer call its submodules, of which each may be a unit, also without gradients.

    Otherwise torch reads their parameters without calling them; where there is a hook, it does not.
    """
    if _do_nothing not in layer._forward_pre_hooks.values():
        layer.register_forward_pre_hook(_do_nothing)


def _do_nothing(_: nn.Module, args: Any) -> None:
    pass


def _ensure_full_before(submodule: nn.Module, unit: Unit) -> None:
    """Let a submodule's own call make its unit full: called directly, or checkpointed.

    Nearly every call comes from inside the unit's own forward and has nothing to do. So this stands
    where torch looks for what a module's call does, and is no pair of hooks: with hooks, torch
    takes a path that costs ten times as much.
    """
    call: Callable[..., Any] = submodule._call_impl

    def ensured(*args: Any, **kwargs: Any) -> Any:
        if unit.runtime.is_inside(unit):
            return call(*args, **kwargs)
        return unit.runtime.run(unit, call, args, kwargs)

    submodule.__dict__["_call_impl"] = ensured

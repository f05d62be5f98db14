# SPDX-License-Identifier: Apache-2.0
"""What each kind of operation does on `FlatShard`s: the table behind the dispatcher.

- element-wise: on the fragments; plain operands of the full shape are sliced, broadcast ones
  expanded first;
- `_foreach_*`, `_fused_*`: the same, list by list, in one call;
- `*_like`: a tensor of the same geometry;
- random fills: this rank's part of what the same seed gives the whole tensor;
- norms: global, with one all-reduce, also for a whole `_foreach_norm`;
- GradScaler's unscale: on the fragments; the non-finite flag is made global;
- detach, alias: the same fragment;
- anything else: refused with a sentence that names `full_params()`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fsdp_kernels.accesses import SHARD_MASTER, note
from fsdp_kernels.comm.base import Comm
from fsdp_kernels.flat_shard import HINT, FlatShard, Geometry
from fsdp_kernels.trace import label, recording

aten = torch.ops.aten
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one ATen operation with at least one `FlatShard` among its operands."""
    handler = _HANDLERS.get(func)
    if handler is None:
        handler = _HANDLERS[func] = _classify(func)
    if handler is not _alias and handler is not _like and torch.is_grad_enabled():
        _refuse_autograd(func, args)
    return handler(func, args, kwargs)


def _classify(func: Any) -> Handler:
    name = func._schema.name.split("::")[1]
    tags = func.tags
    if name.startswith("_foreach_") or name in _FUSED:
        return _refuse if name in _FOREACH_REDUCTIONS else _foreach
    if name.endswith("_like"):
        return _like
    if torch.Tag.nondeterministic_seeded in tags:
        return _random_fill if name.endswith("_") else _refuse
    if (torch.Tag.pointwise in tags or name in _ALSO_POINTWISE) and name != "equal":
        return _pointwise
    return _refuse


def _refuse_autograd(func: Any, args: tuple[Any, ...]) -> None:
    for arg in args:
        for operand in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(operand, FlatShard) and operand.requires_grad:
                if func is aten.clone.default:
                    return
                raise ValueError(
                    f"parameter '{operand.geometry.name}': expected no autograd through a sharded "
                    f"parameter, got {func} with gradients enabled. {HINT} For a value without "
                    "gradients, use torch.no_grad()."
                )


# NOTE: never a TypeError: binary operators would turn it into NotImplemented and lose its words.
def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard = _first(args, kwargs)
    raise ValueError(
        f"parameter '{shard.geometry.name}': expected an element-wise operation on a sharded "
        f"parameter, got {func}. {HINT}"
    )


def _first(args: Sequence[Any], kwargs: dict[str, Any]) -> FlatShard:
    for arg in (*args, *kwargs.values()):
        for operand in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(operand, FlatShard):
                return operand
    raise TypeError("FlatShard: expected an operand that is a FlatShard, got none.")


def _localize(operand: Any, geometry: Geometry) -> Any:
    """Turn an operand into one that acts on the fragment."""
    if isinstance(operand, FlatShard):
        if not operand.geometry.matches(geometry):
            raise ValueError(
                f"parameter '{geometry.name}': expected operands of one geometry, got "
                f"'{operand.geometry.name}' of shape {tuple(operand.shape)} beside shape "
                f"{tuple(geometry.shape)}. {HINT}"
            )
        return operand._local
    if isinstance(operand, Tensor) and operand.dim() > 0:
        return geometry.take(operand)
    return operand


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """List the operands that the operation writes, in schema order."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return found


def _changed(operands: Iterable[Any]) -> None:
    """Bump the version counters that the bucket reads: below autograd, operations do not."""
    shards = [operand for operand in operands if isinstance(operand, FlatShard)]
    increment_version([shard._local for shard in shards])
    if recording():
        for shard in shards:
            if shard.is_sharded_parameter:
                note(shard.bucket, "edit", writes=SHARD_MASTER)


def _wrap(result: Any, geometry: Geometry) -> Any:
    if isinstance(result, Tensor):
        return FlatShard(result, geometry)
    if isinstance(result, (list, tuple)):
        return type(result)(_wrap(item, geometry) for item in result)
    return result


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    geometry = _first(args, kwargs).geometry
    if func is aten.copy_.default:
        return _copy(args[0], args[1], geometry)
    written = _written(func, args, kwargs) if func._schema.is_mutable else []
    for operand in written:
        if not isinstance(operand, FlatShard):
            _refuse(func, args, kwargs)
    local_args = [_localize(arg, geometry) for arg in args]
    local_kwargs = {key: _localize(value, geometry) for key, value in kwargs.items()}
    local_kwargs.pop("memory_format", None)
    result = func(*local_args, **local_kwargs)
    if not written:
        return _wrap(result, geometry)
    _changed(written)
    return written[0] if len(written) == 1 else tuple(written)


def _copy(target: Any, source: Tensor, geometry: Geometry) -> Any:
    """`target.copy_(source)`; a 0-dim source fills, as anywhere in torch."""
    if not isinstance(target, FlatShard):
        _refuse(aten.copy_.default, (target, source), {})
    target._local.copy_(_localize(source, geometry))
    _changed([target])
    return target


def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard = args[0]
    if shard.is_sharded_parameter:
        raise ValueError(
            f"parameter '{shard.geometry.name}': expected dtype {shard.dtype} and device "
            f"{shard.device} to stay, got a move to "
            f"{kwargs.get('dtype') or kwargs.get('device')}. Move the model before fully_shard, "
            f"or pass mp_policy. {HINT}"
        )
    kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
    return FlatShard(func(shard._local, **kwargs), shard.geometry)


def _foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`_foreach_*` and `_fused_*`: the i-th tensors of all lists belong together."""
    geometries = [tensor.geometry for tensor in args[0] if isinstance(tensor, FlatShard)]
    if len(geometries) != len(args[0]):
        _refuse(func, args, kwargs)

    def local(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)) and len(arg) == len(geometries):
            return [
                item._local
                if isinstance(item, FlatShard) and item.geometry is geometry  # nearly always
                else _localize(item, geometry)
                for item, geometry in zip(arg, geometries, strict=True)
            ]
        return arg

    result = func(*(local(a) for a in args), **{key: local(v) for key, v in kwargs.items()})
    if func._schema.is_mutable:
        for operands in _written(func, args, kwargs):
            _changed(operands or ())
        return None if result is None else args[0]
    return [FlatShard(item, geometry) for item, geometry in zip(result, geometries, strict=True)]


def _like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard = args[0]
    kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
    if torch.Tag.nondeterministic_seeded in func.tags:
        full = func(shard._local.new_empty(shard.geometry.shape), *args[1:], **kwargs)
        return FlatShard(shard.geometry.take(full).clone(), shard.geometry)
    return FlatShard(func(shard._local, *args[1:], **kwargs), shard.geometry)


def _random_fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard = args[0]
    if not isinstance(shard, FlatShard) or any(isinstance(a, Tensor) for a in args[1:]):
        _refuse(func, args, kwargs)
    # The whole tensor is drawn and sliced: ranks that share a seed then hold parts of one draw, and
    # every rank's generator ends in the state that it would have without sharding.
    full = func(shard._local.new_empty(shard.geometry.shape), *args[1:], **kwargs)
    shard._local.copy_(shard.geometry.take(full))
    _changed([shard])
    return shard


def _alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard = args[0]
    return FlatShard(shard._local, shard.geometry)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.Size(args[1]) != args[0].shape:
        _refuse(func, args, kwargs)
    return _alias(func, args, kwargs)


def _global_norms(locals_: Sequence[Tensor], order: float, comm: Comm) -> Tensor:
    """p-norms over all ranks of several fragments, float64 [n], with one all-reduce."""
    powers = []
    for local in locals_:
        if local.numel() == 0:
            start = math.inf if order == -math.inf else 0.0
            powers.append(torch.full((), start, dtype=torch.float64, device=local.device))
            continue
        wide = torch.float64 if local.dtype == torch.float64 else torch.float32
        value = torch.linalg.vector_norm(local, order, dtype=wide).double()
        powers.append(value if math.isinf(order) or order == 0 else value**order)
    stacked = torch.stack(powers)
    op = {math.inf: "max", -math.inf: "min"}.get(order, "sum")
    comm.all_reduce(stacked, op, label=label("norm", "")).wait()  # type: ignore[arg-type]
    return stacked if math.isinf(order) or order == 0 else stacked ** (1.0 / order)


def _sharded_alike(tensors: Sequence[Tensor], func: Any) -> tuple[list[FlatShard], Comm]:
    """Check that all tensors of a list are sharded over one communicator, and return it."""
    shards = [tensor for tensor in tensors if isinstance(tensor, FlatShard)]
    comms = {id(shard.geometry.comm): shard.geometry.comm for shard in shards}
    if len(shards) < len(tensors) or len(comms) != 1:
        raise ValueError(
            f"{func}: expected parameters sharded by one root, got {len(shards)} sharded ones of "
            f"{len(tensors)}, over {len(comms)} roots. Shard the whole model, or handle each part "
            "by itself."
        )
    return shards, next(iter(comms.values()))


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shards, comm = _sharded_alike(args[0], func)
    order = float(args[1]) if len(args) > 1 else float(kwargs.get("ord", 2))
    dtype = kwargs.get("dtype") or (args[2] if len(args) > 2 else None) or shards[0].dtype
    norms = _global_norms([s._local for s in shards], order, comm)
    return list(norms.to(dtype).unbind())


def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard, *rest = args
    named = dict(zip(("ord", "dim", "keepdim"), rest, strict=False)) | kwargs
    dim = named.get("dim")
    if named.get("keepdim") or (dim is not None and len(dim) not in (0, shard.dim())):
        _refuse(func, args, kwargs)
    order = named.get("ord")
    order = 2.0 if order is None else float(order)
    norms = _global_norms([shard._local], order, shard.geometry.comm)
    return norms[0].to(named.get("dtype") or shard.dtype)


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """GradScaler: one rank's overflow must be every rank's, or they would take different steps."""
    listed, found_inf, inv_scale = args
    shards, comm = _sharded_alike(listed, func)
    func([shard._local for shard in shards], found_inf, inv_scale)
    _changed(shards)
    comm.all_reduce(found_inf, "max", label=label("found_inf", "")).wait()
    return None


_ALSO_POINTWISE = frozenset({"copy_", "zero_", "fill_", "masked_fill_", "masked_fill", "where"})
_FUSED = frozenset({"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"})
_FOREACH_REDUCTIONS = frozenset({"_foreach_max", "_foreach_powsum"})

_HANDLERS: dict[Any, Handler] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.lift_fresh.default: _alias,
    aten.view.default: _view,
    aten._to_copy.default: _to_copy,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.norm.Scalar: _vector_norm,
    aten.norm.ScalarOpt_dim: _vector_norm,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}

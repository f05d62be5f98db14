# SPDX-License-Identifier: Apache-2.0
"""Units of a real model, cut and laid out by the code that training uses.

The model is made on fake tensors (`FakeTensorMode`): it takes no memory, whatever its size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_kernels._unit_plan import Entry, UnitSpec, check_kind, plan_units
from fsdp_kernels._wrap import bucket_dtypes, bucket_groups
from fsdp_kernels.bucket_shards import Dtypes
from fsdp_kernels.plan import saved
from fsdp_kernels.plan.job import PlannedBucket, PlannedUnit, Widths
from fsdp_kernels.plan.sources import Source
from fsdp_kernels.plan.widths import Precision

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_DEFAULT = Precision()


@dataclass(frozen=True, slots=True)
class Cut:
    """How a model is cut and run.

    Attributes:
        spec: `units` of `fully_shard`, or the name of a class; None: the model's own blocks.
        precision: Dtypes and optimizer.
        batch: Sequences of a micro-batch; 0: no forward is run.
        sequence: Tokens of each.
    """

    spec: UnitSpec | str
    precision: Precision
    batch: int = 0
    sequence: int = 0


def planned_units(source: Source, cut: Cut) -> tuple[PlannedUnit, ...]:
    """Make a model on fake tensors and cut it into units; with a batch, run a forward.

    Raises:
        ValueError: It cannot be cut so, or its forward cannot run on fake tensors.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = source.make()
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"--module: expected a function that returns an nn.Module, got one that returns "
                f"a {type(model).__name__}. Return the model."
            )
        spec = _blocks(model) if cut.spec is None else cut.spec
        if isinstance(spec, str):
            spec = _class_named(model, spec)
        owners = plan_units("plan", model, spec, check=check_kind).owners
        buckets = {m: _buckets(entries, cut.precision) for m, entries in owners.items()}
        names = {module: name for name, module in model.named_modules()}
        kept: dict[nn.Module, saved.Saved] = {}
        order: list[nn.Module] = list(owners)
        if cut.batch:
            kept, order = _run(source, model, list(owners), cut)
    order = [model, *(m for m in order if m is not model)]
    order += [m for m in owners if m not in order]  # never called
    counts = _counts(kept, order)
    return tuple(
        PlannedUnit(
            names[module],
            buckets[module],
            *counts.get(module, (0, 0, 0)),
            multiplied=sum(e.param.numel() for e in owners[module] if _is_multiplied(e)),
            attention_width=_attention_width(model) if module is not model else 0,
        )
        for module in order
    )


def _run(
    source: Source, model: nn.Module, units: list[nn.Module], cut: Cut
) -> tuple[dict[nn.Module, saved.Saved], list[nn.Module]]:
    compute = DTYPES[cut.precision.param] if cut.precision.param else None
    if compute is not None:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(compute)
    try:
        return saved.run(model, units, lambda m: source.call(m, cut.batch, cut.sequence), compute)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"plan: expected a forward of {type(model).__name__} that runs without data, got "
            f"{type(error).__name__}: {error}. Give --inputs that it takes, or leave --batch out "
            "and give --activation-bytes."
        ) from error


def _counts(
    kept: dict[nn.Module, saved.Saved], order: list[nn.Module]
) -> dict[nn.Module, tuple[int, int, int]]:
    """Bytes that each unit saves; of its inputs that nobody before it kept; and of the rest."""
    if not kept:
        return {}
    counted = set(kept[order[0]].storages)
    counts = {order[0]: (sum(kept[order[0]].storages.values()), 0, 0)}
    for unit in order[1:]:
        now = kept[unit]
        new = {key: nbytes for key, nbytes in now.inputs.items() if key not in counted}
        counted |= new.keys()
        inner = sum(nbytes for key, nbytes in now.storages.items() if key not in now.inputs)
        counts[unit] = (sum(now.storages.values()), sum(new.values()), inner)
    return counts


# -- units and buckets ----------------------------------------------------------------------------


def _blocks(model: nn.Module) -> UnitSpec:
    """The model's own blocks: the class of the largest list of modules of one class."""
    lists = [
        module
        for module in model.modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        and len(module) > 1
        and len({type(child) for child in module}) == 1
    ]
    largest = max(lists, key=lambda m: sum(p.numel() for p in m.parameters()), default=None)
    return None if largest is None else type(largest[0])


def _class_named(model: nn.Module, name: str) -> UnitSpec:
    classes = {type(module).__name__: type(module) for module in model.modules()}
    if name not in classes:
        raise ValueError(
            f"--unit-class: expected a class of the model's modules, got {name!r}. It has "
            f"{', '.join(sorted(classes))}."
        )
    return classes[name]


def _buckets(entries: list[Entry], precision: Precision) -> tuple[PlannedBucket, ...]:
    policy = MixedPrecisionPolicy(
        param_dtype=_torch_dtype("--param-dtype", precision.param),
        reduce_dtype=_torch_dtype("--reduce-dtype", precision.reduce),
    )
    made = []
    for group in bucket_groups(entries):
        dtypes = bucket_dtypes(group[0].param.dtype, policy)
        trained = group[0].param.requires_grad
        made.append(
            PlannedBucket(
                tuple(entry.name for entry in group),
                tuple(entry.param.numel() for entry in group),
                widths_of(dtypes, precision, trained=trained),
                dtypes.itemsize,
            )
        )
    return tuple(made)


def widths_of(dtypes: Dtypes, precision: Precision = _DEFAULT, *, trained: bool = True) -> Widths:
    """Return the bytes of a parameter of a bucket.

    Args:
        dtypes: The bucket's.
        precision: What else was asked for; its compute and reduce dtypes are the bucket's.
        trained: Whether it has gradients and optimizer state.
    """
    own, compute, reduce = (NAMES.get(d) for d in (dtypes.own, dtypes.compute, dtypes.reduce))
    if own is None:  # whole numbers, which nobody trains
        none, nbytes = Fraction(0), Fraction(dtypes.own.itemsize)
        return Widths(nbytes, none, none, none, none)
    return replace(precision, param=compute, reduce=reduce).widths(own, trained=trained)


def _torch_dtype(option: str, name: str | None) -> torch.dtype | None:
    if name is not None and name not in DTYPES:
        raise ValueError(
            f"{option}: expected {', '.join(DTYPES)} for a model, got {name}, in which "
            "fully_shard cannot compute. Choose one of them."
        )
    return None if name is None else DTYPES[name]


def _is_multiplied(entry: Entry) -> bool:
    """Whether every token is multiplied by it: a matrix that is not only looked up."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    looked_up = all(isinstance(module, tables) for module, _ in entry.sites)
    return entry.param.ndim >= 2 and not looked_up


def _attention_width(model: nn.Module) -> int:
    """Heads times their width of a layer of `transformers`; 0 where the model does not say."""
    config = getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return 0
    width = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    return int(heads * width)

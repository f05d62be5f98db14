# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fsdp-kernels plan``, and the jobs that they describe."""

from __future__ import annotations

import argparse
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from fsdp_kernels.plan import argument_types as types
from fsdp_kernels.plan import devices
from fsdp_kernels.plan.job import NAMES, Job, PlannedUnit, Widths
from fsdp_kernels.plan.sizes import DTYPE_BYTES, parse_count
from fsdp_kernels.plan.transformer import Shape, describe
from fsdp_kernels.plan.widths import OPTIMIZERS, OVERLAPPING, Precision


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add everything that says what is trained, and how."""
    _add_model(parser.add_argument_group("what is trained (one of the first four)"))
    _add_precision(parser.add_argument_group(f"dtypes ({', '.join(DTYPE_BYTES)}) and optimizer"))
    _add_sharding(parser.add_argument_group("how it is sharded"))
    _add_machine(parser.add_argument_group("the device"))


def _add_model(group: argparse._ArgumentGroup) -> None:
    add, kb = group.add_argument, types.size(1000)
    kb_or_none = types.size(1000, zero=True)
    add("--params", type=types.params, metavar="N", help="number of parameters: 70e9, 70B")
    help_ = "the same in bytes of --param-dtype: 12GB"
    add("--params-bytes", type=kb, metavar="BYTES", help=help_)
    help_ = "a transformers configuration, a file: config.json"
    add("--hf-config", type=Path, metavar="JSON", help=help_)
    add("--module", metavar="PKG.MOD:MAKE", help="a function that makes the model")
    add("--inputs", metavar="PKG.MOD:MAKE", help="a function of batch and sequence: its inputs")
    add("--batch", type=types.positive, default=0, metavar="N", help="sequences on a GPU at a time")
    add("--sequence", type=types.positive, default=0, metavar="N", help="tokens of a sequence")
    help_ = "blocks, where only a number of parameters is given"
    add("--layers", type=types.positive, metavar="N", help=help_)
    add("--width", type=types.positive, metavar="N", help="channels, likewise")
    help_ = "rows of embedding and head, likewise"
    add("--vocabulary", type=types.positive, default=0, metavar="N", help=help_)
    help_ = "all gradients; no dtype is asked then"
    add("--grads-bytes", type=kb_or_none, metavar="BYTES", help=help_)
    help_ = "all optimizer state, masters too"
    add("--optimizer-bytes", type=kb_or_none, metavar="BYTES", help=help_)
    add("--activation-bytes", type=kb_or_none, metavar="BYTES", help="activations of a GPU")
    add("words", nargs="*", help=argparse.SUPPRESS)  # to say what to write instead of a name


def _add_precision(group: argparse._ArgumentGroup) -> None:
    def add(name: str, help_: str, *more: str) -> None:
        group.add_argument(name, choices=(*more, *DTYPE_BYTES), metavar="DTYPE", help=help_)

    add("--param-dtype", "of computation (fp32, or the model's own)")
    add("--grad-dtype", "of the gradients that the step reads")
    add("--reduce-dtype", "of reductions (that of computation)")
    add("--master-dtype", "of the copy that the step writes; none: there is none", "none")
    add("--state-dtype", "of the optimizer's moments (at least fp32)")
    group.add_argument("--optimizer", choices=OPTIMIZERS, default="adam", help="adam by default")


def _add_sharding(group: argparse._ArgumentGroup) -> None:
    add, names = group.add_argument, ",".join(NAMES)
    several: dict[str, Any] = {"nargs": "+", "action": types.Joined}
    help_ = f"some of {names} (zero3)"
    add(
        "--strategy",
        type=types.strategies,
        default=["zero3"],
        metavar="NAME",
        help=help_,
        **several,
    )
    every = [1, 2, 4, 8, 16, 32, 64]
    help_ = "numbers of GPUs: 8,16"
    add("--world", type=types.worlds, default=every, metavar="N", help=help_, **several)
    help_ = "GPUs of a shard group; hybrid: those of a host, 8"
    add("--shard", type=types.positive, metavar="N", help=help_)
    help_ = "parameters of a unit; of a model: at least"
    add("--unit-params", type=parse_count, metavar="N", help=help_)
    help_ = "the same in bytes of --param-dtype"
    add("--unit-bytes", type=types.size(1000), metavar="BYTES", help=help_)
    help_ = "class whose instances are units (a model's largest list's)"
    add("--unit-class", metavar="NAME", help=help_)
    add("--prefetch", type=types.whole, default=1, metavar="N", help="units gathered ahead (1)")
    add("--no-sync", action="store_true", help="micro-batches accumulate before one reduction")
    add("--overlap-backward", action="store_true", help="each unit is stepped in backward (adam)")
    add("--checkpoint-activations", action="store_true", help="compute each unit twice")
    add("--offload", nargs="+", choices=("optimizer", "params"), default=[], help="to the host")
    add("--shared-memory", action="store_true", help="ranks of one CPU host: SharedMemoryComm")


def _add_machine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--device", default="H100", metavar="NAME", help=f"{', '.join(devices.DEVICES)} (H100)")
    add("--hbm", type=types.size(10**9), metavar="BYTES", help="memory of the device: 80GB")
    help_ = "memory that is not planned: context, communicators, fragments (0)"
    add("--reserve", type=types.size(10**6, zero=True), default=0, metavar="BYTES", help=help_)


# -- from arguments to jobs -----------------------------------------------------------------------


def jobs(args: argparse.Namespace) -> list[Job]:
    """Return one job for each strategy.

    Raises:
        ValueError: Something that cannot be, with what to change.
    """
    _check_sources(args)
    precision = Precision(
        args.param_dtype,
        args.grad_dtype,
        args.reduce_dtype,
        args.master_dtype,
        args.state_dtype,
        args.optimizer,
    )
    counted = args.hf_config is None and args.module is None
    units, notes = (_counted_units if counted else _model_units)(args, precision)
    if args.activation_bytes is not None:
        units = with_activations(units, args.activation_bytes)
    if args.offload:
        notes.append("offload is planned only: fully_shard does not do it yet")
    device = devices.find(args.device)
    return [
        Job(
            units=units,
            strategy=strategy,
            shard=_shard(args, strategy),
            prefetch=args.prefetch,
            no_sync=args.no_sync,
            overlap_backward=args.overlap_backward,
            recompute=args.checkpoint_activations,
            offload=frozenset(args.offload),
            shared_memory=args.shared_memory,
            reserve_bytes=args.reserve,
            memory_bytes=device.memory_bytes if args.hbm is None else args.hbm,
            batch=args.batch,
            sequence=args.sequence,
            notes=tuple(notes),
        )
        for strategy in args.strategy
    ]


def _shard(args: argparse.Namespace, strategy: str) -> int | None:
    if strategy == "hybrid" and args.shard is None:
        return devices.GPUS_PER_HOST
    shard: int | None = args.shard
    return shard


def _check_sources(args: argparse.Namespace) -> None:
    if args.words:
        raise ValueError(
            f"{args.words[0]}: expected options, got a name: models are not known by theirs. Give "
            "--params 7e9, --hf-config config.json or --module package.module:function."
        )
    sources = ("params", "params_bytes", "hf_config", "module")
    given = [name for name in sources if getattr(args, name) is not None]
    if len(given) != 1:
        options = ", ".join("--" + name.replace("_", "-") for name in sources)
        got = " and ".join("--" + name.replace("_", "-") for name in given) or "none"
        raise ValueError(f"model: expected one of {options}, got {got}. Give --params 7e9.")
    _check_together(args, given[0])
    if bool(args.batch) != bool(args.sequence):
        raise ValueError(
            "--batch: expected --batch and --sequence together, got one. Give both for "
            "activations, or none."
        )
    if args.unit_params is not None and args.unit_bytes is not None:
        raise ValueError(
            "--unit-params: expected --unit-params or --unit-bytes, got both. Leave one of them "
            "out."
        )
    if args.checkpoint_activations and args.activation_bytes is not None:
        raise ValueError(
            "--checkpoint-activations: expected activations that the planner computes, got "
            "--activation-bytes. Give --batch and --sequence instead, or lower the bytes."
        )
    if args.overlap_backward and args.optimizer not in OVERLAPPING:
        raise ValueError(
            f"--overlap-backward: expected {' or '.join(OVERLAPPING)}, got --optimizer "
            f"{args.optimizer}: only ShardedAdam and ShardedAdamW step in backward. Leave one of "
            "them out."
        )


_MOST_UNITS = 10_000
_COUNTED = ("grads_bytes", "optimizer_bytes", "layers", "width", "vocabulary")
_MODELS = ("inputs", "unit_class")


def _check_together(args: argparse.Namespace, source: str) -> None:
    """Refuse what means nothing beside the source of the model."""
    counted = source in ("params", "params_bytes")
    for name in _MODELS if counted else _COUNTED:
        if getattr(args, name):
            option, other = "--" + name.replace("_", "-"), "--" + source.replace("_", "-")
            needs = "--module or --hf-config" if counted else "--params"
            raise ValueError(
                f"{option}: expected {needs}, got {other}. Leave {option} out, or give the other."
            )
    if args.inputs and args.module is None:
        raise ValueError("--inputs: expected --module, got --hf-config. Leave --inputs out.")


def _counted_units(
    args: argparse.Namespace, precision: Precision
) -> tuple[tuple[PlannedUnit, ...], list[str]]:
    """Units of a model of which only the number of parameters is known."""
    itemsize = DTYPE_BYTES[args.param_dtype or "fp32"]
    numel = args.params if args.params is not None else -(-args.params_bytes // itemsize)
    widths = _given_bytes(args, precision.widths(args.param_dtype or "fp32"), numel)
    shape = Shape.of(numel, args.layers, args.width, args.vocabulary)
    unit_numel = _unit_numel(args, numel, itemsize)
    if unit_numel is None and shape.layers > _MOST_UNITS:
        raise ValueError(
            f"--layers: expected at most {_MOST_UNITS:,} blocks, got {shape.layers:,} of width "
            f"{shape.width:,} from {numel:,} parameters. Lower --layers, or raise --width."
        )
    units = shape.units(unit_numel, widths, args.batch * args.sequence)
    notes = [describe(numel, units)]
    if unit_numel is None or args.batch:
        notes.append(shape.note())
    return units, notes


def _model_units(
    args: argparse.Namespace, precision: Precision
) -> tuple[tuple[PlannedUnit, ...], list[str]]:
    """Units of a model that can be made."""
    from fsdp_kernels.plan import (  # the other plans need neither a model nor transformers
        model,
        sources,
    )

    if args.hf_config is not None:
        source, name = sources.from_config(args.hf_config), str(args.hf_config)
    else:
        source, name = sources.from_module(args.module, args.inputs), args.module
    spec: int | str | None = args.unit_class
    if args.unit_params is not None or args.unit_bytes is not None:
        spec = args.unit_params or -(-args.unit_bytes // DTYPE_BYTES[args.param_dtype or "fp32"])
    cut = model.Cut(spec, precision, args.batch, args.sequence)
    units = model.planned_units(source, cut)
    numel = sum(unit.numel for unit in units)
    return units, [f"{name}: {describe(numel, units)}"]


def _unit_numel(args: argparse.Namespace, numel: int, itemsize: int) -> int | None:
    unit: int | None = args.unit_params
    if args.unit_bytes is not None:
        unit = -(-args.unit_bytes // itemsize)
    if unit is None:
        return None
    if not 1 <= unit <= numel:
        raise ValueError(
            f"--unit-params: expected from 1 to the model's {numel:,} parameters, got {unit:,}. "
            "Give the parameters of one block."
        )
    if numel > _MOST_UNITS * unit:
        raise ValueError(
            f"--unit-params: expected at most {_MOST_UNITS:,} units, got {-(-numel // unit):,}. "
            "Give larger ones: each costs collectives of its own."
        )
    return unit


def _given_bytes(args: argparse.Namespace, widths: Widths, numel: int) -> Widths:
    """Replace what follows from dtypes by bytes that were given."""
    grads, reduce, master, state = widths.grads, widths.reduce, widths.master, widths.state
    if args.grads_bytes is not None:
        grads = reduce = Fraction(args.grads_bytes, numel)
    if args.optimizer_bytes is not None:
        master, state = Fraction(0), Fraction(args.optimizer_bytes, numel)
    return Widths(widths.params, grads, reduce, master, state)


def with_activations(units: tuple[PlannedUnit, ...], nbytes: int) -> tuple[PlannedUnit, ...]:
    """Spread given activations over the units, by their parameters."""
    numel = sum(unit.numel for unit in units)
    spread, last = [], 0
    passed = 0
    for unit in units:
        passed += unit.numel
        upto = nbytes * passed // numel
        spread.append(replace(unit, saved_bytes=upto - last, input_bytes=0, inner_bytes=0))
        last = upto
    return tuple(spread)

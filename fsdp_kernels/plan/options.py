# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fsdp-kernels plan``, and the jobs that they describe."""

from __future__ import annotations

import argparse
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from fsdp_kernels.plan import devices
from fsdp_kernels.plan.job import NAMES, Job, PlannedUnit, Widths
from fsdp_kernels.plan.sizes import DTYPE_BYTES, parse_bytes, parse_count
from fsdp_kernels.plan.transformer import Shape, describe
from fsdp_kernels.plan.widths import OPTIMIZERS, Precision


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add everything that says what is trained, and how."""
    _add_model(parser.add_argument_group("what is trained (one of the first four)"))
    _add_precision(parser.add_argument_group("dtypes and optimizer"))
    _add_sharding(parser.add_argument_group("how it is sharded"))
    _add_machine(parser.add_argument_group("the device"))


def _add_model(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--params", type=parse_count, help="number of parameters: 70e9, 70B")
    add("--params-bytes", type=parse_bytes, help="the same in bytes of --param-dtype: 12GB")
    add("--hf-config", type=Path, help="a transformers configuration: config.json")
    add("--module", metavar="PKG.MOD:MAKE", help="a function that makes the model")
    add("--inputs", metavar="PKG.MOD:MAKE", help="a function of batch and sequence: its inputs")
    add("--batch", type=_positive, default=0, help="sequences of a micro-batch on a GPU")
    add("--sequence", type=_positive, default=0, help="tokens of a sequence")
    add("--layers", type=_positive, help="blocks, where only a number of parameters is given")
    add("--width", type=_positive, help="channels, likewise")
    add("--vocabulary", type=_positive, default=0, help="rows of embedding and head, likewise")
    add("--grads-bytes", type=parse_bytes, help="all gradients; no dtype is asked then")
    add("--optimizer-bytes", type=parse_bytes, help="all optimizer state, masters too")
    add("--activation-bytes", type=parse_bytes, help="activations of a GPU")


def _add_precision(group: argparse._ArgumentGroup) -> None:
    dtypes = tuple(DTYPE_BYTES)
    add = group.add_argument
    add("--param-dtype", choices=dtypes, help="of computation (fp32, or the model's own)")
    add("--grad-dtype", choices=dtypes, help="of the gradients that the step reads")
    add("--reduce-dtype", choices=dtypes, help="of reductions (that of computation)")
    add("--master-dtype", choices=("none", *dtypes), help="of the copy that the step writes")
    add("--state-dtype", choices=dtypes, help="of the optimizer's moments (at least fp32)")
    add("--optimizer", choices=OPTIMIZERS, default="adam", help="adam (also AdamW) by default")


def _add_sharding(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--strategy", type=_strategies, default=["zero3"], help=f"some of {','.join(NAMES)}")
    add("--world", type=_worlds, default=[1, 2, 4, 8, 16, 32, 64], help="numbers of GPUs: 8,16")
    add("--shard", type=_positive, help="GPUs of a shard group; hybrid: those of a host, 8")
    add("--unit-params", type=parse_count, help="parameters of a unit; of a model: at least")
    add("--unit-bytes", type=parse_bytes, help="the same in bytes of --param-dtype")
    add("--unit-class", help="class whose instances are units (a model's largest list's)")
    add("--prefetch", type=_whole, default=1, help="units gathered ahead (1)")
    add("--no-sync", action="store_true", help="micro-batches accumulate before one reduction")
    add("--overlap-backward", action="store_true", help="each unit is stepped in backward")
    add("--checkpoint-activations", action="store_true", help="compute each unit twice")
    add("--offload", nargs="+", choices=("optimizer", "params"), default=[], help="to the host")
    add("--shared-memory", action="store_true", help="ranks of one CPU host: SharedMemoryComm")


def _add_machine(group: argparse._ArgumentGroup) -> None:
    names = ", ".join(devices.DEVICES)
    group.add_argument("--device", default="H100", help=f"{names} (H100)")
    group.add_argument("--hbm", type=parse_bytes, help="memory of the device: 80GB")
    help_ = "memory that is not planned: context, communicators, fragments (0)"
    group.add_argument("--reserve", type=parse_bytes, default=0, help=help_)


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
    sources = ("params", "params_bytes", "hf_config", "module")
    given = [name for name in sources if getattr(args, name) is not None]
    if len(given) != 1:
        options = ", ".join("--" + name.replace("_", "-") for name in sources)
        got = " and ".join("--" + name.replace("_", "-") for name in given) or "none"
        raise ValueError(f"plan: expected one of {options}, got {got}. Give --params 7e9.")
    _check_together(args, given[0])
    if bool(args.batch) != bool(args.sequence):
        raise ValueError(
            "plan: expected --batch and --sequence together, got one. Give both for activations, "
            "or none."
        )
    if args.unit_params is not None and args.unit_bytes is not None:
        raise ValueError(
            "plan: expected --unit-params or --unit-bytes, got both. Leave one of them out."
        )
    if args.checkpoint_activations and args.activation_bytes is not None:
        raise ValueError(
            "--checkpoint-activations: expected activations that the planner computes, got "
            "--activation-bytes. Give --batch and --sequence instead, or lower the bytes."
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
    if numel < 1:
        raise ValueError(f"--params: expected at least 1 parameter, got {numel}. Give 7e9.")
    widths = _given_bytes(args, precision.widths(args.param_dtype or "fp32"), numel)
    shape = Shape.of(numel, args.layers, args.width, args.vocabulary)
    unit_numel = _unit_numel(args, numel, itemsize)
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


# -- types of arguments ---------------------------------------------------------------------------


def _whole(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0, got {text!r}")
    return number


def _positive(text: str) -> int:
    number = _whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return number


def _worlds(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _strategies(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in NAMES:
            raise argparse.ArgumentTypeError(f"expected some of {','.join(NAMES)}, got {name!r}")
    return names

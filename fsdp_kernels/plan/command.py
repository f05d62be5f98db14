# SPDX-License-Identifier: Apache-2.0
"""The command that says whether a training fits, on how many GPUs, with which options."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fsdp_kernels.plan import options, plot, table, time_command
from fsdp_kernels.plan.job import Job
from fsdp_kernels.plan.memory import Memory, plan, smallest_world

HELP = "say how much memory a training needs, and on how many GPUs it fits"
_USAGE = """fsdp-kernels plan MODEL [options]
MODEL is one of --params N, --params-bytes BYTES, --hf-config JSON, --module PKG.MOD:MAKE"""
_EXAMPLES = """examples:
  fsdp-kernels plan --params 70e9 --param-dtype bf16 --world 8,16,64
  fsdp-kernels plan --params 7B --batch 1 --sequence 4096 --checkpoint-activations --hbm 80GB
  fsdp-kernels plan --time --params 7B --param-dtype bf16 --batch 1 --sequence 4096 --world 8

Bytes are powers of ten (80GB) unless written as GiB. docs/memory.md and docs/time.md explain."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand; its `run` takes the parsed arguments."""
    parser = commands.add_parser(
        "plan",
        help=HELP,
        usage=_USAGE,
        description="Does it fit, on how many GPUs, with which options; with --time: how fast.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_arguments(parser)
    time_command.add_arguments(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="a list, one object for each world")
    output.add_argument("--explain", action="store_true", help="each figure as a formula")
    help_ = "draw bytes by world and a step's memory; with --time utilisation and waiting"
    output.add_argument("--plot", type=Path, metavar="PNG", help=help_)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan.

    Returns:
        The exit status: 2 for impossible input, which is answered with what to change.
    """
    try:
        if args.time:
            _check_timed(args)
            time_command.run(args, options.jobs(args))
            return 0
        _check_untimed(args)
        found = [(job, [plan(job, world) for world in args.world]) for job in options.jobs(args)]
        if args.plot:
            every = [memory for _, memories in found for memory in memories]
            plot.plot(every, args.plot, found[0][0].notes[0])
    except ValueError as error:
        print(f"fsdp-kernels plan: {error}", file=sys.stderr)
        return 2
    _show(args, found)
    return 0


def _check_timed(args: argparse.Namespace) -> None:
    if args.overlap_backward:
        raise ValueError(
            "--overlap-backward: expected a plan of memory, got --time, which simulates steps "
            "after backward. Leave one of them out."
        )


def _check_untimed(args: argparse.Namespace) -> None:
    for name in ("trace", "picture"):
        if getattr(args, name):
            raise ValueError(
                f"--{name}: expected --time, got a plan of memory. Add --time, --batch and "
                "--sequence."
            )
    for name, default in time_command.DEFAULTS.items():
        if getattr(args, name) != default:
            option = "--" + name.replace("_", "-")
            raise ValueError(
                f"{option}: expected --time, got a plan of memory, which it does not change. Add "
                f"--time, --batch and --sequence, or leave {option} out."
            )


def _show(args: argparse.Namespace, found: list[tuple[Job, list[Memory]]]) -> None:
    smallest = [smallest_world(job) for job, _ in found]
    if args.json:
        rows = [
            table.as_json(memory, least)
            for (_, memories), least in zip(found, smallest, strict=True)
            for memory in memories
        ]
        print(json.dumps(rows, indent=1))
        return
    print("\n".join(found[0][0].notes))
    for (_, memories), least in zip(found, smallest, strict=True):
        print(f"\n{table.as_text(memories, least)}")
        if args.explain:
            for memory in memories:
                print(f"\n{table.explain(memory)}")

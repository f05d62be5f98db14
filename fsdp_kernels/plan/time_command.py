# SPDX-License-Identifier: Apache-2.0
"""The command with `--time`: how long a step takes, and what of it is waiting.

The defaults of links: a collective reaches eight tenths of a link's data-sheet bandwidth, and a hop
takes what NCCL's own model of rings has for it (`hwLatencies` of its tuner, protocol Simple): 3.4
microseconds over NVLink, 14 over a network.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from fsdp_kernels.plan import argument_types as types
from fsdp_kernels.plan import devices, time_plot
from fsdp_kernels.plan.job import Job
from fsdp_kernels.plan.network import Link, Network
from fsdp_kernels.plan.sizes import show_bytes
from fsdp_kernels.plan.timed_job import mesh_of, workload_of
from fsdp_kernels.plan.timing import Machine, Timing, calibrated, time_step, totals
from fsdp_kernels.trace_file import TraceFile
from fsdp_kernels.trace_picture import draw

LINK_SHARE = 0.8
INSIDE_S, BETWEEN_S = 3.4e-6, 14e-6

DEFAULTS: dict[str, object] = {
    "efficiency": 0.5,
    "measured": None,
    "micro_batches": 1,
    "host_gpus": devices.GPUS_PER_HOST,
    "nvlink": None,
    "network": None,
    "link_share": LINK_SHARE,
    "algorithm": "auto",
}
"""What only times depend on, by the names of the arguments."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only times depend on."""
    group = parser.add_argument_group("time of a step")
    add = group.add_argument
    add("--time", action="store_true", help="simulate a step instead of counting bytes")
    speed = group.add_mutually_exclusive_group()
    help_ = "share of the peak that a GPU computes at (0.5)"
    speed.add_argument("--efficiency", type=float, metavar="SHARE", help=help_)
    help_ = "tokens/s of one GPU alone with this model and batch, instead of --efficiency"
    speed.add_argument("--measured", type=float, metavar="RATE", help=help_)
    help_ = "forwards and backwards of a step (1)"
    add("--micro-batches", type=types.positive, metavar="N", help=help_)
    add("--host-gpus", type=types.positive, metavar="N", help="GPUs of a host (8)")
    help_ = "bytes/s of a GPU inside its host, one direction: 450GB"
    add("--nvlink", type=types.rate, metavar="BYTES", help=help_)
    help_ = "bytes/s of a GPU to other hosts: 50GB for 400 Gb/s"
    add("--network", type=types.rate, metavar="BYTES", help=help_)
    help_ = "of these, what collectives reach (0.8)"
    add("--link-share", type=float, metavar="SHARE", help=help_)
    add("--algorithm", choices=("auto", "ring", "tree"), help="of collectives (auto)")
    add("--trace", type=Path, metavar="JSON", help="write the last world's step for Perfetto")
    add("--picture", type=Path, metavar="SVG", help="draw the last world's step")
    parser.set_defaults(**DEFAULTS)


def run(args: argparse.Namespace, jobs: Sequence[Job]) -> None:
    """Simulate every job on every world, and print what came of it.

    Raises:
        ValueError: Something that cannot be, with what to change.
    """
    machine = machine_of(args)
    workload = workload_of(jobs[0], args.micro_batches)  # the same for every strategy
    if args.measured is not None:
        machine = calibrated(machine, workload, args.measured)
    found = [[time_step(workload, machine, mesh_of(job, w)) for w in args.world] for job in jobs]
    _write(args, found[-1][-1])
    if args.plot:
        by_strategy = {job.strategy: timings for job, timings in zip(jobs, found, strict=True)}
        time_plot.plot(by_strategy, args.plot, jobs[0].notes[0])
    if args.json:
        rows = [
            {"strategy": job.strategy, **row}
            for job, timings in zip(jobs, found, strict=True)
            for row in totals(timings)
        ]
        print(json.dumps(rows, indent=1))
        return
    print("\n".join(jobs[0].notes))
    for job, timings in zip(jobs, found, strict=True):
        print(f"\n{as_text(job.strategy, timings)}")


def machine_of(args: argparse.Namespace) -> Machine:
    """Return the device and its links.

    Raises:
        ValueError: The device does not compute in that dtype, or a number cannot be.
    """
    device = devices.find(args.device)
    dtype = args.param_dtype or "bf16"
    if dtype not in device.flops:
        raise ValueError(
            f"--param-dtype: expected {', '.join(device.flops)} for {device.name}, got {dtype}. "
            "Take one of these, or another --device."
        )
    if not 0 < args.link_share <= 1:
        raise ValueError(
            f"--link-share: expected a share above 0 and up to 1, got {args.link_share}. Measure "
            "it: bus bandwidth of a large all-gather over the link's."
        )
    inside = args.nvlink or device.nvlink_bytes_per_s
    between = args.network or device.network_bytes_per_s
    network = Network(
        Link(inside * args.link_share, INSIDE_S),
        Link(between * args.link_share, BETWEEN_S),
        args.host_gpus,
        args.algorithm,
    )
    return Machine(device.flops[dtype], device.memory_bytes_per_s, network, args.efficiency)


def as_text(strategy: str, timings: Sequence[Timing]) -> str:
    """Return a table with a row for each world."""
    head = (strategy, "step", "compute", "waiting", "tokens/s/GPU", "MFU", "peak beside state")
    rows = [head]
    for timing in timings:
        mesh, step = timing.mesh, timing.step
        groups = f" ({mesh.world // mesh.shard} x {mesh.shard})" if mesh.shard < mesh.world else ""
        rows.append(
            (
                f"{mesh.world} GPU{'s' * (mesh.world > 1)}{groups if mesh.shard > 1 else ''}",
                _seconds(step.seconds),
                _seconds(step.compute_s),
                f"{_seconds(step.exposed_s)} ({step.exposed_s / step.seconds:.1%})",
                f"{timing.tokens_per_s:,.0f}",
                f"{timing.mfu:.1%}",
                show_bytes(step.peak_bytes()),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _write(args: argparse.Namespace, timing: Timing) -> None:
    """Write the files that were asked for, of one step."""
    mesh = timing.mesh
    name = f"one step, simulated: {mesh.strategy} on {mesh.world} {args.device}"
    trace = timing.step.trace(name)
    files = {"--trace": args.trace, "--picture": args.picture}
    for (option, path), write in zip(files.items(), (trace.save, _draw(trace)), strict=True):
        if path is None:
            continue
        try:
            write(path)
        except OSError as error:
            raise ValueError(
                f"{option}: expected a file that can be written, got {str(path)!r}: {error}. "
                "Choose another file."
            ) from error


def _draw(trace: TraceFile) -> Callable[[Path], object]:
    return lambda path: path.write_text(draw(trace))

# SPDX-License-Identifier: Apache-2.0
"""Simulated steps by world as a picture: utilisation, and what a step waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fsdp_kernels.plan.timing import Timing


def plot(found: Mapping[str, Sequence[Timing]], path: Path, title: str) -> None:
    """Draw a line for each strategy over the number of GPUs.

    Args:
        found: By strategy, in the order of worlds.
        path: The picture, in a format that its name says.
        title: What is trained.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
        from matplotlib.ticker import FuncFormatter
    except ImportError as error:
        raise ValueError(
            "--plot: expected matplotlib, got none. Install it (pip install matplotlib), or take "
            "--json."
        ) from error
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for strategy, timings in found.items():
        worlds = [timing.mesh.world for timing in timings]
        left.plot(worlds, [100 * timing.mfu for timing in timings], marker="o", label=strategy)
        waiting = [100 * timing.step.exposed_s / timing.step.seconds for timing in timings]
        right.plot(worlds, waiting, marker="o", label=strategy)
    left.set_ylabel("model FLOPs utilisation, %")
    right.set_ylabel("step spent waiting for communication, %")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda world, _: f"{world:,.0f}"))
        axes.set_xlabel("GPUs")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)

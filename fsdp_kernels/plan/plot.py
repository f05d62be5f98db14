# SPDX-License-Identifier: Apache-2.0
"""Pictures of a plan: bytes by kind for each world, and the memory of one step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_kernels.plan.memory import KINDS, Memory

_GB = 1e9
_COLOURS = {
    "params": "#1f77b4",
    "params_shard": "#6baed6",
    "master": "#9ecae1",
    "grads": "#ff7f0e",
    "grads_shard": "#fdae6b",
    "optimizer": "#2ca02c",
    "gather": "#17becf",
    "reduce": "#d62728",
    "autograd": "#e377c2",
    "stepping": "#fdd0a2",
    "activation": "#9467bd",
}


def plot(memories: Sequence[Memory], path: Path, title: str) -> None:
    """Draw bars for each world, and the step of the last one.

    Args:
        memories: Of one job or several.
        path: A PNG, SVG or PDF file.
        title: Of the whole picture.

    Raises:
        ValueError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(
            "--plot: expected matplotlib to be installed, got none. Run "
            "pip install matplotlib, or leave --plot out."
        ) from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    _bars(left, memories)
    _step(right, memories[-1])
    figure.suptitle(title)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small")
    try:
        figure.savefig(path, dpi=90)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--plot: expected a .png, .svg or .pdf file that can be written, got {str(path)!r}: "
            f"{error}. Choose another file."
        ) from error
    finally:
        pyplot.close(figure)


def _bars(axes: Any, memories: Sequence[Memory]) -> None:
    """Stack what each world holds; full buckets, activations and gradients at the peak."""
    several = len({memory.job.strategy for memory in memories}) > 1
    names = [f"{m.job.strategy}\n{m.world}" if several else str(m.world) for m in memories]
    places = range(len(memories))
    base = [0.0] * len(memories)
    for kind in KINDS:
        heights = [_at_peak(memory, kind) / _GB for memory in memories]
        if any(heights):
            axes.bar(places, heights, bottom=base, label=KINDS[kind], color=_COLOURS[kind])
        base = [a + b for a, b in zip(base, heights, strict=True)]
    _limit(axes, memories[-1])
    axes.set(xticks=list(places), xticklabels=names, xlabel="GPUs", ylabel="GB on each GPU")


def _at_peak(memory: Memory, kind: str) -> int:
    moment = memory.highest
    passing = {
        "activation": moment.activation,
        "autograd": moment.autograd,
        "stepping": sum(moment.stepping.values()),
    }
    return passing[kind] if kind in passing else memory.nbytes(kind)


def _step(axes: Any, memory: Memory) -> None:
    """Stack what is in use while a step goes on."""
    moments = memory.passing.moments
    layers = {
        "activation": [moment.activation / _GB for moment in moments],
        "gather": [moment.gather / _GB for moment in moments],
        "reduce": [moment.reduce / _GB for moment in moments],
        "autograd": [moment.autograd / _GB for moment in moments],
        "stepping": [sum(moment.stepping.values()) / _GB for moment in moments],
    }
    places = range(len(moments))
    steady = [memory.steady / _GB] * len(moments)
    axes.stackplot(
        places,
        steady,
        *layers.values(),
        colors=["#c7c7c7", *(_COLOURS[kind] for kind in layers)],
        step="post",
    )
    axes.axhline(memory.peak / _GB, color="black", linestyle="--", linewidth=0.8)
    text = " peak: full buckets stay allocated"
    axes.annotate(text, (0, memory.peak / _GB), fontsize="small", va="bottom")
    backward = next(i for i, moment in enumerate(moments) if moment.what.startswith("backward"))
    axes.axvline(backward, color="grey", linewidth=0.8)
    world = f"{memory.world} GPU{'s' * (memory.world > 1)}"
    axes.set(
        xticks=[backward / 2, (backward + len(moments)) / 2],
        xticklabels=["forward", "backward"],
        title=f"one step of {memory.job.strategy} on {world} (grey: what stays)",
        ylabel="GB in use",
        xlim=(0, len(moments) - 1),
        ylim=(0, 1.1 * memory.peak / _GB),
    )


def _limit(axes: Any, memory: Memory) -> None:
    if memory.job.memory_bytes is not None:
        axes.axhline(memory.job.memory_bytes / _GB, color="red", linewidth=0.8)

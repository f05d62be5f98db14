# SPDX-License-Identifier: Apache-2.0
"""Draws the recorded rows: one picture for each bench, the newest row of each command.

Bars are medians with the middle half of the times; the number at a bar is its ratio to ours in the
same run. Bandwidths of collectives are lines over the bucket's size. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import rows

matplotlib.use("Agg")  # no display is needed
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

Row = dict[str, Any]
Draw = Callable[[Axes, Row], None]
OURS, OTHERS = "tab:blue", "tab:gray"
WIDTH, TITLE = 11, 80  # inches; characters of the command


def newest(file: Path) -> list[Row]:
    """Return the last row of each command, in the order in which the commands came first."""
    found: dict[str, Row] = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        # One command of the step bench may leave a row for each world and clipping.
        key = json.dumps([row["command"], row.get("world"), row.get("clip")])
        found[key] = row
    return list(found.values())


def bars(axes: Axes, values: dict[str, float], spreads: dict[str, float], notes: list[str]) -> None:
    """Draw one horizontal bar for each name, the first on top."""
    names = list(values)
    colours = [OURS if name.startswith("ours") else OTHERS for name in names]
    errors = [values[name] * spreads.get(name, 0.0) / 2 for name in names]
    axes.barh(names, list(values.values()), xerr=errors, color=colours, ecolor="black", capsize=2)
    for place, note in enumerate(notes):
        axes.annotate(
            note, (0, place), xytext=(4, 0), textcoords="offset points", va="center", color="white"
        )
    axes.invert_yaxis()


def times(axes: Axes, row: Row) -> None:
    """Draw the medians of a bench whose sides were timed once each."""
    sides = row["sides"]
    values = {name: side["ms"] for name, side in sides.items()}
    spreads = {name: side.get("spread", 0.0) for name, side in sides.items()}
    bars(axes, values, spreads, [f"{side['ratio_to_ours']:.2f} x" for side in sides.values()])
    axes.set_xlabel("ms, median")


def host(axes: Axes, row: Row) -> None:
    """Draw how much more host time FSDP2 takes, part by part."""
    values, spreads = {}, {}
    for world, parts in row["worlds"].items():
        for part, clocks in parts.items():
            name = f"{part}, {world} rank(s)"
            values[name] = clocks["host"]["fsdp2_over_ours"]
            spreads[name] = clocks["host"].get("spread", 0.0)
    bars(axes, values, spreads, [f"{value:.2f} x" for value in values.values()])
    axes.axvline(1.0, color="black")
    axes.set_xlabel("FSDP2's host time over ours")


def memory(axes: Axes, row: Row) -> None:
    """Draw bytes at rest over bytes at the peak."""
    sides = row["sides"]
    for key, colour in (("peak_bytes", "lightgray"), ("rest_bytes", "tab:blue")):
        names, values = list(sides), [side[key] / 1e6 for side in sides.values()]
        axes.barh(names, values, color=colour, label=key.removesuffix("_bytes"))
    axes.invert_yaxis()
    axes.axvline(row["ideal_bytes"] / row["world"] / 1e6, color="black", label="ideal, sharded")
    axes.set_xlabel("MB of a rank")
    axes.legend()


def bandwidths(axes: Axes, row: Row) -> None:
    """Draw bus bandwidth over the bucket's size, a line for each side and operation."""
    styles = {"all_gather": "-", "reduce_scatter": "--", "all_reduce": ":"}
    colours: dict[str, str] = {}
    lines: dict[tuple[str, str], list[Row]] = {}
    for point in row["sides"]:
        lines.setdefault((point["side"], point["operation"]), []).append(point)
    for (side, operation), points in lines.items():
        colour = colours.setdefault(side, f"C{len(colours)}")
        sizes = [point["bytes"] for point in points]
        bus = [point["bus_gb_per_s"] for point in points]
        label = f"{side}, {operation}"
        axes.plot(sizes, bus, styles[operation], color=colour, marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes of the full bucket")
    axes.set_ylabel("bus bandwidth, GB/s")
    axes.legend(fontsize="small")


DRAWN: dict[str, Draw] = {"host": host, "memory": memory, "collectives": bandwidths}
"""How a bench's rows are drawn, where it is not as `times`."""


def draw(bench: str, found: list[Row], output: Path) -> Path:
    """Draw a bench's rows one under the other; return the picture."""
    heights = [max(len(row.get("sides", ())), 8) * 0.3 + 1.2 for row in found]
    if bench == "collectives":
        heights = [5.0] * len(found)
    figure, axes = plt.subplots(
        len(found), 1, figsize=(WIDTH, sum(heights)), squeeze=False, height_ratios=heights
    )
    for one, row in zip(axes[:, 0], found, strict=True):
        DRAWN.get(bench, times)(one, row)
        what = f", {row['world']} ranks, clip {row.get('clip')}" if bench == "step" else ""
        one.set_title(f"{row['command'][:TITLE]}{what} ({row['date']})", fontsize="small")
    figure.tight_layout()
    path = output / f"{bench}.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=rows.results(), help="folder of .jsonl files")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    files = sorted(args.rows.glob("*.jsonl"))
    drawn = [draw(file.stem, found, args.output) for file in files if (found := newest(file))]
    print(json.dumps({"bench": "plot", "pictures": [str(path) for path in drawn]}))


if __name__ == "__main__":
    main()

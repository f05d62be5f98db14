# SPDX-License-Identifier: Apache-2.0
"""A trace as a picture: rows of slices over a time axis, counters below, as SVG text.

The text depends on the trace alone, so a picture in the documentation can be held against what is
drawn now.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import floor, log10

from fsdp_kernels.trace_file import Sample, Slice, TraceFile, verb_of

_COLOURS = {
    "forward": "#8ecae6",
    "backward": "#219ebc",
    "recompute": "#b8c0c8",
    "gather": "#f4a259",
    "reduce": "#8cb369",
    "pack": "#5b8e7d",
    "step": "#bc4b51",
    "norm": "#e07a5f",
    "wait": "#e5e5e5",
}
_OTHER = "#cccccc"
_LEFT, _WIDTH, _RIGHT, _TOP = 92, 900, 78, 24
_ROW, _COUNTER, _GAP = 22, 52, 6
_LETTER = 5.2  # pixels of width, at font size 10


def draw(trace: TraceFile, rows: Sequence[str] | None = None) -> str:
    """Return the picture of a trace as SVG.

    Args:
        trace: What is drawn.
        rows: The rows that are drawn, from top to bottom; None draws all.

    Raises:
        ValueError: There is nothing to draw.
    """
    shown = trace.all_rows() if rows is None else list(rows)
    slices = [one for one in trace.slices if one.row in shown]
    if not slices:
        raise ValueError(f"trace '{trace.name}': expected slices to draw, got none. Record a step.")
    start = min(one.start_ns for one in slices)
    stop = max(one.stop_ns for one in slices)
    scale = _WIDTH / max(1, stop - start)
    body: list[str] = []
    for index, row in enumerate(shown):
        y = _TOP + index * (_ROW + _GAP)
        body.append(_text(_LEFT - 8, y + 15, row, anchor="end"))
        for one in slices:
            if one.row == row:
                body += _rectangle(one, _LEFT + (one.start_ns - start) * scale, y, scale)
    y = _TOP + len(shown) * (_ROW + _GAP)
    for counter in dict.fromkeys(sample.counter for sample in trace.samples):
        samples = [sample for sample in trace.samples if sample.counter == counter]
        body += _curve(counter, samples, (start, stop), y)
        y += _COUNTER + _GAP
    body += _axis(stop - start, y)
    width, height = _LEFT + _WIDTH + _RIGHT, y + 22
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" font-size="10">',
            f"<title>{escape(trace.name)}</title>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
            _text(_LEFT, 14, trace.name),
            *body,
            "</svg>\n",
        ]
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _rectangle(one: Slice, x: float, y: float, scale: float) -> list[str]:
    width = (one.stop_ns - one.start_ns) * scale
    colour = _COLOURS.get(verb_of(one.label), _OTHER)
    label = one.label.removeprefix("fk.")
    parts = [
        f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.3):.2f}" height="{_ROW}" '
        f'fill="{colour}" stroke="white" stroke-width="0.4">'
        f"<title>{escape(one.label)}: {_time(one.stop_ns - one.start_ns)}</title></rect>"
    ]
    fitting = next((t for t in (label, verb_of(one.label)) if len(t) * _LETTER < width), None)
    if fitting is not None:
        parts.append(_text(x + width / 2, y + 15, fitting, anchor="middle"))
    return parts


def _curve(counter: str, samples: Sequence[Sample], span: tuple[int, int], y: float) -> list[str]:
    """Draw a counter as steps, filled from zero, with its largest value beside it."""
    start, stop = span
    most = max(sample.value for sample in samples) or 1
    bottom = y + _COUNTER

    def point(time_ns: int, value: int) -> str:
        x = _LEFT + (time_ns - start) * _WIDTH / max(1, stop - start)
        return f"{min(max(x, _LEFT), _LEFT + _WIDTH):.2f},{bottom - value * _COUNTER / most:.2f}"

    points, value = [f"{_LEFT},{bottom}"], 0
    for sample in samples:
        points += [point(sample.time_ns, value), point(sample.time_ns, sample.value)]
        value = sample.value
    points += [point(stop, value), f"{_LEFT + _WIDTH},{bottom}"]
    return [
        _text(_LEFT - 8, y + _COUNTER / 2 + 4, counter, anchor="end"),
        f'<polygon points="{" ".join(points)}" fill="#d8dee9" stroke="#4c566a" '
        'stroke-width="0.6"/>',
        _text(_LEFT + _WIDTH + 6, y + 10, _bytes(most)),
    ]


def _axis(length: int, y: float) -> list[str]:
    """Draw the time axis, with round ticks."""
    rough = length / 8
    power = 10 ** floor(log10(max(rough, 1)))
    tick = next(step * power for step in (1, 2, 5, 10) if step * power >= rough)
    parts = []
    for number in range(int(length / tick) + 1):
        x = _LEFT + number * tick * _WIDTH / max(1, length)
        parts.append(
            f'<line x1="{x:.2f}" y1="{_TOP}" x2="{x:.2f}" y2="{y:.1f}" stroke="#999" '
            'stroke-width="0.3" stroke-dasharray="2 3"/>'
        )
        parts.append(_text(x, y + 14, _time(round(number * tick)), anchor="middle"))
    return parts


def _time(ns: int) -> str:
    for unit, size in (("s", 10**9), ("ms", 10**6), ("µs", 10**3)):
        if ns >= size:
            return f"{ns / size:.4g} {unit}"
    return f"{ns} ns" if ns else "0"


def _bytes(value: int) -> str:
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value} B"

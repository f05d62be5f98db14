# SPDX-License-Identifier: Apache-2.0
"""Bytes and counts as people write them; bytes are powers of ten, unless written in GiB."""

from __future__ import annotations

import argparse
import re
from fractions import Fraction

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1000**_power, _letter + "b": 1000**_power, _letter + "ib": 1024**_power}
_SIZE = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Read ``80GB``, ``80GiB``, ``140e9`` or a plain number of bytes.

    Raises:
        argparse.ArgumentTypeError: It is none of these.
    """
    found = _SIZE.fullmatch(text.strip())
    unit = found and _UNITS.get(found[2].lower())
    if not found or not unit:
        raise argparse.ArgumentTypeError(
            f"expected bytes, got {text!r}. Write 80GB (powers of ten), 80GiB or 80e9"
        )
    return _whole(text, found[1], unit, "bytes")


def parse_count(text: str) -> int:
    """Read ``70e9``, ``70B`` (billions), ``350M`` or a plain number.

    Raises:
        argparse.ArgumentTypeError: It is none of these.
    """
    found = _SIZE.fullmatch(text.strip())
    letters = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
    unit = found and letters.get(found[2].lower())
    if not found or not unit:
        raise argparse.ArgumentTypeError(
            f"expected a number, got {text!r}. Write 70e9, 70B or 350M"
        )
    return _whole(text, found[1], unit, "a number")


def _whole(text: str, digits: str, unit: int, what: str) -> int:
    try:
        value = Fraction(digits) * unit
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}") from error
    if value.denominator != 1:
        raise argparse.ArgumentTypeError(f"expected {what} without a fraction, got {text!r}")
    return int(value)


def show_bytes(nbytes: int) -> str:
    """Write bytes with three or four digits: ``17.5 GB``."""
    if nbytes < 1000:
        return f"{nbytes} B"
    names = ("kB", "MB", "GB", "TB", "PB")
    power = next((i for i in range(1, 5) if nbytes < 999.95 * 1000**i), 5)
    value = nbytes / 1000**power
    return f"{value:.4g} {names[power - 1]}" if value >= 100 else f"{value:.3g} {names[power - 1]}"


def show_count(number: int) -> str:
    """Write a count with few digits where it is round: ``70e9``, else with commas."""
    for power in (12, 9, 6):
        scaled = Fraction(number, 10**power)
        if scaled >= 1 and (scaled * 1000).denominator == 1:
            return f"{float(scaled):g}e{power}"
    return f"{number:,}"


def show_width(width: Fraction) -> str:
    """Write bytes per parameter."""
    return f"{float(width):.6g} B"

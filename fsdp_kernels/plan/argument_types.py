# SPDX-License-Identifier: Apache-2.0
"""What the words after options are read as.

A bare 80 is 80 bytes, which nobody means who asks for a device's memory: what is too small to be
meant is refused with what to write.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any

from fsdp_kernels.plan.job import NAMES
from fsdp_kernels.plan.sizes import parse_bytes, parse_count, show_bytes

_LEAST_PARAMS = 1000
_BARE = re.compile(r"\s*([0-9.]*[1-9][0-9.]*)\s*[bB]?\s*")
_BITS = re.compile(r".*[KMGT]b(ps|/s)?\s*")


def params(text: str) -> int:
    """Read a number of parameters."""
    found = parse_count(text)
    if found < _LEAST_PARAMS:
        bare = _BARE.fullmatch(text)
        raise argparse.ArgumentTypeError(
            f"expected at least {_LEAST_PARAMS:,} parameters, got {text!r}. "
            f"Write {bare[1] if bare else 7}e9"
        )
    return found


def size(least: int, *, zero: bool = False) -> Callable[[str], int]:
    """Return what reads bytes, at least so many, or, with `zero`, none at all."""

    def read(text: str) -> int:
        found = parse_bytes(text)
        if found < least and (found or not zero):
            bare = _BARE.fullmatch(text)
            raise argparse.ArgumentTypeError(
                f"expected {'0 or ' * zero}at least {show_bytes(least)}, got {text!r}, which is "
                f"{show_bytes(found)}. Write {bare[1] if bare else 80}GB"
            )
        return found

    return read


def rate(text: str) -> int:
    """Read bytes per second of a link; data sheets of networks have bits."""
    if _BITS.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"expected bytes per second, got {text!r}, which are bits. Write 50GB for 400 Gb/s"
        )
    return size(10**6)(text)


def whole(text: str, least: int = 0) -> int:
    """Read a whole number from `least`."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"expected a whole number from {least}, got {text!r}")
    return number


def positive(text: str) -> int:
    """Read a whole number from 1."""
    return whole(text, 1)


def worlds(text: str) -> list[int]:
    """Read numbers of GPUs."""
    return [positive(part) for part in text.split(",")]


def strategies(text: str) -> list[str]:
    """Read names of strategies."""
    names = text.split(",")
    for name in names:
        if name not in NAMES:
            raise argparse.ArgumentTypeError(f"expected some of {','.join(NAMES)}, got {name!r}")
    return names


class Joined(argparse.Action):
    """Joins lists: ``8,16 32`` is three worlds."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Set what was read."""
        setattr(namespace, self.dest, [one for part in values or () for one in part])

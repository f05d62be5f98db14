# SPDX-License-Identifier: Apache-2.0
"""``fsdp-kernels bench``: finds the benches, lists them, runs one."""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = ("adam", "reduce_adam", "pack", "norm", "collectives", "step", "host", "memory", "plot")


def add_parser(commands: Any) -> None:
    """Register the subcommand: what follows ``bench`` is the bench's name, and its own options."""
    # No character begins an option of the subcommand's own: all words go to the bench.
    parser = commands.add_parser(
        "bench", add_help=False, prefix_chars="\0", help="measure something; no name: the list"
    )
    parser.add_argument("words", nargs="*", metavar="NAME [options]")
    parser.set_defaults(run=lambda args: run(args.words))


def folder() -> Path:
    """Return where the benches are: in the package when installed, beside it in a source tree.

    Raises:
        FileNotFoundError: In neither place.
    """
    package = Path(__file__).parent
    for found in (package / "bench", package.parent / "bench"):
        if (found / "rows.py").is_file():
            return found
    raise FileNotFoundError(
        f"fsdp-kernels bench: expected the benches in {package / 'bench'}, got no such folder. "
        "Install the package again, or run from a source tree."
    )


def run(words: Sequence[str]) -> int:
    """Run a bench in this process, or list all.

    Args:
        words: The bench's name and its options; nothing, ``--list`` or ``--help`` for the list.

    Returns:
        The exit status.
    """
    if not words or words[0] in ("--list", "-l", "--help", "-h"):
        print(listing())
        return 0
    name, *options = words
    if name not in NAMES:
        print(
            f"fsdp-kernels bench: expected one of {', '.join(NAMES)}, got {name!r}. "
            "`fsdp-kernels bench --list` says what each measures.",
            file=sys.stderr,
        )
        return 2
    kept = sys.argv, list(sys.path)
    # The benches import one another by their bare names, as when they are run as scripts.
    sys.argv = [f"fsdp-kernels bench {name}", *options]
    sys.path.insert(0, str(folder()))
    try:
        runpy.run_path(str(folder() / f"{name}.py"), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = kept
    return 0


def listing() -> str:
    """Say what each bench measures, in the first sentence of its own words."""
    lines = ["fsdp-kernels bench NAME [options]; each NAME has --help.", ""]
    for name in NAMES:
        words = ast.get_docstring(ast.parse((folder() / f"{name}.py").read_text())) or ""
        lines.append(f"  {name:13}{words.splitlines()[0]}")
    return "\n".join(lines)

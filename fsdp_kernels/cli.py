# SPDX-License-Identifier: Apache-2.0
"""The command line: `fsdp-kernels env`, `fsdp-kernels plan`, `fsdp-kernels bench`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from fsdp_kernels import _benches
from fsdp_kernels._environment import environment
from fsdp_kernels.plan import command as plan

_HELP = "What is here (env), what a training needs (plan), what is fast (bench)."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: The arguments; those of the process by default.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="fsdp-kernels", description=_HELP)
    commands = parser.add_subparsers(dest="command", required=True)
    env = commands.add_parser("env", help="print versions, what was built, and the devices")
    env.add_argument("--json", action="store_true", help="as one JSON object")
    env.set_defaults(run=_env)
    plan.add_parser(commands)
    _benches.add_parser(commands)
    args = parser.parse_args(argv)
    return int(args.run(args))


def _env(args: argparse.Namespace) -> int:
    found = environment()
    print(json.dumps(found) if args.json else _text(found))
    return 0


def _text(values: dict[str, Any], indent: str = "") -> str:
    """Spell nested dicts and lists as indented ``name: value`` lines."""
    lines = []
    for name, value in values.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}:", _text(value, indent + "  ")]
        elif isinstance(value, list):
            for index, item in enumerate(value):
                lines += [f"{indent}{name}[{index}]:", _text(item, indent + "  ")]
        else:
            lines.append(f"{indent}{name}: {'-' if value is None else value}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

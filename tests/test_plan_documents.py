# SPDX-License-Identifier: Apache-2.0
"""The commands that documents show for the planner print what stands below them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_kernels.cli import main
from fsdp_kernels.plan.sizes import show_bytes

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "docs/memory.md", "docs/time.md")
PLAN = "fsdp-kernels plan "
OMITTED = "..."
NEEDS_A_MODEL = ("--hf-config", "--module")


def blocks(document: str) -> list[list[str]]:
    """Return the lines of each fenced block, continued lines joined."""
    text = (ROOT / document).read_text().replace("\\\n", "")
    return [found.splitlines() for found in re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)]


def shown(document: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command that stands after a prompt, with what is shown of its output."""
    for lines in blocks(document):
        starts = [i for i, line in enumerate(lines) if line.startswith(f"$ {PLAN}")]
        for start, end in zip(starts, [*starts, len(lines)][1:], strict=True):
            yield lines[start].removeprefix("$ "), lines[start + 1 : end]


def mentioned(document: str) -> list[str]:
    """Return the commands without output, in blocks or indented."""
    lines = [line for block in blocks(document) for line in block]
    text = (ROOT / document).read_text()
    lines += re.findall(rf"^    ({PLAN}.*)$", text, re.M)
    return [line for line in lines if line.startswith(PLAN)]


def output(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(shlex.split(command)[1:]) == 0, command
    return capsys.readouterr().out


def pattern(lines: list[str]) -> str:
    """What an output must match of which some lines are left out."""
    parts = [r"(?:.*\n)*?" if line == OMITTED else re.escape(line) + r"\n" for line in lines]
    return "".join(parts)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_print_what_is_shown(document: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command, lines in shown(document):
        found = output(command, capsys)
        assert re.fullmatch(pattern(lines), found), f"{document}: {command} prints\n{found}"


def test_the_pages_show_commands() -> None:
    assert [len(list(shown(document))) for document in DOCUMENTS] == [1, 6, 0]
    assert all(mentioned(document) for document in DOCUMENTS)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_that_are_mentioned_run(
    document: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without pictures, which other tests draw, and models, which are the reader's."""
    for command in mentioned(document):
        if not any(option in command for option in NEEDS_A_MODEL):
            output(re.sub(r"--plot \S+", "", command), capsys)


def test_the_table_of_options(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/memory.md").read_text()
    (base,) = re.findall(rf"^`({PLAN}[^`]*)` with$", text, re.M)
    rows = re.findall(r"^\| [^|]+ \| `(--[^`|]*)` \|(.*) \|$", text, re.M)
    assert len(rows) == 5
    for options, cells in rows:
        (found,) = json.loads(output(f"{base} {options} --json", capsys))
        passing = sum(found[f"{kind}_bytes"] for kind in ("gather", "reduce", "autograd"))
        kinds = found["steady_bytes"], passing, found["activation_bytes"], found["peak_bytes"]
        assert [cell.strip() for cell in cells.split("|")] == [show_bytes(n) for n in kinds]

"""Who comes from a system of their own types its words, and is answered with ours: docs/migrating.md, row by row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from gpuinfer.cli import serve
from gpuinfer.cli.workload import command
from gpuinfer.config.foreign_names import flag_hint

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "migrating.md").read_text()
FLAG = re.compile(r"--[a-z][a-z-]+")
OPTION = re.compile(r"-[BSL] ([a-z_]+)=|(--[a-z][a-z-]+)")
METRICS = (ROOT / "docs" / "reference" / "metrics.md").read_text()


def tables() -> list[tuple[str, str, str]]:
    """(command's name, flag there, cell here) of each flag in a table that says of which command it is."""
    found = []
    for name, body in re.findall(r"^\| `gpuinfer (\w+)`: there \| here \|\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.M):
        for row in body.splitlines():
            there, here = row.strip("| ").split(" | ", 1)
            found += [(name, flag, here) for flag in FLAG.findall(there)]
    return found


def flags_of(name: str) -> set[str]:
    one = typer.main.get_command(serve.app) if name == "serve" else command(name)
    return {flag for parameter in one.params for flag in (*parameter.opts, *parameter.secondary_opts)}


def named(text: str) -> set[str]:
    """The flags and options of ours that a text names."""
    return {option or flag for option, flag in OPTION.findall(text)}


@pytest.mark.parametrize(("name", "theirs", "here"), tables())
def test_a_flag_of_theirs_is_one_here_or_is_answered_with_what_the_page_says(name, theirs, here):
    known = flags_of(name)
    if theirs in known:
        assert here == "the same" or theirs in here
        return
    hint = flag_hint(theirs, known)
    if here.startswith("not needed"):
        assert hint.endswith("Leave it out.")
        return
    assert named(hint), f"no hint for {theirs}"
    assert named(hint) <= named(here), hint


def test_each_kind_of_system_has_a_section_with_commands_and_what_is_left_out():
    sections = PAGE.split("\n## ")[1:]
    assert len(sections) == 5
    for section in sections:
        assert "\n```\n" in section, section[:40]
        assert re.search(r"^Left out: ", section, re.M), section[:40]


def test_each_metric_that_the_page_names_is_exported():
    named = set(re.findall(r"`(gpuinfer_\w+)`", PAGE))
    assert len(named) > 10
    assert {name for name in named if f"| `{name}` |" not in METRICS} == set()

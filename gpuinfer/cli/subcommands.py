"""Subcommands of a workload's command, such as `gpuinfer rollouts export`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

WORDS = {
    "rollouts": {
        "export": "What a trainer reads, from the records of a run.",
        "show": "What a folder of records holds.",
    },
    "selfplay": {"export": "The positions of a run's records as one Parquet file."},
}
"""Workload → word → what it does. The commands are those of `gpuinfer.cli.<workload>_export`."""


def word_of(words: Sequence[str]) -> str | None:
    """The second word of a command line, where it is a subcommand of the workload that the first names."""
    return words[1] if len(words) > 1 and words[1] in WORDS.get(words[0], ()) else None


def command(workload: str, word: str) -> Any:
    """The command, ready to be called."""
    import typer

    return typer.main.get_command(importlib.import_module(f"gpuinfer.cli.{workload}_export").COMMANDS[word])


def mentioned(workload: str) -> str:
    """A line for the workload's `--help`; "" where it has no subcommand."""
    words = WORDS.get(workload, {}).items()
    return "".join(f"\n\n`gpuinfer {workload} {word} --help`: {what}" for word, what in words)

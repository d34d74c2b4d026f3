"""Second words of a command line, such as `gpuinfer rollouts export`."""

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
    "simulate": {"cluster": "A run on many nodes: efficiency, and what of the coordinator breaks first."},
}
"""Command → word → what it does."""
MODULES = {"rollouts": "rollouts_export", "selfplay": "selfplay_export", "simulate": "simulate_cluster"}
"""Command → the file of `gpuinfer.cli` that has those of its words."""


def word_of(words: Sequence[str]) -> str | None:
    """The second word of a command line, where it is one of the command that the first names."""
    return words[1] if len(words) > 1 and words[1] in WORDS.get(words[0], ()) else None


def command(name: str, word: str) -> Any:
    """The command, ready to be called."""
    import typer

    return typer.main.get_command(importlib.import_module(f"gpuinfer.cli.{MODULES[name]}").COMMANDS[word])


def mentioned(name: str) -> str:
    """A line for the command's `--help`; "" where it has no such words."""
    words = WORDS.get(name, {}).items()
    return "".join(f"\n\n`gpuinfer {name} {word} --help`: {what}" for word, what in words)

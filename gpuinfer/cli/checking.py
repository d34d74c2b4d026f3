"""What people see while a package is checked: each finding as soon as it is there, and what is being tried."""

from __future__ import annotations

import shutil
import sys
import textwrap
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from gpuinfer.testing import Finding

QUIET_S = 3.0  # a check that takes longer is named while it goes on
MARKS = {"held": ("✓", typer.colors.GREEN), "broken": ("✗", typer.colors.RED), "skipped": ("–", typer.colors.YELLOW)}
INDENT = 4


class Shown:
    """Draws on standard output; what goes on meanwhile on standard error."""

    def __init__(self) -> None:
        self._plugin = ""
        self._waiting: threading.Timer | None = None

    def tell(self, plugin: str, check: str, finding: Finding | None) -> None:
        """A check begins, or has been made."""
        self._stop_waiting()
        if plugin != self._plugin:
            self._plugin = plugin
            typer.secho(plugin, bold=True)
        if finding is None:
            self._waiting = threading.Timer(QUIET_S, _say, (f"  … {check}",))
            self._waiting.daemon = True
            self._waiting.start()
        else:
            self._show(finding)

    def _show(self, finding: Finding) -> None:
        mark, colour = MARKS[_state(finding)]
        typer.echo(f"  {typer.style(mark, fg=colour)} {finding.name}")
        for line in _wrapped(finding.detail):
            typer.echo(line)

    def sum_up(self, findings: Sequence[Finding]) -> None:
        self._stop_waiting()
        states = [_state(finding) for finding in findings]
        parts = [f"{states.count('held')} of {len(findings)} checks hold"]
        parts += [f"{count} {words}" for state, words in WORDS.items() if (count := states.count(state))]
        typer.echo(", ".join(parts))

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()


WORDS = {"broken": "do not", "skipped": "were not tried"}


def _state(finding: Finding) -> str:
    return "skipped" if finding.skipped else "held" if finding.ok else "broken"


def _wrapped(text: str) -> list[str]:
    columns = max(40, shutil.get_terminal_size().columns)
    return textwrap.wrap(text, columns, initial_indent=" " * INDENT, subsequent_indent=" " * INDENT)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

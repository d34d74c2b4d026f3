"""Lines that a person types, or a pipe, and what is said to them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from gpuinfer.cli.problems import MARGIN
from gpuinfer.errors import UsageError
from gpuinfer.host.terminal import dim, printable, show_status, write


class TalkScreen:
    """Lines from standard input, which are `messages` or `moves`, and notes to standard error."""

    def __init__(self, command: str, lines: str, quiet: bool = False) -> None:
        if sys.stdin is None:
            said = f"{command} reads {lines}, and there is no standard input."
            raise UsageError(f"{said} Run it in a terminal, or pipe them.")
        self.talks, self.shows, self._quiet = sys.stdin.isatty(), sys.stdout.isatty(), quiet
        if self.talks and self.shows:
            with contextlib.suppress(ImportError):
                import readline

                readline.parse_and_bind("set enable-bracketed-paste on")
        else:
            sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        if not self._quiet:
            show_status(what)
        try:
            yield
        finally:
            show_status("")

    def ask(self, asking: str) -> str:
        """The next line. Raises `EOFError`."""
        if not self.talks:
            if not (line := sys.stdin.readline()):
                raise EOFError
            return line.removesuffix("\n")
        if not self.shows:
            write(asking, sys.stderr)
            return input()
        try:
            return input(asking)  # edited with readline
        except (EOFError, KeyboardInterrupt):
            print()  # what is said next stands on a line of its own
            raise

    def note(self, text: str) -> None:
        if not self._quiet:
            write((dim(printable(text)) if sys.stderr.isatty() else text) + "\n", sys.stderr)

    def complain(self, text: str) -> None:
        write(f"{MARGIN}{printable(text)}\n", sys.stderr)

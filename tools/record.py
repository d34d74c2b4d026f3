"""Records what a command shows on a terminal, as an SVG for a page: the real command, in a real pseudo-terminal.

    python -m tools.record docs verdict                # pictures of the pages again, by name, or `all`
    python -m tools.record other.svg --when "5[0-9]%" -- gpuinfer selfplay --games 6000 --model blobnet-small

The picture is the first screen on which `--when`, a regular expression, is found; without it the last one. Needs pyte,
the terminal: `pip install -e .[docs]`. Record on a machine that does nothing else: the picture says how fast it was.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import pyte
from rich.style import Style
from rich.text import Text

from gpuinfer.screen.display import svg

COLOURS = {"brown": "yellow", "brightblack": "bright_black", "default": None}  # as pyte calls them → as rich does
HALF = ("--when", "of .* games .*[45][0-9]%")  # of the bar, and not of the time
PICTURES: dict[str, tuple[str, ...]] = {  # name → words of this command
    "live": ("docs/live.svg", *HALF, "--", "gpuinfer", "selfplay", "--games", "6000", "--model", "blobnet-small"),
    "docs": ("docs/images/docs.svg", "--lines", "26", "--", "gpuinfer", "docs", "--decoder"),
    "verdict": (
        *("docs/images/verdict.svg", "--lines", "44", "--when", "advice(.|\n)*╰", "--", "gpuinfer", "selfplay"),
        *("--games", "300", "--model", "blobnet-small", "--workers", "1", "--no-trial"),
    ),
}
"""The pictures that the pages show, each made anew by its name."""
LIMIT_S, QUANTUM_S = 600.0, 0.2
CHUNK = 1 << 16


def shown(command: Sequence[str], columns: int, lines: int, when: re.Pattern[str] | None) -> Text:
    """The screen of the command. Raises `TimeoutError` when it shows nothing of the kind within `LIMIT_S`."""
    screen = pyte.Screen(columns, lines)
    stream = pyte.ByteStream(screen)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(lines), "PAGER": "cat"}
    process = subprocess.Popen(
        list(command), stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    until = time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < until:
            if select.select([ours], [], [], QUANTUM_S)[0]:
                try:
                    said = os.read(ours, CHUNK)
                except OSError:  # the last one that held the other end has gone
                    said = b""
                if not said:
                    break
                stream.feed(said)
            if when is not None and when.search("\n".join(screen.display)):
                return drawn(screen)
        else:
            raise TimeoutError(f"{shlex.join(command)}: not over, and nothing found, within {LIMIT_S:g} s")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(ours)
    if when is not None:
        raise SystemExit(f"{shlex.join(command)}: no screen shows {when.pattern!r}. Its last:\n{drawn(screen).plain}")
    return drawn(screen)


def drawn(screen: pyte.Screen) -> Text:
    """What stands there, without the empty lines below it."""
    rows = []
    for number in range(screen.lines):
        row = Text()
        cells = [screen.buffer[number][column] for column in range(screen.columns)]
        for (fg, bg, bold), alike in groupby(cells, lambda cell: (cell.fg, cell.bg, cell.bold)):
            text = "".join(cell.data for cell in alike)  # one element of the picture, not one a letter
            row.append(text, Style(color=_colour(fg), bgcolor=_colour(bg), bold=bold))
        row.rstrip()
        rows.append(row)
    while rows and not rows[-1].plain:
        rows.pop()
    return Text("\n").join(rows)


def _colour(name: str) -> str | None:
    return f"#{name}" if re.fullmatch("[0-9a-f]{6}", name) else COLOURS.get(name, name)


def main(words: Sequence[str]) -> None:
    named = list(PICTURES) if list(words) == ["all"] else words
    if named and all(word in PICTURES for word in named):
        for name in named:
            record(PICTURES[name])
    else:
        record(words)


def record(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--columns", type=int, default=92)
    parser.add_argument("--lines", type=int, default=30)
    parser.add_argument("--when", type=re.compile, help="a regular expression that the screen must show")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(words)
    command = [sys.executable, "-m", *given.command] if given.command[0] == "gpuinfer" else given.command
    text = shown(command, given.columns, given.lines, given.when)
    title = shlex.join(given.command)
    given.target.write_text(svg(text, title, given.columns), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

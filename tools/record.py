"""Records what a command shows on a terminal, as an SVG for a page: the real command, in a real pseudo-terminal.

    python -m tools.record docs verdict                # pictures of the pages again, by name, or `all`
    python -m tools.record other.svg --when "5[0-9]%" -- gpuinfer selfplay --games 6000 --model blobnet-small

The picture is the first screen on which `--when`, a regular expression, is found; without it the last one. The command
runs in a folder of its own, with nothing in it but a file of prompts, `many.jsonl`. Needs pyte, the terminal:
`pip install -e .[docs]`. Record on a machine that does nothing else: the picture says how fast it was.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import pyte
from rich.style import Style
from rich.text import Text

from gpuinfer.cli.screen.display import svg

COLOURS = {"brown": "yellow", "brightblack": "bright_black", "default": None}  # as pyte calls them → as rich does
HALF = ("--when", "of .* (games|rows) .*[45][0-9]%")  # of the bar, and not of the time
PICTURES: dict[str, tuple[str, ...]] = {  # name → words of this command
    "live": ("docs/live.svg", *HALF, "--", "gpuinfer", "selfplay", "--games", "6000", "--model", "blobnet-small"),
    "docs": ("docs/images/docs.svg", "--lines", "26", "--", "gpuinfer", "docs", "--decoder"),
    "verdict": (
        *("docs/images/verdict.svg", "--lines", "44", "--when", "advice(.|\n)*╰", "--", "gpuinfer", "selfplay"),
        *("--games", "300", "--model", "blobnet-small", "--workers", "1", "--no-trial"),
    ),
    "generate": (
        *("docs/images/generate.svg", *HALF, "--", "gpuinfer", "generate", "--model", "tiny"),
        *("--input", "many.jsonl", "--output", "many-answers.jsonl", "--max-new-tokens", "32"),
    ),
    "rollouts": (
        *("docs/images/rollouts.svg", "--lines", "44", "--", "gpuinfer", "rollouts", "--env", "arithmetic"),
        *("--model", "tiny", "--groups", "12", "--samples-per-group", "2", "--max-new-tokens", "32"),
        *("--trainer-seconds", "0.1", "--batch-groups", "2", "--buffer-depth", "2", "--steps", "steps.jsonl"),
    ),
}
"""The pictures that the pages show, each made anew by its name."""
PROMPTS = [{"prompt": f"The harbour on day {day}:"} for day in range(1, 501)]
"""What lies beside the command, in `many.jsonl`."""
BUTTONS = 28  # columns of a window's title that its buttons take, on both sides
LIMIT_S, QUANTUM_S, PAUSE_S = 600.0, 0.2, 0.05
CHUNK = 1 << 16


def shown(
    command: Sequence[str], columns: int, lines: int, when: re.Pattern[str] | None, folder: Path | None = None
) -> Text:
    """The screen of the command, run in that folder. Raises `TimeoutError` when it shows nothing of the kind within
    `LIMIT_S`.
    """
    screen = pyte.Screen(columns, lines)
    stream = pyte.ByteStream(screen)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(lines), "PAGER": "cat"}
    process = subprocess.Popen(
        list(command), stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=folder, start_new_session=True
    )
    os.close(theirs)
    until = time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < until:
            said = _said(ours, QUANTUM_S)
            if said == b"":
                break
            stream.feed(said or b"")
            if when is not None and when.search("\n".join(screen.display)):
                found = drawn(screen)
                stream.feed(_said(ours, PAUSE_S) or b"")  # the lower part of it
                return drawn(screen) if when.search("\n".join(screen.display)) else found
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


def _said(terminal: int, wait_s: float) -> bytes | None:
    """What is there to read; None when nothing came in that time, empty when the last one that held the other end has
    gone.
    """
    if not select.select([terminal], [], [], wait_s)[0]:
        return None
    try:
        return os.read(terminal, CHUNK)
    except OSError:
        return b""


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
    with tempfile.TemporaryDirectory(prefix="gpuinfer-record-") as folder:
        lines = [json.dumps(prompt) + "\n" for prompt in PROMPTS]
        Path(folder, "many.jsonl").write_text("".join(lines), encoding="utf-8")
        text = shown(command, given.columns, given.lines, given.when, Path(folder))
    title = shlex.join(given.command)
    room = given.columns - BUTTONS
    title = title if len(title) <= room else f"{title[:room].rpartition(' ')[0]} …"
    given.target.write_text(svg(text, title, given.columns), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

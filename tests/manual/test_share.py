"""What `make share` has written for the wheel: pages that man reads, completion that bash, zsh and fish run."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from gpuinfer.config import registry

pytestmark = pytest.mark.docs
ROOT = Path(__file__).parent.parent.parent
SHARE = ROOT / "share"
MAN = SHARE / "man" / "man1"
COMPLETE = """source {script}
COMP_WORDS=({words}) COMP_CWORD={last}
_gpuinfer_completion gpuinfer
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def test_there_is_a_page_for_each_command_and_man_reads_it_without_a_warning():
    manual = sorted(MAN.glob("*.1"))
    assert manual, f"there are no manual pages in {MAN}: run `make share`"
    names = {page.stem for page in manual}
    assert {"gpuinfer", "gpuinfer-bench-serve", "gpuinfer-rollouts-export"} <= names
    assert {f"gpuinfer-{name}" for name in registry.COMMANDS} <= names
    for page in manual:
        command = ["man", "--warnings", "-E", "UTF-8", "-l", str(page)]
        read = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
        assert read.stderr == "", page.name
        assert "SYNOPSIS" in read.stdout
        assert page.stem in read.stdout


LINES = [
    ("gpuinfer self", "selfplay"),
    ("gpuinfer selfplay --determiniz", "--determinizations"),
    ("gpuinfer selfplay --game conn", "connect-four"),
    ("gpuinfer selfplay --model blobnet-", "blobnet-small"),
    ("gpuinfer generate --model tiny-ll", "tiny-llada"),
    ("gpuinfer bench selfplay --strategy ad", "adaptive"),
    ("gpuinfer docs tutorials/", "tutorials/serving"),
]


@pytest.fixture
def environment(tmp_path):
    """With a `gpuinfer` that is this one, however it is installed, and nothing of the user's own."""
    command = tmp_path / "bin" / "gpuinfer"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m gpuinfer "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join([str(command.parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "HOME": str(tmp_path), "ZDOTDIR": str(tmp_path), "TERM": "dumb"}


@pytest.mark.parametrize(("line", "offered"), LINES)
def test_bash_offers(line, offered, environment):
    script = COMPLETE.format(
        script=SHARE / "bash-completion" / "completions" / "gpuinfer", words=line, last=len(line.split()) - 1
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    assert offered in done.stdout.split()


def test_fish_offers(environment):
    asked = [f"complete -C {shlex.quote(line)}; echo ." for line, _ in LINES]
    script = f"source {SHARE}/fish/vendor_completions.d/gpuinfer.fish; {'; '.join(asked)}"
    done = subprocess.run(
        ["fish", "--no-config", "-c", script], capture_output=True, text=True, timeout=120, env=environment
    )
    found = [part.split() for part in done.stdout.split("\n.\n")]
    assert [(line, offered in words) for (line, offered), words in zip(LINES, found, strict=False)] == [
        (line, True) for line, _ in LINES
    ], done.stderr


def test_zsh_offers(environment):
    """At a Tab in a terminal, from a folder where zsh looks: the first Tab has it load the file."""
    screen = Terminal(["zsh", "--no-rcs", "--interactive"], environment)
    try:
        screen.type(f"fpath=({SHARE}/zsh/site-functions $fpath); autoload -Uz compinit; compinit -u -D; echo re''ady\n")
        screen.wait_for("ready")
        for line, offered in LINES:
            screen.type(f"\x15{line}\t")  # Ctrl-U: an empty line
            screen.wait_for(offered)
    finally:
        screen.close()


class Terminal:
    """A program in a pseudo-terminal that is too wide to break lines."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 200, 200, 0, 0))
        self._process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, words: str, limit_s: float = 60.0) -> None:
        """Raises `AssertionError` when nothing of the kind is shown."""
        shown, until = "", time.monotonic() + limit_s
        while words not in shown:
            ready = select.select([self._ours], [], [], max(0.0, until - time.monotonic()))[0]
            assert ready, f"{words} is not shown: {shown!r}"
            shown += os.read(self._ours, 1 << 16).decode("utf-8", "replace")

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._ours)

"""`gpuinfer chat` as a process: messages from a pipe, and on a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from complaints import complaint
from forking import Forked, own_environment
from run_generate import INSTANT

SECONDS = 60


def chat(*words: str, given: bytes, cwd) -> subprocess.CompletedProcess[str]:
    environment = own_environment(COLUMNS="200")
    with Forked(["gpuinfer", "chat", *words], cwd, environment, prepared=INSTANT) as process:
        out, err = process.communicate(given, timeout=SECONDS)
    return subprocess.CompletedProcess(process.args, process.returncode, out.decode(), err.decode())


def test_each_line_of_a_pipe_is_a_message_and_one_that_fails_costs_no_other_its_answer(tmp_path):
    given = "eins\n\nzwei ü\n/reset\nbad\n/reset\ndrei".encode()
    done = chat("--model", "tiny", "--system", "S", given=given, cwd=tmp_path)
    first, second, third = done.stdout.splitlines()  # the instant model turns its messages round
    assert all(word[::-1] in answer for word in ("eins", "S") for answer in (first, second))
    assert "ü iewz" in second
    assert "snie" not in third
    assert (done.returncode, complaint(done)) == (1, "gpuinfer: the prompt is bad. Give a better one.")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "chat needs a model"),
        ("--model tiny --temperature -1", "Give 0 or more"),
        ("--model tiny --backend standin", "serves rows"),
        ("--model tiny --regex (", "--regex"),
    ],
)
def test_bad_usage_is_refused(tmp_path, words, said):
    done = chat(*words.split(), given=b"hello\n", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert said in complaint(done)


@pytest.mark.thorough
def test_a_model_without_a_chat_template_says_what_to_do_instead(tmp_path):
    from gpuinfer.testing.fakes import tiny_folder

    folder = tmp_path / "base"
    folder.mkdir()
    tiny_folder(folder)
    done = chat("--model", str(folder), given=b"hello\n", cwd=tmp_path)
    assert done.returncode == 2
    assert "has no chat template: it is no chat model. Try `gpuinfer generate --prompt TEXT`" in complaint(done)


class OnTerminal:
    """The command on a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self.pid, self._terminal = pty.fork()
        if not self.pid:
            os.environ["PYTHONFAULTHANDLER"] = "1"
            os.execv(sys.executable, [sys.executable, "-m", "gpuinfer", *words])
        self.seen = ""

    def until(self, text: str, key: str = "") -> None:
        """Read until this has come since the last call, and press the key now and then until it does: just before
        readline begins to wait it does not see a Ctrl-C.
        """
        end = time.monotonic() + SECONDS
        self.types(key)
        while text not in self.seen:
            assert time.monotonic() < end, self.seen
            if not self._read(0.5):
                self.types(key)
        self.seen = self.seen.partition(text)[2]

    def until_some(self) -> None:
        """Read until anything has come but spaces and what a terminal obeys."""
        while not re.sub(r"\x1b\[[?\d]*[a-zA-Z]|\s", "", self.seen):
            assert self._read(SECONDS), self.seen

    def _read(self, seconds: float) -> bool:
        """Whether anything has come. Raises `OSError` at the end."""
        if not select.select([self._terminal], [], [], max(0.0, seconds))[0]:
            return False
        self.seen += os.read(self._terminal, 1 << 16).decode(errors="replace")
        return True

    def types(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def end(self) -> int:
        """Read to the end. The exit code."""
        with contextlib.suppress(OSError):
            while self._read(SECONDS):
                pass
            os.kill(self.pid, signal.SIGABRT)  # it does not end: where is it?
            while self._read(SECONDS):
                pass
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        assert not os.WIFSIGNALED(status), self.seen
        return os.waitstatus_to_exitcode(status)

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(self, *error: object) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._terminal)


@pytest.mark.thorough
def test_on_a_terminal_ctrl_c_ends_an_answer_and_ctrl_d_the_conversation():
    steps = [
        ("hello\n", "hello"),  # and then the answer begins
        ("\x03", "Stopped."),
        ("/reset\n", "A new conversation."),
        (
            "half a mess",
            "half a mess",
        ),  # readline has it: else the terminal throws it away at the Ctrl-C under its eyes
    ]
    with OnTerminal("chat", "--model", "tiny", "--ignore-eos", "--max-new-tokens", "1900") as terminal:
        terminal.until("Ctrl-D ends.")
        for types, seen in steps:
            if types != "\x03":
                terminal.until("> ")
            terminal.types(types)
            terminal.until(seen)
            if seen == "hello":
                terminal.until_some()
        terminal.until("Ctrl-D or /exit ends.", key="\x03")
        terminal.until("> ")  # before it readline would not see a Ctrl-D
        terminal.types("\x04")
        assert terminal.end() == 0

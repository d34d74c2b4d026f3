"""What `make share` has written for the wheel: pages that man reads, completion that bash runs."""

from __future__ import annotations

import os
import subprocess
import sys
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


@pytest.fixture(scope="module")
def manual() -> list[Path]:
    found = sorted(MAN.glob("*.1"))
    assert found, f"there are no manual pages in {MAN}: run `make share`"
    return found


def test_there_is_a_page_for_each_command(manual):
    names = {page.stem for page in manual}
    assert {"gpuinfer", "gpuinfer-bench-serve", "gpuinfer-rollouts-export"} <= names
    assert {f"gpuinfer-{name}" for name in registry.COMMANDS} <= names


def test_man_reads_every_page_without_a_warning(manual):
    for page in manual:
        command = ["man", "--warnings", "-E", "UTF-8", "-l", str(page)]
        read = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert read.stderr == "", page.name
        assert "SYNOPSIS" in read.stdout
        assert page.stem in read.stdout


def test_man_shows_an_options_text_and_default(manual):
    command = ["man", "-E", "UTF-8", "-l", str(MAN / "gpuinfer-selfplay.1")]
    environment = {**os.environ, "MANWIDTH": "100"}
    read = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment).stdout
    assert "--simulations N" in read
    assert "simulations in each tree [default: 30]" in " ".join(read.split())


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("gpuinfer self", "selfplay"),
        ("gpuinfer selfplay --determ", "--determinizations"),
        ("gpuinfer selfplay --game conn", "connect-four"),
        ("gpuinfer selfplay --model blobnet-", "blobnet-small"),
        ("gpuinfer generate --model tiny-ll", "tiny-llada"),
        ("gpuinfer bench selfplay --strategy ad", "adaptive"),
        ("gpuinfer docs tutorials/", "tutorials/serving"),
    ],
)
def test_bash_offers(line, offered, tmp_path):
    script = COMPLETE.format(
        script=SHARE / "bash-completion" / "completions" / "gpuinfer", words=line, last=len(line.split()) - 1
    )
    environment = {**os.environ, "PATH": os.pathsep.join([str(beside(tmp_path)), os.environ["PATH"]])}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert offered in done.stdout.split()


def beside(folder: Path) -> Path:
    """A folder with a `gpuinfer` that is this one, however it is installed."""
    command = folder / "gpuinfer"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m gpuinfer "$@"\n')
    command.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    "file",
    ["bash-completion/completions/gpuinfer", "zsh/site-functions/_gpuinfer", "fish/vendor_completions.d/gpuinfer.fish"],
)
def test_the_script_of_each_shell_asks_the_command(file):
    assert "_GPUINFER_COMPLETE" in (SHARE / file).read_text()

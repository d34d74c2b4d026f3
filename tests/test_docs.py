"""A command in the docs is a command that runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "plugins").glob("*/README.md"))]
PLACEHOLDERS = {"module:Class": "nim:Nim"}  # what a reader puts their own name for
SMALL = {"--games": "4"}  # counts that only cost time
BRIEFER = {  # what makes a command shorter that runs games
    "selfplay": ["--no-roofline"],
    "bench": ["--no-roofline", "--warmup", "0", "--seconds", "0.5", "--repeats", "1", "--model", "blobnet-small"],
    "verify": ["--limit", "4", "--new-tokens", "8", "--batch-sizes", "1,3"],
    "tune": ["--no-roofline", "--budget", "10s", "--model", "blobnet-small"],
}
ALONE = (
    "bench",
    "tune",
    "simulate",
    "doctor",
    "config",
    "plugins",
)  # need no command before them, nor does one need them
NOT_RUN = ("make ", "pip ", "python -m pip ", "python benchmarks/", "benchmarks/")  # set-up, and hours of measuring


def commands(page: Path) -> list[str]:
    """The command lines in a page's fenced blocks that name no language or a shell."""
    blocks = re.findall(r"^```(.*)\n((?s:.*?))^```$", page.read_text(), re.M)  # all of them: an end is no beginning
    shells = [block for language, block in blocks if language in ("", "sh", "bash", "console")]
    lines = [line.strip().removeprefix("$ ") for block in shells for line in block.splitlines()]
    return [line for line in lines if re.match(r"(gpuinfer|make|python|pip|bash|pytest) ", line)]


def to_run(page: Path) -> list[str]:
    """The gpuinfer commands of a page, but for those that stand alone and an earlier page has already."""
    earlier = {line for one in PAGES[: PAGES.index(page)] for line in commands(one)}
    ours = [line for line in commands(page) if line.startswith("gpuinfer ")]
    return [line for line in ours if not (line in earlier and line.split()[1] in ALONE)]


def files(page: Path) -> dict[str, str]:
    """The blocks of a page that say which file they are, such as ```json prompts.jsonl."""
    return dict(re.findall(r"^```\w+ (\S+)\n(.*?)^```", page.read_text(), re.M | re.S))


def shortened(line: str) -> list[str]:
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(line, comments=True)]
    for flag, count in SMALL.items():
        if flag in words:
            words[words.index(flag) + 1] = count
    if words[1] in BRIEFER and "--help" not in words:
        words += BRIEFER[words[1]]
    return words


CASES = [
    pytest.param(page, id=str(page.relative_to(ROOT)), marks=pytest.mark.thorough) for page in PAGES if to_run(page)
]


@pytest.mark.parametrize("page", CASES)
def test_every_gpuinfer_command_of_a_page_runs_in_their_order(page, tmp_path):
    for name, text in files(page).items():
        (tmp_path / name).write_text(text)
    for line in to_run(page):
        done = subprocess.run(
            [sys.executable, "-m", *shortened(line)],
            cwd=tmp_path,
            env={**_environment(), "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")])},
            stdin=subprocess.DEVNULL,  # a conversation ends with its messages
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


def test_the_readme_shows_what_make_can_do():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    named = {line.split()[1] for line in commands(ROOT / "README.md") if line.startswith("make ")}
    assert {"demo", "test"} <= named <= targets


def test_every_command_of_the_docs_is_run_or_is_set_up():
    lines = {line for page in PAGES for line in commands(page) if not line.startswith("gpuinfer ")}
    assert [line for line in sorted(lines) if not f"{line} ".startswith(NOT_RUN)] == []


def test_links_between_pages_lead_somewhere():
    dead = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                dead.append(f"{page.relative_to(ROOT)} → {target}")
    assert dead == []


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("GPUINFER_")}

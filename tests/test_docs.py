"""A command in the docs is a command that runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import forking
import pytest
from hub import put_in_cache, repository_of
from ports import free_port
from text.tiny import tiny_checkpoint

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "plugins").glob("*/README.md"))]
PLACEHOLDERS = {"module:Class": "nim:Nim"}  # what a reader puts their own name for
SMALL = {"--games": "4", "--replicas": "2"}  # counts that only cost time
BRIEFER = {  # what makes a command shorter that runs games
    "selfplay": ["--no-roofline"],
    "selfplay export": [],
    "bench": ["--no-roofline", "--warmup", "0", "--seconds", "0.5", "--repeats", "1", "--model", "blobnet-small"],
    "bench generate": ["--no-roofline", "--warmup", "0", "--seconds", "0.5", "--repeats", "1"],
    "bench serve": ["--duration", "5s", "--warmup", "0", "--output-tokens", "4"],  # some end on a busy machine too
    "bench rollouts": [],
    "memory": ["--no-probe"],
    "verify": ["--limit", "4", "--batch-sizes", "1,3", "--new-tokens", "8"],
    "verify of rows": ["--limit", "4", "--batch-sizes", "1,3"],
    "train": ["--steps", "10"],
    "loop": ["--iterations", "1", "--games", "16", "--simulations", "8", "--evaluation-games", "8"],
    "tune": ["--no-roofline", "--budget", "10s", "--model", "blobnet-small"],
    "plugins install": ["--yes", "--into", "folder", "--no-index"],  # never into the environment of the tests
    "plugins uninstall": ["--yes"],
}
ONE_WORKER = (
    "selfplay",
    "bench selfplay",
    "loop",
    "tune selfplay",
)  # unless they say how many: each starts for seconds
ALONE = (
    "bench",
    "chat",
    "tune",
    "simulate",
    "doctor",
    "memory",
    "config",
    "plugins",
    "docs",
)  # need no command before them, nor does one need them
RUNS = ("gpuinfer ", "curl ", "openssl ")
SERVE = "gpuinfer serve "
MOST_REPLICAS = 4  # that a page starts
LIMIT_S = 200.0  # for a command
HUB_CACHE = ".hub"  # of the folder in which a page's commands run
HUB_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # in the cache is a tiny one of that name
ENVIRONMENT = forking.own_environment(
    PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "examples")]), HF_HUB_CACHE=HUB_CACHE
)
UP_S, DOWN_S = 180.0, 90.0  # for a server to come up, and to end once it was asked to
PACKAGED_MODEL = re.compile(r"gpuinfer .*--model (smollm2|gemma3)\b")  # tests/real has their files, and runs these
NOT_RUN = ("make ", "pip ", "python -m pip ", "python benchmarks/", "benchmarks/")  # set-up, and hours of measuring
RUN_ELSEWHERE = ("python examples/grpo.py ",)  # with the real model: tests/real


def commands(page: Path) -> list[str]:
    """The command lines in a page's fenced blocks that name no language or a shell."""
    blocks = re.findall(r"^```(.*)\n((?s:.*?))^```$", page.read_text(), re.M)  # all of them: an end is no beginning
    shells = [block for language, block in blocks if language in ("", "sh", "bash", "console")]
    whole = [block.replace("\\\n", " ") for block in shells]  # a line that ends so goes on in the next
    lines = [line.strip().removeprefix("$ ") for block in whole for line in block.splitlines()]
    return [line for line in lines if re.match(r"(gpuinfer|make|python|pip|bash|pytest|curl|openssl) ", line)]


def to_run(page: Path) -> list[str]:
    """The commands of a page that can be run: ours, curl's, and scripts that stand on the page.

    Of those that stand alone, what an earlier page has is left out.
    """
    earlier = {line for one in PAGES[: PAGES.index(page)] for line in commands(one)}
    scripts = tuple(f"python {name}" for name in files(page))
    ours = [line for line in commands(page) if line.startswith(RUNS) or line in scripts]
    ours = [line for line in ours if not PACKAGED_MODEL.match(line)]
    return [line for line in ours if not (line in earlier and line.split()[1] in ALONE and " serve" not in line)]


def files(page: Path) -> dict[str, str]:
    """The blocks of a page that say which file they are, such as ```json prompts.jsonl."""
    return dict(re.findall(r"^```\w+ (\S+)\n(.*?)^```", page.read_text(), re.M | re.S))


def shortened(line: str) -> list[str]:
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(line, comments=True)]
    for flag, count in SMALL.items():
        if flag in words:
            words[words.index(flag) + 1] = count
    name = " ".join(words[1:3]) if " ".join(words[1:3]) in BRIEFER else words[1]
    if name == "verify" and "blobnet-small" in words:
        name = "verify of rows"
    if name in BRIEFER and "--help" not in words:
        words += BRIEFER[name]
    if name == "selfplay" and "--games" not in words:
        words += ["--games", SMALL["--games"]]
    if (name in ONE_WORKER or " ".join(words[1:3]) in ONE_WORKER) and "--workers" not in words:
        words += ["--workers", "1"]
    return words


class Served:
    """The server of a page: the last that its commands have started, on a port that is free here."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._process, self._ports = folder, None, {}

    def start(self, line: str) -> None:
        self.end()
        words = shortened(line)
        named = words[words.index("--port") + 1] if "--port" in words else "8000"
        self._ports[named] = port = str(free_port())
        if "--worker-base-port" in words:
            at = words.index("--worker-base-port") + 1
            written, words[at] = int(words[at]), (here := str(free_port()))
            self._ports |= {str(written + number): str(int(here) + number) for number in range(MOST_REPLICAS)}
        self._said = self._folder / "served.txt"
        with self._said.open("w") as said:
            self._process = forking.Forked(
                [*map(self.rewritten, words), "--port", port],
                self._folder,
                ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
        until = time.monotonic() + UP_S
        while not _healthy(port):
            assert self._process.poll() is None, f"{line}\n{self._said.read_text()}"
            assert time.monotonic() < until, f"{line}\n{self._said.read_text()}"
            time.sleep(0.1)

    def rewritten(self, text: str) -> str:
        """With the ports as they are here."""
        return re.sub(r"\b(127\.0\.0\.1|localhost):(\d+)", lambda m: f"{m[1]}:{self._ports.get(m[2], m[2])}", text)

    def end(self) -> None:
        """It ends well when it is asked to."""
        if self._process is not None:
            process, self._process = self._process, None
            process.send_signal(signal.SIGTERM)
            try:
                code = process.wait(DOWN_S)
            finally:
                process.kill()
            assert code == 0, self._said.read_text()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(DOWN_S)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Served]:
    one = Served(folder)
    try:
        yield one
        one.end()
    finally:
        one.kill()


def _healthy(port: str) -> bool:
    """Whether it is ready; of a fleet, whether all replicas are."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            told = json.loads(answer.read())
            return told.get("healthy_workers") == told.get("total_workers")
    except (urllib.error.URLError, OSError):
        return False


CASES = [
    pytest.param(page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.thorough, pytest.mark.timeout(1200)])
    for page in PAGES
    if to_run(page)
]


@pytest.mark.parametrize("page", CASES)
def test_every_command_of_a_page_runs_in_their_order(page, tmp_path):
    with served(tmp_path) as server:
        if page.name == "models.md":
            put_in_cache(tmp_path / HUB_CACHE, HUB_MODEL, repository_of(tiny_checkpoint("llama")).files)
        for name, text in files(page).items():
            (tmp_path / name).write_text(text)
        for line in to_run(page):
            if line.startswith(SERVE) and "--help" not in line:
                server.start(line)
                for name, text in files(page).items():
                    (tmp_path / name).write_text(server.rewritten(text))
            else:
                run(server.rewritten(line), tmp_path)


def run(line: str, folder: Path) -> None:
    if line.startswith("gpuinfer "):
        # a conversation ends with its messages: there are none
        own = {**ENVIRONMENT, "GPUINFER_PLUGINS": str(folder / ".plugins")}
        # a plugin is checked in a process that starts workers from a thread: not by a fork of a fork
        workers = not line.startswith("gpuinfer plugins check")
        done = forking.run(shortened(line), folder, own, LIMIT_S, workers=workers)
    else:
        done = subprocess.run(
            ["bash", "-c", line.replace("curl ", "curl -f ", 1)],
            cwd=folder,
            env={**ENVIRONMENT, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


def test_the_readme_shows_what_make_can_do():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    named = {line.split()[1] for line in commands(ROOT / "README.md") if line.startswith("make ")}
    assert {"demo", "test"} <= named <= targets


def test_every_command_of_the_docs_is_run_or_is_set_up():
    lines = {line for page in PAGES for line in commands(page) if line not in to_run(page)}
    lines = {line for line in lines if not line.startswith(RUNS)}
    assert [line for line in sorted(lines) if not f"{line} ".startswith(NOT_RUN + RUN_ELSEWHERE)] == []


def test_links_between_pages_lead_somewhere():
    dead = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                dead.append(f"{page.relative_to(ROOT)} → {target}")
    assert dead == []

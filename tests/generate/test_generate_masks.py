"""A diffusion model's answers in a file: the same on every road, and whole however a run ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SECONDS = 200
DECODERS = ("low-confidence", "threshold", "hierarchical", "random")
WORDS = ("--model", "tiny-llada", "--input", "in.jsonl", "--output", "out.jsonl", "--quiet", "--no-roofline")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [
        {
            "id": f"r{number}",
            "prompt": f"prompt {number}",
            "max_tokens": 9 + number % 7,
            "temperature": number % 3 * 0.4,
            "decoder": DECODERS[number % 4],
            "cfg_scale": 0.5 * (number % 5 == 0),
            "cache": "dual" if number % 6 == 0 else "none",
            "block_length": 4 + number % 2,
            "n": 1 + (number % 8 == 0),
            "logprobs": 1 if number % 9 == 0 else None,
            "stop": ["W", "3"],
        }
        for number in range(40)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def started(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GPUINFER_")}
    command = [sys.executable, "-m", "gpuinfer", "generate", *WORDS, *words]
    return subprocess.Popen(command, cwd=folder, env=inherited, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)


def answered(folder: Path, *words: str) -> list[bytes]:
    """The lines of the output, sorted."""
    with started(folder, *words) as process:
        _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said.decode()
    return sorted((folder / "out.jsonl").read_bytes().splitlines())


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_the_answers_are_the_same_on_every_road_and_after_any_kill(folder):
    whole = answered(folder, "-B", "slots=16")
    assert not [line for line in whole if b'"error"' in line]
    assert len(whole) == 40
    (folder / "out.jsonl").unlink()
    (folder / "out.jsonl.run.json").unlink()
    with started(folder, "-B", "slots=2") as process:
        until_lines(folder, 5)
        process.send_signal(signal.SIGKILL)
        process.wait(SECONDS)
        process.communicate()
    assert 0 < len((folder / "out.jsonl").read_bytes().splitlines()) < 40
    assert answered(folder, "-B", "slots=5", "--resume") == whole
    for road in (("central",), ("fleet", "-B", "replicas=2")):
        (folder / "out.jsonl").unlink()
        (folder / "out.jsonl.run.json").unlink()
        assert answered(folder, "--backend", *road) == whole


def until_lines(folder: Path, count: int) -> None:
    end = time.monotonic() + SECONDS
    while not (folder / "out.jsonl").exists() or (folder / "out.jsonl").read_bytes().count(b"\n") < count:
        assert time.monotonic() < end
        time.sleep(0.01)

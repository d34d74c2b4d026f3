"""A diffusion model's answers in a file: the same on every road, and whole however a run ends."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from forking import Forked
from packages import install

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


def started(folder: Path, *words: str) -> Forked:
    return Forked(["gpuinfer", "generate", *WORDS, *words], folder, stdin=subprocess.DEVNULL, workers=True)


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


ASKED = ("threshold", "idle", "low-confidence")
IDLE = """
import numpy as np
from gpuinfer.text.diffusion.unmasking_decoder import Decision, UnmaskingDecoder

class Idle(UnmaskingDecoder):
    def decide(self, kept, view):
        return Decision(np.zeros(len(view.positions), np.bool_))
"""


@pytest.mark.parametrize("backend", ["inprocess", "central"])
def test_a_decoder_of_somebody_s_that_fails_costs_its_row_and_nothing_else(tmp_path, monkeypatch, backend):
    install(tmp_path, "acme", {"decoders": {"idle": "acme_idle:Idle"}}, {"acme_idle": IDLE})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rows = [{"id": number, "prompt": "ab", "decoder": name, "max_tokens": 4} for number, name in enumerate(ASKED)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with started(tmp_path, "--backend", backend) as process:
        _, said = process.communicate(timeout=SECONDS)
    answers = {row["id"]: row for row in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert {number for number, row in answers.items() if "error" not in row} == {0, 2}, said.decode()
    assert "decoder 'idle' (package acme 1.0)" in answers[1]["error"]["message"]

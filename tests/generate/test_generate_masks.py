"""A diffusion model's answers in a file: the same on every road, and whole however a run ends."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from forking import Forked
from packages import install
from run_generate import SECONDS, prompts, rows_of, until

DECODERS = ("low-confidence", "threshold", "hierarchical", "random")
WORDS = ("--model", "tiny-llada", "--input", "in.jsonl", "--output", "out.jsonl", "--quiet", "--no-roofline")


def row(number: int) -> dict:
    return {
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
def test_the_answers_are_the_same_on_every_road_and_after_any_kill(tmp_path):
    def begin_anew() -> None:
        for name in ("out.jsonl", "out.jsonl.run.json"):
            (tmp_path / name).unlink()

    prompts(tmp_path, *map(row, range(40)))
    output = tmp_path / "out.jsonl"
    whole = answered(tmp_path, "-B", "slots=16")
    assert (len(whole), [line for line in whole if b'"error"' in line]) == (40, [])
    begin_anew()
    with started(tmp_path, "-B", "slots=2") as process:
        until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 5, process)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=SECONDS)
    assert 0 < len(output.read_bytes().splitlines()) < 40
    assert answered(tmp_path, "-B", "slots=5", "--resume") == whole
    for road in (("central",), ("fleet", "-B", "replicas=2")):
        begin_anew()
        assert answered(tmp_path, "--backend", *road) == whole


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
    names = ("threshold", "idle", "low-confidence")
    prompts(tmp_path, *({"id": n, "prompt": "ab", "decoder": name, "max_tokens": 4} for n, name in enumerate(names)))
    with started(tmp_path, "--backend", backend) as process:
        _, said = process.communicate(timeout=SECONDS)
    answers = {row["id"]: json.dumps(row.get("error")) for row in rows_of(tmp_path)}
    assert (answers[0], answers[2]) == ("null", "null"), said.decode()
    assert "decoder 'idle' (package acme 1.0)" in answers[1]

"""The commands that docs/vllm.md shows, as people run them; and the conformance kit."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.backends.vllm import Vllm
from gpuinfer.testing import check_backend

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"
LIMIT_S = 600


def shown(word: str) -> list[str]:
    lines = re.findall(r"^gpuinfer .*$", PAGE.read_text(), re.M)
    return shlex.split(next(line for line in lines if line.startswith(f"gpuinfer {word} ")))[1:]


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpuinfer", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_generate_answers_with_it(tmp_path):
    done = run(*shown("generate"), "--json", "report.json", "--output", "-", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["batches"]["slots"] == 64
    assert report["model"]["model"] == "tiny"


def test_rollouts_play_with_it(tmp_path):
    done = run(*shown("rollouts"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["status"] == "done"
    assert report["rollouts"]["calls"] >= 4


def test_the_backend_keeps_every_promise_of_the_contract():
    setup = Setup(ModelSpec("tiny", kind="text"))
    findings = check_backend(lambda: Vllm(setup), timeout_s=240.0)
    assert [finding for finding in findings if not finding.ok] == []

"""The commands that docs/vllm.md shows, as people run them; the conformance kit; and games played with both engines."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_held import CLOSE, TINY, scored

from gpuinfer.backends.vllm import Vllm
from gpuinfer.rollouts import files
from gpuinfer.rollouts.record import Game, Group, Trajectory
from gpuinfer.testing import check_backend

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"
LIMIT_S = 600


def shown(word: str) -> list[str]:
    lines = re.findall(r"^gpuinfer .*$", PAGE.read_text(), re.M)
    return shlex.split(next(line for line in lines if line.startswith(f"gpuinfer {word} ")))[1:]


def run(*words: str, cwd: Path) -> str:
    command = [sys.executable, "-m", "gpuinfer", *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_generate_answers_and_rollouts_play_with_it(tmp_path):
    assert run(*shown("generate"), "--json", "report.json", "--output", "-", cwd=tmp_path).strip()
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["batches"]["slots"], report["model"]["model"]) == (64, "tiny")
    report = json.loads(run(*shown("rollouts"), cwd=tmp_path))
    assert report["status"] == "done"
    assert report["rollouts"]["calls"] >= 4


def test_the_backend_keeps_every_promise_of_the_contract():
    assert [one for one in check_backend(lambda: Vllm(TINY), timeout_s=240.0) if not one.ok] == []


GAMES = "rollouts --env blob-text --env-option players=3 --groups 3 --samples-per-group 2 --model tiny --temperature 0"
GAMES += " --max-new-tokens 24 --reference none --out"


def played(folder: Path, *more: str) -> list[Group]:
    run(*GAMES.split(), str(folder), *more, cwd=folder.parent)
    return sorted(files.read(folder), key=lambda group: group.number)


Parting = tuple[int, tuple[int, ...], tuple[int, int]]


def parted(ours: Trajectory, theirs: Trajectory) -> Parting | None:
    """Where their answers part: the step, all tokens before, and the two that differ."""
    before: tuple[int, ...] = ()
    for mine, other in zip(ours.turns, theirs.turns, strict=False):
        before = (() if mine.anew else before) + mine.prompt_tokens
        for one, two in zip(mine.completion_tokens, other.completion_tokens, strict=False):
            if one != two:
                return mine.step, before, (one, two)
            before = (*before, one)
        assert mine.completion_tokens == other.completion_tokens
    return None


def first_parting(ours: Game, theirs: Game) -> Parting | None:
    """Of all agents the first: what comes after it may be anything."""
    found = [parted(*pair) for pair in zip(ours.trajectories, theirs.trajectories, strict=True)]
    return min((one for one in found if one is not None), default=None)


def test_greedy_games_are_the_same_up_to_ties(tmp_path):
    ours, theirs = (
        played(tmp_path / "ours"),
        played(tmp_path / "theirs", "--backend", "vllm"),
    )
    assert [group.number for group in ours] == [group.number for group in theirs] == [0, 1, 2]
    pairs = [pair for both in zip(ours, theirs, strict=True) for pair in zip(*(one.games for one in both), strict=True)]
    same = 0
    for mine, other in pairs:
        assert mine.trajectories[0].turns[0].prompt_tokens == other.trajectories[0].turns[0].prompt_tokens
        if (found := first_parting(mine, other)) is None:
            same += 1
            assert [one.reward for one in mine.trajectories] == [one.reward for one in other.trajectories]
            continue
        _, before, tokens = found
        (one,), (two,) = (scored((*before, token), 1) for token in tokens)
        assert abs(one - two) < CLOSE
    assert same >= len(pairs) // 2

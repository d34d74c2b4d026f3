"""The same games of the likeliest answers, played with our own engine and with vLLM."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from gpuinfer.api import BackendContext, ModelSpec, Request, Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.rollouts import files
from gpuinfer.rollouts.record import Game, Group, Trajectory

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
LIMIT_S = 600
CLOSE = 1e-4  # of log-probabilities, and of the top two at a tie
GAMES = ("--env", "blob-text", "--env-option", "players=3", "--groups", "3", "--samples-per-group", "2")
GREEDY = ("--model", "tiny", "--temperature", "0", "--max-new-tokens", "24", "--reference", "none")


def played(folder: Path, *more: str) -> list[Group]:
    command = [sys.executable, "-m", "gpuinfer", "rollouts", *GAMES, *GREEDY, "--out", str(folder), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return sorted(files.read(folder), key=lambda group: group.number)


def logprobs_of(tokens: tuple[int, ...], count: int) -> list[float]:
    """Of the last `count` of these, by a forward of our own engine."""

    async def answered() -> list[float]:
        backend = InProcess(Setup(ModelSpec("tiny", kind="text")))
        await backend.start(BackendContext())
        try:
            request = Request(Prompt(tokens=tokens, sampling=Sampling(max_tokens=0, prompt_logprobs=0)))
            (generation,) = [event.value async for event in backend.stream([request])]
        finally:
            await backend.close()
        return [one.chosen.logprob for one in generation.prompt_logprobs[-count:]]

    return asyncio.run(answered())


def parted(ours: Trajectory, theirs: Trajectory) -> tuple[int, tuple[int, ...], tuple[int, int]] | None:
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


def first_parting(ours: Game, theirs: Game) -> tuple[int, tuple[int, ...], tuple[int, int]] | None:
    """Of all agents the first: what comes after it may be anything."""
    found = [parted(*pair) for pair in zip(ours.trajectories, theirs.trajectories, strict=True)]
    return min((one for one in found if one is not None), default=None)


def test_greedy_games_are_the_same_up_to_ties(tmp_path):
    ours, theirs = played(tmp_path / "ours"), played(tmp_path / "theirs", "--backend", "vllm")
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
        (one,), (two,) = (logprobs_of((*before, token), 1) for token in tokens)
        assert abs(one - two) < CLOSE
    assert same >= len(pairs) // 2

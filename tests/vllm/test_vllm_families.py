"""Models that our own reader refuses: vLLM reads their files, tokenizer and sizes. transformers is the oracle."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_families import FAMILIES, write_family, write_gptq
from vllm_held import Held

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import UsageError
from gpuinfer.generation import Constraint, Generation, Prompt, Sampling
from gpuinfer.text.checkpoint import open_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]
GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
TEXT = "The backend answers what transformers answers, for a prompt that is longer than the window"
CHAT = ({"role": "user", "content": "Which one?"},)
NEAR = 2e-3  # of log-probabilities in float32


def setup_of(folder: Path, dtype: str = "float32") -> Setup:
    return Setup(ModelSpec(str(folder), kind="text", arguments={"context": 128}), dtype=dtype)


def likelihoods(folder: Path, tokens: list[int]) -> np.ndarray:
    """Natural logarithms [tokens - 1, vocabulary] of what transformers thinks comes after each token."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1).numpy()


def compare(folder: Path, found: Generation, near: float) -> None:
    """An answer's log-probabilities are transformers', and each of its tokens is the likeliest, up to ties."""
    tokenizer_tokens = [one.chosen.token for one in found.prompt_logprobs[1:]]
    first, (answer,) = folder_tokens(folder, TEXT)[0], found.completions
    tokens = [first, *tokenizer_tokens, *answer.tokens]
    theirs = likelihoods(folder, tokens)
    told = [one.chosen.logprob for one in (*found.prompt_logprobs[1:], *answer.logprobs)]
    assert np.abs(theirs[np.arange(len(told)), tokens[1:]] - told).max() < near
    drawn = theirs[-len(answer.tokens) :]
    assert (drawn.max(1) - drawn[np.arange(len(drawn)), list(answer.tokens)]).max() < 2 * near


def folder_tokens(folder: Path, text: str) -> list[int]:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]


def asked_of(folder: Path, dtype: str = "float32") -> list[Generation]:
    held = Held(setup_of(folder, dtype), max_num_seqs=4, kv_cache_memory_bytes=64 << 20)
    try:
        return held.asked(
            Prompt(text=TEXT, sampling=Sampling(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0)),
            Prompt(messages=CHAT, sampling=GREEDY),
            Prompt(text="Yes or no?", sampling=Sampling(max_tokens=8, constraint=Constraint(regex="yes|no"))),
        )
    finally:
        held.close()


@pytest.mark.sample
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_our_decoders_do_not_read_answers_as_with_transformers(tmp_path, family):
    folder = write_family(tmp_path / family, family)
    text, chat, constrained = asked_of(folder)
    compare(folder, text, NEAR)
    assert chat.prompt_tokens == len(folder_tokens(folder, "<|start|>user\nWhich one?<|end|>\n<|start|>assistant\n"))
    assert constrained.completions[0].text in ("yes", "no")

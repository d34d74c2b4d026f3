"""Folders as their makers publish them, answered by the engine: token for token what the makers' procedures make of
logits of plain torch.
"""

from __future__ import annotations

from functools import lru_cache, partial

import pytest
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from text import diffusion_reference as reference
from text.diffusion_oracle import embedding_of, predictions
from text.tiny_diffusion import FAMILIES, MASK, tiny_diffusion
from text.unmasking import generator_of, run

from gpuinfer.generation import Generation, Prompt, Sampling, Unmasking

PROMPTS = {length: [40 + 7 * number % 300 for number in range(length)] for length in (1, 5, 8, 11, 16)}
PROMPT = st.sampled_from([1, 5, 11])


@lru_cache(maxsize=8)
def opened(family: str):
    """A generator, and the same model as the references take it."""
    folder = tiny_diffusion(family)
    return generator_of(str(folder), slots=4, context=64), partial(predictions, folder)


def answered(generator, prompt, length, **unmasking) -> list[int]:
    """Temperature 0, and no end before the length."""
    sampling = Sampling(max_tokens=length, temperature=0.0, ignore_eos=True, unmasking=Unmasking(**unmasking))
    (outcome,) = run(generator, [Prompt(tokens=tuple(prompt), sampling=sampling)])
    assert isinstance(outcome, Generation), outcome
    return list(outcome.completions[0].tokens)


@pytest.mark.parametrize("family", ["llada", "llada-moe"])
@settings(max_examples=examples(40), deadline=None)
@given(prompt=PROMPT, length=st.integers(1, 20), block=st.integers(1, 20), steps=st.integers(1, 24))
def test_lladas_procedure(family, prompt, length, block, steps):
    generator, model = opened(family)
    expected = reference.llada(model, MASK, PROMPTS[prompt], length, block, steps)
    found = answered(generator, PROMPTS[prompt], length, decoder="low-confidence", block_length=block, steps=steps)
    assert found == expected.tokens


@settings(max_examples=examples(25), deadline=None)
@given(length=st.integers(1, 16), block=st.integers(1, 16), steps=st.integers(1, 20), scale=st.sampled_from([0.5, 2.0]))
def test_lladas_procedure_with_guidance(length, block, steps, scale):
    generator, model = opened("llada")
    expected = reference.llada(model, MASK, PROMPTS[5], length, block, steps, scale)
    found = answered(generator, PROMPTS[5], length, block_length=block, steps=steps, cfg_scale=scale)
    assert found == expected.tokens


@pytest.mark.parametrize("algorithm", ["probability", "margin", "entropy"])
@settings(max_examples=examples(15), deadline=None)
@given(prompt=PROMPT, length=st.integers(1, 20), steps=st.integers(1, 30))
def test_dreams_procedure(algorithm, prompt, length, steps):
    generator, model = opened("dream")
    expected = reference.dream(model, MASK, PROMPTS[prompt], length, steps, algorithm)
    found = answered(generator, PROMPTS[prompt], length, steps=steps, options={"algorithm": algorithm})
    assert found == expected.tokens


PICKS = {
    "threshold": ({"threshold": 0.6}, {}, reference.fast_dllm(0.6)),
    "threshold, near ties": ({"threshold": 0.6}, {"near": 1e-5}, reference.dinfer(0.6)),
    "threshold, quota": ({"threshold": 0.6}, {"least": "quota"}, reference.sdar(0.6)),
    "factor": ({}, {"factor": 1.5}, reference.factor(1.5)),
    "hierarchical": ({"threshold": 0.8}, {"low_threshold": 0.3}, reference.hierarchical(0.8, 0.3)),
}


@pytest.mark.parametrize("rule", PICKS)
def test_rules_of_which_masks(rule):
    generator, model = opened("llada")
    asked, options, pick = PICKS[rule]
    for length, block, steps in ((20, 20, 5), (19, 8, 6), (6, 4, 2)):
        expected = reference.by_blocks(model, MASK, PROMPTS[5], length, block, steps, pick)
        sizes = {"block_length": block, "steps": steps}
        found = answered(generator, PROMPTS[5], length, decoder=rule.split(",")[0], **asked, **sizes, options=options)
        assert found == expected.tokens


def test_credit_and_smoothing():
    generator, model = opened("llada")
    embedding = embedding_of(tiny_diffusion("llada"))
    for length, block in ((20, 20), (19, 8)):
        how = {"threshold": 0.7, "block_length": block}
        expected = reference.credit(model, MASK, PROMPTS[5], length, block, 0.7)
        assert answered(generator, PROMPTS[5], length, decoder="credit", **how) == expected.tokens
        expected = reference.smoothing(model, embedding, MASK, PROMPTS[5], length, block, 0.7)
        assert answered(generator, PROMPTS[5], length, decoder="smoothing", **how) == expected.tokens


@pytest.mark.sample(4)
@pytest.mark.parametrize("edit", [0.0, 0.5])
@pytest.mark.parametrize("threshold", [0.5, 0.95])
@pytest.mark.parametrize(("prompt", "length"), [(8, 24), (16, 8), (5, 19), (1, 10)])
def test_llada2s_procedure(prompt, length, threshold, edit):
    generator, model = opened("llada2")
    block = generator.decoder.shape.masking.block
    expected = reference.block_refinement(model, MASK, PROMPTS[prompt], length, block, block, threshold, edit)
    how = {"threshold": threshold, "options": {"edit_threshold": edit}}
    for cache in ("none", "exact"):
        assert answered(generator, PROMPTS[prompt], length, cache=cache, **how) == expected.tokens


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_sdars_procedure(steps):
    generator, model = opened("sdar")
    block, blocks = generator.decoder.shape.masking.block, 6
    canvas = [*PROMPTS[8]]
    for _ in range(blocks):  # what lies behind a block is not seen
        canvas += reference.by_blocks(model, MASK, canvas, block, block, steps, reference.sdar(0.6)).tokens
    how = {"threshold": 0.6, "steps": steps * blocks, "options": {"least": "quota"}}
    for cache in ("none", "exact"):
        assert answered(generator, PROMPTS[8], blocks * block, cache=cache, **how) == canvas[8:]


def test_every_family_is_tried():
    assert set(FAMILIES) == {"llada", "llada-moe", "dream", "llada2", "sdar"}

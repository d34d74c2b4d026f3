"""Embeddings of a step's own stand in the place of its tokens', in every decoder."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from decoders import each_decoder
from random_models import LLAMA, VARIANTS, random_weights
from steps import seeing, step_of

from gpuinfer.text.transformer import Vectors

TOKENS = [int(token) for token in np.random.default_rng(4).integers(0, LLAMA.vocabulary, 40)]
MARK = 7
SHAPES = [
    pytest.param(replace(LLAMA, **VARIANTS[name]), id=name)
    for name in ("plain", "layer norms, learned positions, gelu")
]
each_shape = pytest.mark.parametrize("shape", SHAPES)
LAST = np.array([39], np.int32)


def marked(step, weights):
    """The same step, in which every third token is another one whose own embedding is given beside it."""
    places = np.arange(0, len(step.tokens), 3, dtype=np.int32)
    values = weights.embedding[torch.from_numpy(step.tokens[places]).long()].float().numpy()
    tokens = step.tokens.copy()
    tokens[places] = MARK
    return replace(step, tokens=tokens, vectors=Vectors(places, np.ascontiguousarray(values)))


@each_decoder
@each_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_another_tokens_embedding_makes_it_that_token(make, shape, dtype):
    weights = random_weights(shape, dtype)
    step = seeing((2, 0, TOKENS[:9], [9] * 9), (1, 0, TOKENS, [40] * 40))
    with contextlib.closing(make(shape, weights, dtype, slots=3, length=64)) as decoder:
        expected = decoder.forward(step).clone()
        assert torch.equal(decoder.forward(marked(step, weights)), expected)
        assert torch.equal(decoder.forward(step), expected)


@each_decoder
def test_also_where_each_row_is_one_token_further(make):
    weights = random_weights(LLAMA)
    steps = [step_of((0, 0, TOKENS[:8]), (2, 0, TOKENS[:3])), step_of((0, 8, [TOKENS[8]]), (2, 3, [TOKENS[3]]))]
    with contextlib.closing(make(LLAMA, weights, torch.float32, slots=3, length=64)) as decoder:
        expected = [decoder.forward(step).clone() for step in steps]
        for step, logits in zip(steps, expected, strict=True):
            torch.testing.assert_close(decoder.forward(marked(step, weights)), logits, atol=1e-5, rtol=0)


@each_decoder
def test_a_step_of_thousands_of_them_after_one_of_none(make):
    weights = random_weights(LLAMA)
    with contextlib.closing(make(LLAMA, weights, torch.float32, slots=40, length=64)) as decoder:
        alone = decoder.forward(step_of((5, 0, TOKENS))).clone()
        many = marked(step_of(*((slot, 0, TOKENS) for slot in range(40))), weights)
        found = decoder.forward(replace(many, wanted=LAST))
        torch.testing.assert_close(found, alone[-1:], atol=1e-5, rtol=0)

"""Rows whose logits nobody asks for leave the last layer early: what is asked for, and the cache, are as ever."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from counts import examples
from decoders import DECODERS
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import LLAMA, MIXTURES, VARIANTS, random_weights
from steps import seeing, step_of

TOKENS = [int(token) for token in np.random.default_rng(4).integers(0, LLAMA.vocabulary, 90)]
SHAPES = [pytest.param(replace(LLAMA, **changes), id=name) for name, changes in {**VARIANTS, **MIXTURES}.items()]
BITWISE = [name for name in DECODERS if name == "torch, deterministic" or name.startswith("kernels")]
each_bitwise = pytest.mark.parametrize("make", [pytest.param(DECODERS[name], id=name) for name in BITWISE])
CANVASES = (TOKENS[:40], TOKENS[:1], TOKENS[50:79])


def decoder_of(make, shape=LLAMA, dtype=torch.float32):
    return contextlib.closing(make(shape, random_weights(shape, dtype), dtype, slots=3, length=128))


def canvases():
    return seeing(*((slot, 0, tokens, [len(tokens)] * len(tokens)) for slot, tokens in enumerate(CANVASES)))


def asking(step, wanted):
    return replace(step, wanted=np.array(wanted, np.int32))


@each_bitwise
@pytest.mark.parametrize("shape", SHAPES)
def test_few_logits_are_those_of_all(make, shape):
    wanted = [0, 7, 8, 30, 40, 69]
    with decoder_of(make, shape) as decoder:
        every = decoder.forward(canvases()).clone()
        after = decoder.forward(step_of((0, 40, TOKENS[40:43]), (2, 29, TOKENS[3:5]))).clone()
    with decoder_of(make, shape) as decoder:
        assert torch.equal(decoder.forward(asking(canvases(), wanted)), every[wanted])
        again = decoder.forward(step_of((0, 40, TOKENS[40:43]), (2, 29, TOKENS[3:5])))
        assert torch.equal(again, after), "the cache has what all rows have stored"


@pytest.mark.skipif("kernels" not in DECODERS, reason="this processor has no FMA")
@pytest.mark.property
@settings(max_examples=examples(10))
@given(st.sets(st.integers(0, 69), min_size=1), st.sampled_from([1, 2, 3]))
def test_neither_what_else_is_asked_for_nor_threads_show_in_any_bit(wanted, threads):
    rows, weights = sorted(wanted), random_weights(LLAMA)
    made = (
        DECODERS["kernels"](LLAMA, weights, torch.float32, slots=3, length=128, threads=count) for count in (1, threads)
    )
    with contextlib.ExitStack() as ends:
        alone, together = (ends.enter_context(contextlib.closing(decoder)) for decoder in made)
        every = alone.forward(canvases()).clone()
        assert torch.equal(together.forward(asking(canvases(), rows)), every[rows])

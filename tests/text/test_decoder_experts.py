"""Mixtures of experts: each row through those that its router likes best, whoever else goes through them."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from decoders import DECODERS, each_decoder
from masked_attention import masked_logits
from random_models import LLAMA, MIXTURES, random_weights
from steps import seeing, step_of

TOKENS = [int(token) for token in np.random.default_rng(8).integers(0, LLAMA.vocabulary, 120)]
OTHER = TOKENS[::-1]
each_mixture = pytest.mark.parametrize(
    "shape", [pytest.param(replace(LLAMA, **changes), id=name) for name, changes in MIXTURES.items()]
)
BITWISE = [name for name in DECODERS if name == "torch, deterministic" or name.startswith("kernels")]
each_bitwise = pytest.mark.parametrize(
    "make", [pytest.param(partial(DECODERS[name], deterministic=True), id=name) for name in BITWISE]
)


def decoder_of(make, shape, dtype=torch.float32, slots=3):
    return contextlib.closing(make(shape, random_weights(shape, dtype), dtype, slots=slots, length=128))


@each_decoder
@each_mixture
def test_logits_are_those_of_experts_one_after_another(make, shape):
    weights, causal = random_weights(shape), list(range(1, 41))
    with decoder_of(make, shape) as decoder:
        found = decoder.forward(seeing((2, 0, TOKENS[:60], [60] * 60), (0, 0, OTHER[:40], causal))).clone()
        expected = [masked_logits(shape, weights, TOKENS[:60], [60] * 60)]
        expected.append(masked_logits(shape, weights, OTHER[:40], causal))
        torch.testing.assert_close(found, torch.cat(expected).float(), atol=1e-4, rtol=0)
        further = decoder.forward(step_of((0, 40, OTHER[40:41])))
        expected = masked_logits(shape, weights, OTHER[:41], [*causal, 41])[-1:]
        torch.testing.assert_close(further, expected.float(), atol=1e-4, rtol=0)


@each_bitwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_mixture
def test_company_does_not_show_in_any_bit(make, shape, dtype):
    with decoder_of(make, shape, dtype, slots=1) as single:
        alone = single.forward(seeing((0, 0, TOKENS[:43], [43] * 43))).clone()
    with decoder_of(make, shape, dtype) as several:
        step = seeing((1, 0, OTHER, [120] * 120), (2, 0, TOKENS[:43], [43] * 43), (0, 0, [5], [1]))
        assert torch.equal(several.forward(step)[120:163], alone)
        part = several.forward(seeing((0, 0, OTHER[:17], [17] * 17), (2, 7, TOKENS[7:9], [43] * 2)))
        assert torch.equal(part[17:], alone[7:9])


@each_decoder
def test_exchanged_experts_compute_what_a_decoder_of_their_own_does(make):
    shape = replace(LLAMA, **MIXTURES["experts in groups, by sigmoid"])
    step = step_of((0, 0, TOKENS[:30]))
    with decoder_of(make, shape) as decoder:
        other = random_weights(shape, seed=1)
        decoder.forward(step)
        decoder.swap(decoder.pack(other))
        with contextlib.closing(make(shape, other, torch.float32, slots=3, length=128)) as own:
            assert torch.equal(decoder.forward(step), own.forward(step))


@each_decoder
def test_a_row_that_turns_into_nan_harms_no_other(make):
    shape = replace(LLAMA, **MIXTURES["experts in groups, by sigmoid"])
    weights, poison = random_weights(shape), 60
    weights.embedding[poison] = torch.nan
    healthy = [token for token in TOKENS if token != poison][:30]
    with contextlib.closing(make(shape, weights, torch.float32, slots=3, length=128)) as decoder:
        expected = decoder.forward(step_of((1, 0, healthy))).clone()
        found = decoder.forward(step_of((2, 0, [poison] * 9), (1, 0, healthy), (0, 0, [poison])))
        assert found[[0, 8, -1]].isnan().all()
        torch.testing.assert_close(found[9:-1], expected, atol=1e-5, rtol=0)

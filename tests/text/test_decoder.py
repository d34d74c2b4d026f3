"""Every decoder gives the logits of transformers at every position, for every family, however the tokens come."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from decoders import each_decoder, opened
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import logits_of
from steps import COLUMNS, copy_row, scattered, step_of, table_of
from tiny import VOCABULARY, tiny_checkpoint

LENGTH = 208
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MODELS = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, heads of 24 values": ("llama", {"head_dim": 24}),
    "llama, linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama, dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama, llama3": ("llama", {"rope_scaling": LLAMA3}),
    "qwen2, yarn": ("qwen2", {"rope_scaling": YARN}),
    "mistral": ("mistral", {}),
    "mistral, window": ("mistral", {"sliding_window": 24}),
    "mistral, a window in one layer": (
        "mistral",
        {"sliding_window": 24, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2, untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2, a window in one layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "gpt2": ("gpt2", {}),
    "gpt2, untied": ("gpt2", {"tie_word_embeddings": False}),
}
DICE = np.random.default_rng(5)
PROMPTS = [[int(token) for token in DICE.integers(3, VOCABULARY, size)] for size in (200, 77, 9, 1)]
each_model = pytest.mark.parametrize("model", MODELS)
some_models = pytest.mark.parametrize("model", ["llama", "mistral, a window in one layer", "gpt2"])
EXPECTED: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}


def folder_of(model):
    family, changes = MODELS[model]
    return tiny_checkpoint(family, **changes)


def expected(model: str, tokens: Sequence[int]) -> torch.Tensor:
    key = (model, tuple(tokens))
    if key not in EXPECTED:
        EXPECTED[key] = logits_of(folder_of(model), tokens)
    return EXPECTED[key]


@contextlib.contextmanager
def decoder_of(make, model, slots=4, dtype=torch.float32):
    checkpoint = opened(folder_of(model))
    decoder = make(checkpoint.shape, checkpoint.weights(dtype), dtype, slots=slots, length=LENGTH)
    with contextlib.closing(decoder):
        yield decoder


def assert_alike(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


@each_decoder
@each_model
def test_prompts_of_any_length_in_chunks_beside_one_another(make, model):
    long, middle, short, single = PROMPTS
    steps = [
        [(0, 0, long[:90]), (3, 0, short), (1, 0, single)],
        [(0, 90, long[90:91]), (2, 0, middle[:33])],
        [(2, 33, middle[33:34]), (0, 91, long[91:92])],
        [(0, 92, long[92:170]), (2, 34, middle[34:])],
        [(0, 170, long[170:])],
    ]
    prompts = {0: long, 1: single, 2: middle, 3: short}
    with decoder_of(make, model) as decoder:
        for segments in steps:
            found = decoder.forward(step_of(*segments)).clone()
            wanted = [expected(model, prompts[slot])[at : at + len(run)] for slot, at, run in segments]
            assert_alike(found, torch.cat(wanted))


@each_decoder
@some_models
def test_a_prefix_that_is_copied(make, model):
    long, middle = PROMPTS[:2]
    other = long[:60] + middle[:20]
    with decoder_of(make, model) as decoder:
        decoder.forward(step_of((1, 0, long), (3, 0, middle)))  # the third slot has a row of its own before
        copy_row(decoder, 1, [0, 3])
        found = decoder.forward(step_of((3, 60, other[60:]), (0, 60, long[60:64])))
        assert_alike(found[:20], expected(model, other)[60:])
        assert_alike(found[20:], expected(model, long)[60:64])


def sharing(step, prefix):
    """The same where all segments have the first pages of slot 0, as many as `prefix`."""
    pages = step.pages.copy()
    pages[:, :prefix] = table_of([0])[:, :prefix]
    return replace(step, pages=pages)


@each_decoder
@some_models
def test_rows_that_share_their_first_pages(make, model):
    """Some of one length, one of another, one that shares fewer, and one of its own."""
    long, own = PROMPTS[0], PROMPTS[1]
    first, more = long[:128], [long[128:130], long[150:158], long[140:141]]
    fewer = long[:64] + own[:9]
    with decoder_of(make, model, slots=6) as decoder:
        decoder.forward(step_of((0, 0, first)))
        runs = [(slot, 128, run) for slot, run in enumerate(more, 1)]
        together = sharing(step_of(*runs, (4, 64, fewer[64:]), (5, 0, own)), 4)
        pages = together.pages.copy()
        pages[3, 2:4], pages[4] = table_of([4])[0, 2:4], table_of([5])[0]
        found = decoder.forward(replace(together, pages=pages))
        wanted = [expected(model, first + run)[128:] for run in more]
        assert_alike(found, torch.cat([*wanted, expected(model, fewer)[64:], expected(model, own)]))
        again = decoder.forward(sharing(step_of(*((slot, 128 + len(run), [7]) for slot, run in enumerate(more, 1))), 4))
        assert_alike(again, torch.cat([expected(model, [*first, *run, 7])[-1:] for run in more]))


@st.composite
def schedules(draw):
    """Steps of (prompt, start, end): every prompt goes through whole, in chunks, beside whatever is there."""
    left = dict.fromkeys(range(len(PROMPTS)), 0)
    steps = []
    while left:
        chosen = draw(st.lists(st.sampled_from(sorted(left)), min_size=1, max_size=len(left), unique=True))
        segments = []
        for number in chosen:
            start, size = left[number], len(PROMPTS[number])
            end = draw(st.sampled_from([1, 2, 17, 64, size]))
            segments.append((number, start, min(start + end, size)))
            left[number] = segments[-1][2]
            if left[number] == size:
                del left[number]
        steps.append(segments)
    return steps


def check_any_schedule(make, model, steps, slots, order):
    with decoder_of(make, model, slots=6) as decoder:
        decoder.forward(step_of(*((slot, 0, PROMPTS[0]) for slot in range(6))))  # none is as it was made
        for segments in steps:
            step = step_of(*((slots[n], start, PROMPTS[n][start:end]) for n, start, end in segments))
            step = scattered(step, order)
            wanted = [expected(model, PROMPTS[n])[start:end] for n, start, end in segments]
            assert_alike(decoder.forward(step), torch.cat(wanted))


any_schedule = given(steps=schedules(), slots=st.permutations(range(6)), order=st.permutations(range(6 * COLUMNS)))
MIXED = ["mistral, window", "gpt2"]


@each_decoder
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@any_schedule
def test_any_chunks_in_any_pages_in_any_company(make, steps, slots, order):
    check_any_schedule(make, MIXED[0], steps, slots, order)


@pytest.mark.soak
@each_decoder
@each_model
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@any_schedule
def test_any_chunks_in_any_pages_in_any_company_of_every_model(make, model, steps, slots, order):
    check_any_schedule(make, model, steps, slots, order)


@each_decoder
@pytest.mark.parametrize("model", ["qwen2", "gpt2", "qwen3", "llama, tied"])
def test_exchanged_weights_compute_what_a_decoder_of_their_own_does(make, model):
    family, changes = MODELS[model]
    other = opened(tiny_checkpoint(family, seed=9, **changes)).weights(torch.float32)
    step = step_of((0, 0, PROMPTS[1]), (2, 0, PROMPTS[2]))
    with decoder_of(make, model) as decoder:
        before = decoder.forward(step).clone()
        decoder.swap(decoder.pack(other))
        after = decoder.forward(step).clone()
        with contextlib.closing(make(decoder.shape, other, torch.float32, slots=4, length=LENGTH)) as own:
            assert torch.equal(after, own.forward(step))
    assert not torch.allclose(before, after, atol=1e-2)

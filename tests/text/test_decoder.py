"""Every decoder gives the logits of transformers at every position, for every family, however the tokens come;
and those of plain attention, whatever tokens see and whichever experts a router likes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from counts import examples
from decoders import each_decoder, opened
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from masked_attention import masked_logits
from oracle import logits_of
from random_models import LLAMA, MIXTURES, random_weights
from steps import COLUMNS, copy_row, scattered, seeing, step_of, table_of
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
ONE_WINDOW = {"sliding_window": 24, "layer_types": ["full_attention", "sliding_attention"]}
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
    "mistral, a window in one layer": ("mistral", ONE_WINDOW),
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
MIXED = {name: replace(LLAMA, **changes) for name, changes in MIXTURES.items()}
GROUPED = MIXED["experts in groups, by sigmoid"]


def expected(model: str, tokens: Sequence[int]) -> torch.Tensor:
    key = (model, tuple(tokens))
    if key not in EXPECTED:
        family, changes = MODELS[model]
        EXPECTED[key] = logits_of(tiny_checkpoint(family, **changes), tokens)
    return EXPECTED[key]


def weights_of(model, **changes):
    """A model's shape and weights: of a checkpoint by its name, or at random in this shape."""
    if not isinstance(model, str):
        return model, random_weights(model, **changes)
    checkpoint = opened(tiny_checkpoint(MODELS[model][0], **MODELS[model][1], **changes))
    return checkpoint.shape, checkpoint.weights(torch.float32)


def decoder_of(make, shape, weights, slots=4):
    return contextlib.closing(make(shape, weights, torch.float32, slots=slots, length=LENGTH))


def assert_alike(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted.float(), atol=1e-4, rtol=0)


@pytest.mark.sample(7)
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
    with decoder_of(make, *weights_of(model)) as decoder:
        for segments in steps:
            found = decoder.forward(step_of(*segments)).clone()
            wanted = [expected(model, prompts[slot])[at : at + len(run)] for slot, at, run in segments]
            assert_alike(found, torch.cat(wanted))


@each_decoder
@some_models
def test_rows_that_share_their_first_pages_or_have_copies(make, model):
    """Some of one length, one of another, one that shares fewer, and one of its own."""
    long, own = PROMPTS[0], PROMPTS[1]
    first, more = long[:128], [long[128:130], long[150:158], long[140:141]]
    fewer, other = long[:64] + own[:9], long[:60] + own[:20]
    with decoder_of(make, *weights_of(model), slots=6) as decoder:
        decoder.forward(step_of((0, 0, first)))
        pages = np.repeat(table_of([0]), 5, 0)
        pages[:, 4:] = table_of(range(1, 6))[:, 4:]
        pages[3, 2:4], pages[4] = table_of([4])[0, 2:4], table_of([5])[0]
        together = step_of(*((slot, 128, run) for slot, run in enumerate(more, 1)), (4, 64, fewer[64:]), (5, 0, own))
        found = decoder.forward(replace(together, pages=pages))
        wanted = [expected(model, first + run)[128:] for run in more]
        assert_alike(found, torch.cat([*wanted, expected(model, fewer)[64:], expected(model, own)]))
        again = step_of(*((slot, 128 + len(run), [7]) for slot, run in enumerate(more, 1)))
        wanted = [expected(model, [*first, *run, 7])[-1:] for run in more]
        assert_alike(decoder.forward(replace(again, pages=pages[:3])), torch.cat(wanted))
        decoder.forward(step_of((1, 0, long), (3, 0, own)))  # the third slot has a row of its own before
        copy_row(decoder, 1, [0, 3])
        found = decoder.forward(step_of((3, 60, other[60:]), (0, 60, long[60:64])))
        assert_alike(found, torch.cat([expected(model, other)[60:], expected(model, long)[60:64]]))


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
    with decoder_of(make, *weights_of(model), slots=6) as decoder:
        decoder.forward(step_of(*((slot, 0, PROMPTS[0]) for slot in range(6))))  # none is as it was made
        for segments in steps:
            step = step_of(*((slots[n], start, PROMPTS[n][start:end]) for n, start, end in segments))
            wanted = [expected(model, PROMPTS[n])[start:end] for n, start, end in segments]
            assert_alike(decoder.forward(scattered(step, order)), torch.cat(wanted))


any_schedule = given(steps=schedules(), slots=st.permutations(range(6)), order=st.permutations(range(6 * COLUMNS)))


@pytest.mark.sample
@each_decoder
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@any_schedule
def test_any_chunks_in_any_pages_in_any_company(make, steps, slots, order):
    check_any_schedule(make, "mistral, window", steps, slots, order)


@pytest.mark.soak
@each_decoder
@each_model
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@any_schedule
def test_any_chunks_in_any_pages_in_any_company_of_every_model(make, model, steps, slots, order):
    check_any_schedule(make, model, steps, slots, order)


@each_decoder
@pytest.mark.parametrize(
    "model",
    ["qwen2", "gpt2", "qwen3", "llama, tied", GROUPED],
    ids=lambda model: model if isinstance(model, str) else "experts",
)
def test_exchanged_weights_compute_what_a_decoder_of_their_own_does(make, model):
    shape, weights = weights_of(model)
    other = weights_of(model, seed=9)[1]
    step = step_of((0, 0, [token % 61 for token in PROMPTS[1]]), (2, 0, [token % 61 for token in PROMPTS[2]]))
    with decoder_of(make, shape, weights) as decoder, decoder_of(make, shape, other) as own:
        before = decoder.forward(step).clone()
        decoder.swap(decoder.pack(other))
        after = decoder.forward(step).clone()
        assert torch.equal(after, own.forward(step))
    assert not torch.allclose(before, after, atol=1e-2)


TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, LLAMA.vocabulary, 150)]


@st.composite
def canvases(draw):
    """Tokens and what each sees: by blocks of any size, or any number."""
    tokens = draw(st.lists(st.integers(0, LLAMA.vocabulary - 1), min_size=1, max_size=70))
    if draw(st.booleans()):
        block = draw(st.integers(1, 40))
        return tokens, [min(len(tokens), (at // block + 1) * block) for at in range(len(tokens))]
    return tokens, draw(st.lists(st.integers(1, len(tokens)), min_size=len(tokens), max_size=len(tokens)))


@pytest.mark.sample(5)
@each_decoder
@pytest.mark.parametrize("shape", [LLAMA, *MIXED.values()], ids=["dense", *MIXED])
@settings(max_examples=examples(25), deadline=None)
@given(
    rows=st.lists(canvases(), min_size=1, max_size=4),
    slots=st.permutations(range(4)),
    order=st.permutations(range(4 * COLUMNS)),
)
def test_whatever_tokens_see_and_whichever_experts_are_chosen(make, shape, rows, slots, order):
    """And a part that is computed anew sees what the cache has behind it."""
    weights = random_weights(shape)
    with decoder_of(make, shape, weights) as decoder:
        decoder.forward(
            seeing(*((slot, 0, TOKENS[:size], [size] * size) for slot, size in enumerate((40, 70, 100, 130))))
        )
        wanted = [masked_logits(shape, weights, *row) for row in rows]
        runs = [(slot, 0, *row) for slot, row in zip(slots, rows, strict=False)]
        assert_alike(decoder.forward(scattered(seeing(*runs), order)), torch.cat(wanted))
        half = [len(row[0]) // 2 for row in rows]
        runs = [(slot, at, row[0][at:], row[1][at:]) for slot, at, row in zip(slots, half, rows, strict=False)]
        found = decoder.forward(scattered(seeing(*runs), order))
        assert_alike(found, torch.cat([one[at:] for at, one in zip(half, wanted, strict=True)]))


@each_decoder
@pytest.mark.parametrize("shape", [LLAMA, GROUPED], ids=["dense", "experts"])
def test_a_row_that_turns_into_nan_harms_neither_neighbours_nor_who_has_its_pages_next(make, shape):
    weights, poison = random_weights(shape), 60
    weights.embedding[poison] = torch.nan
    healthy = [token for token in TOKENS if token != poison]
    with decoder_of(make, shape, weights, slots=3) as several:
        wanted = several.forward(step_of((2, 0, healthy[:30]))).clone()

        def assert_near(found, begin, end):
            torch.testing.assert_close(found, wanted[begin:end], atol=1e-5, rtol=0)

        found = several.forward(step_of((0, 0, [1, poison] * 30), (1, 0, healthy[:20])))
        assert found[1].isnan().all()
        assert_near(found[60:], 0, 20)
        several.forward(step_of((0, 60, [1]), (1, 20, healthy[20:21])))
        copy_row(several, 1, [0])
        assert_near(several.forward(step_of((0, 20, healthy[20:21]), (1, 21, healthy[21:22]))), 20, 22)
        several.forward(step_of((0, 0, [poison] * 30)))
        copy_row(several, 0, [2])
        for at in range(3):
            assert_near(several.forward(step_of((2, at, healthy[at : at + 1]), (1, 0, [poison])))[:1], at, at + 1)
        for at in range(3):
            assert_near(several.forward(step_of((0, at, healthy[at : at + 1]))), at, at + 1)

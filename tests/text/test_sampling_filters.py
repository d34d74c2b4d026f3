"""Which tokens the filters leave, against their definitions, on both ways."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import PATHS, draw, edited, filtered, probabilities, sampler

from gpuinfer.generation import Sampling
from gpuinfer.text.sampling import cpu_draw, torch_path
from gpuinfer.text.sampling.compiled_path import scratch
from gpuinfer.text.sampling.cpu_values import compiled, order_of, survey, value_of
from gpuinfer.text.sampling.slot_settings import SLOT, settings_of

EDGE = 1e-5  # within it of a limit either answer is right: probabilities are float32


@compiled
def compiled_cut(values, record, work, kept):
    best, _ = survey(values, work[0])
    top = value_of(best)
    threshold = cpu_draw.cut(values, work[0], top, record.inverse, record.top_k, record.top_p, record.floor, work[1:])
    for token in range(values.shape[0]):
        kept[token] = order_of(values[token], token) >= threshold


def record_of(sampling):
    record = np.zeros(1, SLOT)
    record[0] = (*settings_of(sampling), *(0 for _ in range(len(SLOT.names) - len(settings_of(sampling)))))
    return record


def kept_by(path, logits, sampling):
    """bool [vocabulary]: the tokens that may be drawn."""
    record = record_of(sampling)
    if path == "compiled":
        kept = np.zeros(len(logits), np.bool_)
        compiled_cut(logits, record[0], scratch(len(logits)), kept)
        return kept & (probabilities(logits, sampling.temperature) > 0)
    values = torch.from_numpy(logits)[None]
    best, wanted = values.amax(1, keepdim=True), torch_path.WantedDraws.of(record, np.zeros(1), values.device)
    amounts = torch_path.weights(values, best, wanted.inverse)
    return torch_path.kept(torch_path.keys_of(values), amounts, best, wanted)[0].numpy()


LOGITS = st.one_of(
    st.lists(st.integers(-12, 12).map(lambda number: number / 4), min_size=1, max_size=300),
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=90),
    st.builds(
        lambda seed, size, spread: (np.random.default_rng(seed).standard_normal(size) * spread).tolist(),
        st.integers(0, 1 << 30),
        st.integers(1, 3000),
        st.sampled_from([0.01, 1.0, 5.0]),
    ),
).map(lambda values: np.array(values, np.float32))
TEMPERATURES = st.sampled_from([0.01, 0.5, 0.8, 1.0, 1.7, 100.0])
PARTS = st.floats(0.01, 1.0)


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=examples(60), deadline=None)
@given(
    logits=LOGITS, top_k=st.integers(1, 400), top_p=PARTS.filter(lambda p: p < 1), min_p=PARTS, temperature=TEMPERATURES
)
def test_filters_keep_what_their_definitions_say(path, logits, top_k, top_p, min_p, temperature):
    """Top-k the likeliest, and the lowest among equals; top-p the fewest that reach its share of what top-k left; min-p
    what is a part of the best.
    """
    chances, order = probabilities(logits, temperature), np.argsort(-logits.astype(np.float64), kind="stable")
    drawable = set(np.flatnonzero(chances > 2.0**-39))
    kept = set(np.flatnonzero(kept_by(path, logits, Sampling(top_k=top_k, temperature=temperature))))
    assert drawable & set(order[:top_k]) <= kept
    assert drawable & kept <= set(order[:top_k])
    for limit in (0, top_k):
        left = filtered(logits, Sampling(top_k=limit, temperature=temperature))
        asked = Sampling(top_k=limit, top_p=top_p, temperature=temperature)
        kept = np.flatnonzero(kept_by(path, logits, asked))
        likeliest = order[: len(kept)]
        assert set(kept) == set(likeliest)
        assert left[likeliest].sum() >= top_p - EDGE
        assert left[likeliest[:-1]].sum() < top_p + EDGE
    kept = kept_by(path, logits, Sampling(min_p=min_p, temperature=temperature))
    assert (chances[kept] >= min_p * chances.max() * (1 - EDGE)).all()
    assert (chances[~kept] <= min_p * chances.max() * (1 + EDGE)).all()


@pytest.mark.parametrize("path", PATHS)
def test_a_share_that_is_missed_by_less_than_one_unit_of_weight_takes_one_token_more(path):
    for share, count in ((1 / 3, 1), (1 / 3 + 1e-14, 2)):
        assert kept_by(path, np.zeros(3, np.float32), Sampling(top_p=share)).sum() == count


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    repetition=st.floats(0.5, 2.0),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    biases=st.dictionaries(st.integers(0, 49), st.floats(-5, 5), max_size=5),
    min_tokens=st.integers(0, 4),
    stops=st.lists(st.integers(0, 49), max_size=3),
)
def test_edits_are_those_of_the_definition(path, seed, repetition, presence, frequency, biases, min_tokens, stops):
    """Greedy rows over some steps: each token is the best of the logits as the definition edits them."""
    random = np.random.default_rng(seed)
    sampling = Sampling(
        temperature=0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=biases,
        min_tokens=min_tokens,
        stop_token_ids=tuple(stops),
    )
    prompt, answer = random.integers(0, 50, 8).astype(np.int32), []
    found = sampler(path)
    found.admit(2, sampling, prompt)
    logits = random.standard_normal((1, 50)).astype(np.float32)
    for _ in range(6):
        expected = edited(logits[0], sampling, prompt.tolist(), answer, [0])
        token = int(draw(found, logits, [2]).tokens[0])
        assert expected[token] >= expected.max() - 1e-5
        answer.append(token)

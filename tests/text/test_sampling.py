"""Rows keep to themselves: settings, histories, failures, log-probabilities; and what may not be asked."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import KINDS, NO_TOKENS, PATHS, draw, mask_of, row_of, sampler

from gpuinfer.errors import BadPrompt, BadResult
from gpuinfer.generation import Sampling
from gpuinfer.text.sampling import check_sampling, compiled_path, torch_path
from gpuinfer.text.sampling.cpu_values import compiled as compiled_kernel
from gpuinfer.text.sampling.cpu_values import weight_of

SETTINGS = {
    "temperature": st.sampled_from([0.0, 0.01, 0.7, 1.0, 2.0, 100.0]),
    "top_k": st.sampled_from([0, 0, 1, 5, 40, 1000, 1 << 50]),
    "top_p": st.sampled_from([1.0, 1.0, 1e-9, 0.5, 0.95, 0.999999]),
    "min_p": st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
    "presence_penalty": st.sampled_from([0.0, 0.5]),
    "frequency_penalty": st.sampled_from([0.0, -0.5]),
    "min_tokens": st.sampled_from([0, 3]),
    "seed": st.sampled_from([None, 5]),
}
LONG = {"stop_token_ids": st.sampled_from([(), (1, 2)]), "logit_bias": st.sampled_from([{}, {3: 2.0, 9: -100.0}])}
WIDE = {
    "logprobs": st.sampled_from([None, None, 0, 3, 20]),
    "processed_logprobs": st.booleans(),
    "logit_bias": st.sampled_from([{}, {0: 2.0}]),
}


def logits_of(rows, vocabulary, seed):
    return (np.random.default_rng(seed).standard_normal((rows, vocabulary)) * 2).astype(np.float32)


@pytest.fixture
def many_threads(monkeypatch):
    """Every call is large enough to be shared between threads."""
    monkeypatch.setattr(compiled_path, "LARGE", 1)


@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=examples(25), deadline=None)
@given(
    asked=st.lists(st.builds(Sampling, **SETTINGS, **LONG), min_size=1, max_size=12),
    seed=st.integers(0, 1 << 20),
    data=st.data(),
)
def test_a_row_draws_the_same_in_any_company(path, asked, seed, data):
    vocabulary, rows, steps = 90, len(asked), 4
    prompt = np.arange(5, 15, dtype=np.int32)
    order = data.draw(st.permutations(range(rows)))
    logits = [logits_of(rows, vocabulary, seed + step) for step in range(steps)]
    together = sampler(path, rows, vocabulary, threads=2)
    for row, sampling in enumerate(asked):
        together.admit(order[row], sampling, prompt, f"row {row}", row)
    expected = [draw(together, logits[step], order).tokens for step in range(steps)]
    together.close()
    alone = sampler(path, 3, vocabulary)
    for row, sampling in enumerate(asked):
        alone.admit(1, sampling, prompt, f"row {row}", row)
        found = [draw(alone, logits[step][row : row + 1], [1]).tokens[0] for step in range(steps)]
        assert found == [tokens[row] for tokens in expected]


@settings(max_examples=examples(100), deadline=None)
@given(
    asked=st.lists(st.tuples(st.builds(Sampling, **SETTINGS, **WIDE), st.sampled_from(KINDS)), min_size=1, max_size=12),
    vocabulary=st.sampled_from([1, 2, 31, 64, 65, 127, 1000, 5000, 50_000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    masked=st.booleans(),
    piece=st.sampled_from([1, 5, 1000]),
    seed=st.integers(0, 1 << 20),
)
def test_both_ways_draw_and_describe_the_same_to_the_bit(asked, vocabulary, dtype, masked, piece, seed):
    rows, random = len(asked), np.random.default_rng(seed)
    ways = [sampler(path, rows, vocabulary) for path in PATHS]
    for way in ways:
        for row, (sampling, _) in enumerate(asked):
            way.admit(row, sampling, np.arange(min(vocabulary, 10), dtype=np.int32), "", row)
    for _ in range(2):
        whole = torch.from_numpy(np.stack([row_of(kind, vocabulary, random) for _, kind in asked])).to(dtype)
        masks = np.tile(mask_of(range(0, vocabulary, 3), vocabulary), (rows, 1)) if masked else None
        with mock.patch.dict(torch_path.WORK_BYTES, cpu=piece * vocabulary * torch_path.LOGIT_BYTES):
            compiled, torched = (way.draw(whole, np.arange(rows, dtype=np.int32), masks) for way in ways)
        assert compiled.tokens.tolist() == torched.tokens.tolist()
        assert compiled.logprobs == torched.logprobs
        assert [(row, str(why)) for row, why in compiled.bad.items()] == [
            (row, str(why)) for row, why in torched.bad.items()
        ]
        if compiled.processed is not None:
            assert compiled.processed.tolist() == torched.processed.tolist()  # but for the sign of 0


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 100.0])
def test_both_ways_weigh_the_same_to_the_bit(scale):
    above = -np.random.default_rng(1).random(1 << 17, np.float32) * np.float32(scale)
    above[:4] = 0.0, -0.0, -np.inf, -87.0
    compiled = np.empty(len(above), np.int64)
    weigh_each(above, np.float32(0), np.float32(1), compiled)
    one = torch.ones(1, 1)
    assert torch_path.weights(torch.from_numpy(above)[None], 0 * one, one)[0].tolist() == compiled.tolist()


@compiled_kernel
def weigh_each(values, best, inverse, out):
    for token in range(values.shape[0]):
        out[token] = weight_of(values[token], best, inverse)


@pytest.mark.parametrize("path", PATHS)
def test_without_temperature_the_lowest_of_the_likeliest_comes_and_a_slot_forgets_the_answer_before(path):
    for vocabulary in (1, 5, 64, 1000):
        found = sampler(path, 3, vocabulary)
        for slot in range(3):
            found.admit(slot, Sampling(temperature=0), NO_TOKENS)
        logits = np.zeros((3, vocabulary), np.float32)
        logits[1, vocabulary // 2 :] = 1
        logits[2, 0] = -0.0
        assert draw(found, logits).tokens.tolist() == [0, vocabulary // 2, 0]
    found.admit(0, Sampling(temperature=0, logit_bias={4: 50.0}, presence_penalty=2.0, logprobs=1), np.arange(9))
    assert draw(found, logits[:1], [0]).tokens.tolist() == [4]
    found.release(0)
    found.admit(0, Sampling(temperature=0), NO_TOKENS)
    drawn = draw(found, logits[:1], [0])
    assert (drawn.tokens.tolist(), drawn.logprobs) == ([0], [None])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf], ids=["NaN", "negative NaN", "infinity"])
def test_a_broken_row_fails_alone_and_may_be_drawn_for_again(path, temperature, value):
    found, control = (sampler(path, 3, 200) for _ in range(2))
    for one in (found, control):
        for slot in range(3):
            one.admit(slot, Sampling(temperature=temperature, top_k=20), NO_TOKENS, "", slot)
    logits = logits_of(3, 200, 1)
    broken = logits.copy()
    broken[1, 150] = value
    drawn, expected = draw(found, broken), draw(control, logits)
    assert isinstance(drawn.bad[1], BadResult)
    assert list(drawn.bad) == [1]
    assert drawn.tokens.tolist() == [expected.tokens[0], -1, expected.tokens[2]]
    assert draw(found, logits[1:2], [1]).tokens[0] == expected.tokens[1]


@pytest.mark.parametrize("path", PATHS)
def test_a_row_to_which_nothing_is_left_fails_alone(path):
    found = sampler(path, 3, 70)
    for slot in range(3):
        found.admit(slot, Sampling(), NO_TOKENS, "", slot)
    logits = logits_of(3, 70, 1)
    logits[2] = -np.inf
    masks = np.stack([mask_of([66], 70), mask_of([], 70), mask_of(range(70), 70)])
    drawn = draw(found, logits, masks=masks)
    assert drawn.tokens.tolist() == [66, -1, -1]
    assert [type(drawn.bad[row]) for row in (1, 2)] == [BadPrompt, BadPrompt]


@pytest.mark.parametrize("path", PATHS)
def test_before_min_tokens_no_end_comes_unless_the_constraint_leaves_nothing_else(path):
    found = sampler(path, 1, 40, end_tokens=(0, 1))
    found.admit(0, Sampling(temperature=0, min_tokens=2, stop_token_ids=(2,)), NO_TOKENS)
    logits = np.arange(40, 0, -1, dtype=np.float32)[None]
    only_end = mask_of([1], 40)[None]
    assert draw(found, logits).tokens.tolist() == [3]
    assert draw(found, logits, masks=only_end).tokens.tolist() == [1]
    assert draw(found, logits).tokens.tolist() == [0]


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 1 << 20), vocabulary=st.integers(1, 400), wanted=st.integers(0, 20), ties=st.booleans())
def test_log_probabilities_are_those_of_the_raw_logits(path, seed, vocabulary, wanted, ties):
    found = sampler(path, 2, vocabulary)
    logits = logits_of(2, vocabulary, seed)
    logits = np.round(logits) if ties else logits
    for slot in range(2):
        asked = Sampling(logprobs=wanted, temperature=0.5, top_p=0.8, logit_bias={0: 1.0}, repetition_penalty=1.2)
        found.admit(slot, asked, NO_TOKENS, "", slot)
    drawn = draw(found, logits)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), 1).numpy()
    for row, logprob in enumerate(drawn.logprobs):
        likeliest = np.argsort(-logits[row], kind="stable")
        assert logprob.chosen.token == drawn.tokens[row]
        assert likeliest[logprob.chosen.rank - 1] == drawn.tokens[row]
        assert [one.token for one in logprob.likeliest] == likeliest[:wanted].tolist()
        assert [one.rank for one in logprob.likeliest] == list(range(1, min(wanted, vocabulary) + 1))
        for one in (logprob.chosen, *logprob.likeliest):
            assert one.logprob == pytest.approx(expected[row, one.token], abs=2e-6)


@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fails", [False, True])
def test_the_prompt_has_log_probabilities_too_which_are_not_those_of_the_draw_before(path, fails):
    """Nor when the logits are the same memory, as a decoder's are from step to step."""
    found, logits = sampler(path, 1, 100, threads=2), torch.from_numpy(logits_of(70, 100, 3))
    found.admit(0, Sampling(logprobs=2), NO_TOKENS)
    if fails:
        logits[0, 5] = torch.nan
    assert bool(found.draw(logits[:1], np.zeros(1, np.int32)).bad) == fails
    logits.copy_(torch.from_numpy(logits_of(70, 100, 4)))
    logits[5, 9] = -torch.inf
    expected = torch.log_softmax(logits.double(), 1)[:, 9].tolist()
    expected[5] = -9999.0
    given = found.given_logprobs(logits, np.full(70, 9, np.int32), 2)
    assert [one.chosen.logprob for one in given] == pytest.approx(expected, abs=2e-6)
    assert given[5].chosen.rank == 100
    logits[3, 3] = torch.nan
    with pytest.raises(BadResult):
        found.given_logprobs(logits, np.full(70, 9, np.int32), 2)
    found.close()


REFUSED = [
    ({"temperature": -0.1}, "temperature is -0.1"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"temperature": float("inf")}, "temperature is inf"),
    ({"top_p": 0.0}, "top_p is 0.0"),
    ({"top_p": 1.1}, "top_p is 1.1"),
    ({"min_p": -0.1}, "min_p is -0.1"),
    ({"top_k": -1}, "top_k is -1"),
    ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
    ({"presence_penalty": 2.5}, "presence_penalty is 2.5"),
    ({"frequency_penalty": -2.5}, "frequency_penalty is -2.5"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9"),
    ({"logprobs": 21}, "logprobs is 21"),
    ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
    ({"seed": 1 << 64}, "seed is"),
    ({"logit_bias": {50: 1.0}}, "logit_bias names token 50"),
    ({"logit_bias": {3: float("-inf")}}, "logit_bias of token 3"),
    ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "1025 entries"),
    ({"stop": ("a",) * 65}, "stop has 65 entries"),
    ({"stop": ("a" * 2049,) * 2}, "4098 characters in all"),
    ({"stop_token_ids": (-1,)}, "stop_token_ids names token -1"),
    ({"stop_token_ids": (1,) * 1025}, "1025 entries"),
]


@pytest.mark.parametrize(("asked", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_cannot_be_is_refused_before_the_slot_changes(asked, words):
    with pytest.raises(BadPrompt, match=words):
        check_sampling(Sampling(**asked), 50)
    found = sampler(slots=1, vocabulary=50)
    found.admit(0, Sampling(temperature=0, logit_bias={7: 9.0}), NO_TOKENS)
    with pytest.raises(BadPrompt, match=words):
        found.admit(0, Sampling(**asked), NO_TOKENS)
    assert draw(found, np.zeros((1, 50), np.float32)).tokens.tolist() == [7]

"""Tokens come as often as they should, whatever is varied, and independently of one another."""

from __future__ import annotations

import numpy as np
import pytest
from sampling_reference import NO_TOKENS, PATHS, draw, edited, filtered, sampler
from scipy import stats

from gpuinfer.generation import Sampling
from gpuinfer.text.sampling import cpu_draw

UNLIKELY = 1e-4  # of a right program to fail; seeds are fixed, so it does not do so now and then
VOCABULARY = 20
LOGITS = np.random.default_rng(5).standard_normal(VOCABULARY).astype(np.float32) * 1.5
ROWS, STEPS = 500, 30
CASES = {
    "plain": Sampling(),
    "hot": Sampling(temperature=1.6),
    "top-k": Sampling(top_k=5),
    "top-p": Sampling(top_p=0.7),
    "min-p": Sampling(min_p=0.2),
    "all three": Sampling(temperature=0.9, top_k=8, top_p=0.9, min_p=0.1),
    "biased": Sampling(logit_bias={3: 1.5, 4: -2.0}),
}


def assert_frequencies(tokens, chances):
    """A chi-squared test over the tokens that are expected often enough for one."""
    found = np.bincount(tokens, minlength=len(chances))
    assert (found[chances == 0] == 0).all()
    often = chances * len(tokens) >= 5
    expected = np.append(chances[often], chances[~often].sum()) * len(tokens)
    counted = np.append(found[often], found[~often].sum())
    some = expected > 0
    assert stats.chisquare(counted[some], expected[some]).pvalue > UNLIKELY


@pytest.mark.parametrize(
    ("counter_and_key", "words"),
    [
        ("00000000 " * 6, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 6, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_random_numbers_are_those_of_the_published_test_vectors(counter_and_key, words):
    given, found = (
        np.array([[int(word, 16) for word in counter_and_key.split()]], np.uint64),
        np.zeros((1, 4), np.uint64),
    )
    cpu_draw.philox_words(given, found)
    assert [f"{int(word):08x}" for word in found[0]] == words.split()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES)
def test_tokens_come_as_often_as_they_should_over_keys_and_positions(case, path):
    found = sampler(path, ROWS, VOCABULARY)
    for slot in range(ROWS):
        found.admit(slot, CASES[case], NO_TOKENS, f"row {slot}", 0)
    logits = np.tile(LOGITS, (ROWS, 1))
    tokens = np.concatenate([draw(found, logits).tokens for _ in range(STEPS if path == "compiled" else 6)])
    assert_frequencies(tokens, filtered(edited(LOGITS, CASES[case], [], [], [0]), CASES[case]))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("asked", [Sampling(top_k=70), Sampling(top_p=0.35)], ids=["top-k", "top-p"])
def test_equal_tokens_that_stay_come_equally_often(asked, path):
    rows = 2100
    found = sampler(path, rows, 200)
    for slot in range(rows):
        found.admit(slot, asked, NO_TOKENS, "", slot)
    assert_frequencies(draw(found, np.ones((rows, 200), np.float32)).tokens, (np.arange(200) < 70) / 70)


@pytest.mark.parametrize("varied", ["seed", "own seed", "sample", "key"])
def test_tokens_come_as_often_as_they_should_over(varied):
    logits, tokens = np.tile(LOGITS, (ROWS, 1)), []
    for part in range(6):
        found = sampler(slots=ROWS, vocabulary=VOCABULARY, seed=part)
        for slot in range(ROWS):
            number = part * ROWS + slot
            own = Sampling(seed=number if varied == "own seed" else None)
            key, sample = str(number) if varied == "key" else "", number if varied in ("sample", "seed") else 0
            found.admit(slot, own, NO_TOKENS, key, sample)
        tokens.append(draw(found, logits).tokens)
    assert_frequencies(np.concatenate(tokens), filtered(LOGITS, Sampling()))


@pytest.mark.parametrize("apart", ["positions", "samples", "seeds", "keys"])
def test_neighbours_are_independent(apart):
    """Two draws that differ in one thing by the least possible: their tokens, in four classes, form a product."""
    logits = np.tile(np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32)), (4000, 1))
    first, second = (sampler(slots=4000, vocabulary=4, seed=11) for _ in range(2))
    for slot in range(4000):
        own = slot * 2 if apart == "seeds" else None
        first.admit(slot, Sampling(seed=own), NO_TOKENS, f"{slot}a", 2 * slot)
        step = Sampling(seed=None if own is None else own + 1)
        second.admit(slot, step, NO_TOKENS, f"{slot}{'b' if apart == 'keys' else 'a'}", 2 * slot + (apart == "samples"))
    one = draw(first, logits).tokens
    other = draw(first if apart == "positions" else second, logits).tokens
    table = np.zeros((4, 4))
    np.add.at(table, (one, other), 1)
    assert stats.chi2_contingency(table).pvalue > UNLIKELY


@pytest.mark.parametrize("path", PATHS)
def test_the_same_is_drawn_for_the_same_names_and_another_for_others(path):
    logits = np.random.default_rng(1).standard_normal((1, 1000)).astype(np.float32)

    def first(seed=7, own=None, key="a", sample=0):
        found = sampler(path, 1, 1000, seed=seed)
        found.admit(0, Sampling(seed=own), NO_TOKENS, key, sample)
        return draw(found, logits).tokens[0]

    assert first() == first()
    assert len({first(), first(seed=8), first(key="b"), first(sample=1), first(own=3)}) == 5
    assert first(own=3) == first(own=3, seed=99, key="elsewhere")

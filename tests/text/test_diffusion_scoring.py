"""Scores of masks: what they say of a row of logits, and that nothing else has a say in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuinfer.errors import BadPrompt, BadResult
from gpuinfer.generation import Sampling
from gpuinfer.text.diffusion.scoring import Asked, Scored, Scorer, guided
from gpuinfer.text.sampling import compiled_path

VOCABULARY = 301
ENDS = (7,)
NEEDS = ("margin", "entropy")
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.0, 0.6, 1.5]),
    top_k=st.sampled_from([0, 0, 1, 9]),
    top_p=st.sampled_from([1.0, 1.0, 0.7]),
    min_p=st.sampled_from([0.0, 0.0, 0.2]),
    min_tokens=st.sampled_from([0, 0, 4]),
    seed=st.sampled_from([None, 11]),
    logit_bias=st.sampled_from([{}, {}, {5: 30.0}, {5: -100.0, 8: 1.5}]),
    stop_token_ids=st.sampled_from([(), (5, 6)]),
)


@pytest.fixture(params=["compiled", "torch"])
def scorer(request):
    """One that scores in this way, both on the CPU."""
    made = scorer_of(request.param)
    yield made
    made.close()


def scorer_of(way: str, threads: int = 2, vocabulary: int = VOCABULARY, **more) -> Scorer:
    made = Scorer(vocabulary, "cpu", threads=threads, seed=3, **more)
    made._on_cpu = way == "compiled"  # the other way, which is for GPUs
    return made


def logits_of(count: int, seed: int = 0, scale: float = 4.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, scale, (count, VOCABULARY)).astype(np.float32))


def asked(sampling=None, first=0, count=4, key="k", sample=0, step=0, at=0) -> Asked:
    positions = np.arange(at, at + count, dtype=np.int32)
    return Asked(sampling or Sampling(temperature=0.0), key, sample, first, positions, step)


def test_the_likeliest_token_its_probability_the_margin_and_the_entropy(scorer):
    logits = logits_of(8)
    chances = torch.softmax(logits.double(), 1)
    first, second = chances.topk(2, 1).values.T
    scored = scorer.score(logits, [asked(count=8)], NEEDS)
    assert scored.tokens.tolist() == logits.argmax(1).tolist()
    np.testing.assert_allclose(scored.confidence, first, rtol=1e-6)
    np.testing.assert_allclose(scored.margin, first - second, rtol=1e-6)
    np.testing.assert_allclose(scored.entropy, -(chances * chances.log()).sum(1), rtol=1e-6)


def test_confidences_near_one_are_told_apart(scorer):
    """As float64 tells them apart: by what is left to 1."""
    logits = torch.full((3, VOCABULARY), -100.0)
    logits[:, 4] = 0.0
    logits[:, 5] = torch.tensor([-25.0, -26.0, -27.0])
    logits[:, 200] = torch.tensor([-22.0, -23.0, -24.0])
    left = 1 - scorer.score(logits, [asked(count=3)]).confidence
    expected = torch.tensor([[25.0, 22.0], [26.0, 23.0], [27.0, 24.0]], dtype=torch.float64).neg().exp().sum(1)
    np.testing.assert_allclose(left, expected, rtol=1e-4)


def same(one: Scored, place: slice, other: Scored, place_of_other: slice, row: int, row_of_other: int) -> None:
    for name in ("tokens", "confidence", "margin", "entropy"):
        assert getattr(one, name)[place].tolist() == getattr(other, name)[place_of_other].tolist(), name
    assert one.uniform(row).tolist() == other.uniform(row_of_other).tolist()


@settings(max_examples=examples(25), deadline=None)
@given(
    rows=st.lists(st.tuples(SAMPLINGS, st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=5), data=st.data()
)
def test_a_row_has_the_same_scores_alone_and_in_company_and_with_any_threads(rows, data):
    firsts = np.cumsum([0] + [count for _, count, _ in rows])
    logits = logits_of(int(firsts[-1]), data.draw(st.integers(0, 99)))
    company = [
        asked(sampling, int(first), count, f"row {number}", number % 2, step, at=step)
        for number, ((sampling, count, step), first) in enumerate(zip(rows, firsts, strict=False))
    ]
    many, one = (scorer_of("compiled", threads, end_tokens=ENDS, mask_token=300) for threads in (3, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_path, "LARGE", 1)
        together = many.score(logits.clone(), company, NEEDS)
    for number, row in enumerate(company):
        place = slice(row.first, row.first + len(row.positions))
        alone = one.score(logits[place].clone(), [asked_at(row, 0)], NEEDS)
        same(together, place, alone, slice(None), number, 0)
    many.close()


def asked_at(row: Asked, first: int) -> Asked:
    return Asked(row.sampling, row.key, row.sample, first, row.positions, row.step)


@settings(max_examples=examples(25), deadline=None)
@given(sampling=SAMPLINGS, seed=st.integers(0, 99))
def test_both_ways_agree(sampling, seed):
    logits = logits_of(9, seed)
    found = [
        scorer_of(way, end_tokens=ENDS, mask_token=300).score(logits.clone(), [asked(sampling, count=9)], NEEDS)
        for way in ("compiled", "torch")
    ]
    assert found[0].tokens.tolist() == found[1].tokens.tolist()
    for name in ("confidence", "margin", "entropy"):
        np.testing.assert_allclose(getattr(found[0], name), getattr(found[1], name), rtol=1e-5, atol=1e-12)


def drawn(scorer, **changes) -> list[int]:
    given_row = {"sampling": Sampling(temperature=3.0), "count": 6} | changes
    return scorer.score(logits_of(6, scale=0.5), [asked(**given_row)]).tokens.tolist()


def test_draws_follow_seed_key_sample_position_and_step(scorer):
    base = drawn(scorer)
    assert drawn(scorer) == base
    changed = [drawn(scorer, key="other"), drawn(scorer, sample=1), drawn(scorer, step=1), drawn(scorer, at=1)]
    changed.append(drawn(scorer, sampling=Sampling(temperature=3.0, seed=4)))
    assert all(other != base for other in changed)
    own = Sampling(temperature=3.0, seed=4)
    assert drawn(scorer, sampling=own) == drawn(scorer, sampling=own, key="other")


def test_confidence_is_of_the_drawn_token_without_the_temperature(scorer):
    logits = logits_of(50, scale=1.0)
    scored = scorer.score(logits, [asked(Sampling(temperature=2.0, top_k=20), count=50)])
    chances = torch.softmax(logits.double(), 1)[np.arange(50), scored.tokens]
    np.testing.assert_allclose(scored.confidence, chances, rtol=1e-5)


def test_the_mask_itself_never_comes(scorer):
    logits = logits_of(3)
    logits[:, 300] = 50.0
    masked = scorer_of("compiled" if scorer._on_cpu else "torch", mask_token=300)
    scored = masked.score(logits, [asked(count=3)])
    assert 300 not in scored.tokens
    assert scored.logprobs(0, 20).chosen.rank == 1


def test_end_and_stop_tokens_wait_for_min_tokens(scorer):
    logits = torch.zeros(6, VOCABULARY)
    logits[:, 7], logits[:, 6], logits[:, 1] = 3.0, 2.0, 1.0
    own = scorer_of("compiled" if scorer._on_cpu else "torch", end_tokens=ENDS)
    sampling = Sampling(temperature=0.0, min_tokens=4, stop_token_ids=(6,))
    assert own.score(logits, [asked(sampling, count=6)]).tokens.tolist() == [1, 1, 1, 1, 7, 7]


@pytest.mark.parametrize(
    ("value", "error"),
    [
        pytest.param(torch.nan, BadResult, id="not a number"),
        pytest.param(torch.inf, BadResult, id="infinite"),
        pytest.param(-torch.inf, BadPrompt, id="nothing may come"),
    ],
)
def test_a_row_fails_alone(scorer, value, error):
    logits = logits_of(6)
    logits[4] = value
    scored = scorer.score(logits, [asked(count=3), asked(first=3, count=3)], NEEDS)
    assert {row: type(why) for row, why in scored.bad.items()} == {1: error}
    assert scored.tokens.tolist() == [*logits[:4].argmax(1).tolist(), -1, int(logits[5].argmax())]


def test_log_probabilities_are_of_the_token_at_its_step(scorer):
    logits = logits_of(4)
    scored = scorer.score(logits, [asked(count=4)])
    told = scored.logprobs(2, 3)
    assert told.chosen.token == scored.tokens[2]
    assert told.chosen.logprob == pytest.approx(np.log(scored.confidence[2]), abs=1e-6)
    assert [one.rank for one in told.likeliest] == [1, 2, 3]


def test_guidance_is_the_reference_formula():
    conditional, unconditional = logits_of(3, 1), logits_of(3, 2)
    expected = unconditional + (1.5 + 1) * (conditional - unconditional)
    guided(conditional, unconditional, 1.5)
    assert torch.equal(conditional, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_says_the_same_alone_and_in_company_and_nearly_what_the_processor_says():
    sampling = Sampling(temperature=0.8, top_k=20, seed=1, logit_bias={4: 2.0})
    logits = logits_of(200)
    company = [asked(sampling, first, 10, at=first) for first in range(0, 200, 10)]
    scorer = Scorer(VOCABULARY, "cuda", threads=1, seed=3, mask_token=300)
    together = scorer.score(logits.cuda(), company, NEEDS)
    for number, row in enumerate(company):
        place = slice(row.first, row.first + 10)
        same(together, place, scorer.score(logits[place].cuda(), [asked_at(row, 0)], NEEDS), slice(None), number, 0)
    here = scorer_of("compiled", mask_token=300).score(logits, company, NEEDS)
    assert (here.tokens == together.tokens).mean() > 0.99
    np.testing.assert_allclose(here.entropy, together.entropy, rtol=1e-5)

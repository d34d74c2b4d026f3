"""Scores of masks: what they say of a row of logits, and that nothing else has a say in it; and what masks are blended
with.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from text.unmasking import MASK, answered, decoder_of, generator_over, prompt_of

from gpuinfer.errors import BadPrompt, BadResult
from gpuinfer.generation import Sampling
from gpuinfer.text.diffusion.scoring import Asked, Blender, Scored, Scorer, guided
from gpuinfer.text.sampling import compiled_path
from gpuinfer.text.transformer import Step

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
PATHS = pytest.mark.parametrize("path", ["compiled", "torch"])  # both on the CPU; the second is that of GPUs


def scorer_of(path: str, threads: int = 2, **more) -> Scorer:
    made = Scorer(VOCABULARY, "cpu", threads=threads, seed=3, **more)
    made._on_cpu = path == "compiled"
    return made


def logits_of(count: int, seed: int = 0, scale: float = 4.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, scale, (count, VOCABULARY)).astype(np.float32))


def asked(sampling=None, first=0, count=4, key="k", sample=0, step=0, at=0) -> Asked:
    positions = np.arange(at, at + count, dtype=np.int32)
    return Asked(sampling or Sampling(temperature=0.0), key, sample, first, positions, step)


@PATHS
def test_the_likeliest_token_its_probability_the_margin_and_the_entropy(path):
    logits, scorer = logits_of(8), scorer_of(path)
    chances = torch.softmax(logits.double(), 1)
    first, second = chances.topk(2, 1).values.T
    scored = scorer.score(logits, [asked(count=8)], NEEDS)
    assert scored.tokens.tolist() == logits.argmax(1).tolist()
    np.testing.assert_allclose(scored.confidence, first, rtol=1e-6)
    np.testing.assert_allclose(scored.margin, first - second, rtol=1e-6)
    np.testing.assert_allclose(scored.entropy, -(chances * chances.log()).sum(1), rtol=1e-6)
    told = scored.logprobs(2, 3)  # of the token at its step
    assert told.chosen.token == scored.tokens[2]
    assert told.chosen.logprob == pytest.approx(np.log(scored.confidence[2]), abs=1e-6)
    assert [one.rank for one in told.likeliest] == [1, 2, 3]
    # Of a drawn token, without the temperature.
    logits = logits_of(50, scale=1.0)
    scored = scorer.score(logits, [asked(Sampling(temperature=2.0, top_k=20), count=50)])
    chances = torch.softmax(logits.double(), 1)[np.arange(50), scored.tokens]
    np.testing.assert_allclose(scored.confidence, chances, rtol=1e-5)


@PATHS
def test_confidences_near_one_are_told_apart(path):
    """As float64 tells them apart: by what is left to 1."""
    logits = torch.full((3, VOCABULARY), -100.0)
    logits[:, 4] = 0.0
    logits[:, 5] = torch.tensor([-25.0, -26.0, -27.0])
    logits[:, 200] = torch.tensor([-22.0, -23.0, -24.0])
    left = 1 - scorer_of(path).score(logits, [asked(count=3)]).confidence
    expected = torch.tensor([[25.0, 22.0], [26.0, 23.0], [27.0, 24.0]], dtype=torch.float64).neg().exp().sum(1)
    np.testing.assert_allclose(left, expected, rtol=1e-4)


def check_same(one: Scored, place: slice, row: int, alone: Scored) -> None:
    for name in ("tokens", "confidence", "margin", "entropy"):
        assert getattr(one, name)[place].tolist() == getattr(alone, name).tolist(), name
    assert one.uniform(row).tolist() == alone.uniform(0).tolist()


ROWS = st.lists(st.tuples(SAMPLINGS, st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=5)


@settings(max_examples=examples(25), deadline=None)
@given(rows=ROWS, seed=st.integers(0, 99))
def test_a_row_has_the_same_scores_alone_and_in_company_and_with_any_threads(rows, seed):
    firsts = np.cumsum([0] + [count for _, count, _ in rows])
    logits = logits_of(int(firsts[-1]), seed)
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
        check_same(together, place, number, one.score(logits[place].clone(), [replace(row, first=0)], NEEDS))
    many.close()


@settings(max_examples=examples(25), deadline=None)
@given(sampling=SAMPLINGS, seed=st.integers(0, 99))
def test_both_paths_agree(sampling, seed):
    logits, scored = logits_of(9, seed), []
    for path in ("compiled", "torch"):
        scorer = scorer_of(path, end_tokens=ENDS, mask_token=300)
        scored.append(scorer.score(logits.clone(), [asked(sampling, count=9)], NEEDS))
    assert scored[0].tokens.tolist() == scored[1].tokens.tolist()
    for name in ("confidence", "margin", "entropy"):
        np.testing.assert_allclose(getattr(scored[0], name), getattr(scored[1], name), rtol=1e-5, atol=1e-12)


@PATHS
def test_draws_follow_seed_key_sample_position_and_step(path):
    scorer, plain, own = scorer_of(path), Sampling(temperature=3.0), Sampling(temperature=3.0, seed=4)

    def drawn(sampling=plain, **changes):
        return scorer.score(logits_of(6, scale=0.5), [asked(sampling, count=6, **changes)]).tokens.tolist()

    assert drawn() == drawn()
    for other in (drawn(key="other"), drawn(sample=1), drawn(step=1), drawn(at=1), drawn(own)):
        assert other != drawn()
    assert drawn(own) == drawn(own, key="other")


@PATHS
def test_the_mask_itself_never_comes_and_ends_wait_for_min_tokens(path):
    logits = logits_of(3)
    logits[:, 300] = 50.0
    scored = scorer_of(path, mask_token=300).score(logits, [asked(count=3)])
    assert 300 not in scored.tokens
    assert scored.logprobs(0, 20).chosen.rank == 1
    logits = torch.zeros(6, VOCABULARY)
    logits[:, 7], logits[:, 6], logits[:, 1] = 3.0, 2.0, 1.0
    sampling = Sampling(temperature=0.0, min_tokens=4, stop_token_ids=(6,))
    found = scorer_of(path, end_tokens=ENDS).score(logits, [asked(sampling, count=6)]).tokens
    assert found.tolist() == [1, 1, 1, 1, 7, 7]


@PATHS
@pytest.mark.parametrize(
    ("value", "error"),
    [
        pytest.param(torch.nan, BadResult, id="not a number"),
        pytest.param(torch.inf, BadResult, id="infinite"),
        pytest.param(-torch.inf, BadPrompt, id="nothing may come"),
    ],
)
def test_a_row_fails_alone(path, value, error):
    logits = logits_of(6)
    logits[4] = value
    scored = scorer_of(path).score(logits, [asked(count=3), asked(first=3, count=3)], NEEDS)
    assert {row: type(why) for row, why in scored.bad.items()} == {1: error}
    assert scored.tokens.tolist() == [*logits[:4].argmax(1).tolist(), -1, int(logits[5].argmax())]


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
        check_same(together, place, number, scorer.score(logits[place].cuda(), [replace(row, first=0)], NEEDS))
    here = scorer_of("compiled", mask_token=300).score(logits, company, NEEDS)
    assert (here.tokens == together.tokens).mean() > 0.99
    np.testing.assert_allclose(here.entropy, together.entropy, rtol=1e-5)


# Blending


def blender(embedding: torch.Tensor, threads: int = 1) -> Blender:
    return Blender(SimpleNamespace(embedding=lambda: embedding), 3, threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mask_becomes_its_embedding_and_a_share_of_the_expected_one(dtype):
    dice = torch.Generator().manual_seed(0)
    embedding, logits = torch.randn(200, 24, generator=dice).to(dtype), 3 * torch.randn(9, 200, generator=dice)
    logits[:, 3] = -torch.inf
    places = np.array([1, 4, 8])
    found = blender(embedding).blended(logits, places, 0.25)
    expected = embedding[3].double() + 0.25 * logits[places].double().softmax(-1) @ embedding.double()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    together = blender(embedding, threads=3).blended(logits, np.arange(9), 0.25)
    assert (together[places] == found).all()  # the same bits with any neighbours and threads


def test_masks_enter_the_next_step_of_their_block_blended_and_tokens_do_not(monkeypatch):
    decoder, steps = decoder_of("all see all", 2, 72), list[Step]()
    forward = decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda step: (steps.append(step), forward(step))[1])
    answered(generator_over(decoder), prompt_of("hello", 12, block_length=6, decoder="smoothing", ignore_eos=True))
    assert len(steps) > 4
    for step in steps:
        if (step.tokens[5:11] == MASK).all() or not (step.tokens[5:11] == MASK).any():
            continue
        masks = np.flatnonzero(step.tokens == MASK)
        assert step.vectors.places.tolist() == masks[masks < 11].tolist()
        assert step.vectors.values.shape == (len(step.vectors.places), decoder.shape.hidden)
    options = ({"first": first, "most": 1.0} for first in (0.0, 1.0))
    asked = [prompt_of("hello", 30, decoder="smoothing", options=one, ignore_eos=True) for one in options]
    assert len({answered(generator_over(decoder), one).tokens for one in asked}) == 2

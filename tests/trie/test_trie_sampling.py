"""Drawing among a few tokens is drawing from all of them with a mask, to the bit."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuinfer.errors import BadPrompt, BadResult
from gpuinfer.generation import Sampling
from gpuinfer.text.language.grammar import token_bits, words_of
from gpuinfer.text.sampling import Sampler
from gpuinfer.text.sampling.torch_path import TorchPath

VOCABULARY, ROWS, ENDS = 300, 4, (7, 290)


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    most = draw(st.sampled_from([0, 0, 3]))
    tokens = st.integers(0, VOCABULARY - 1)
    return Sampling(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 1, 3, 40])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.4, 0.05])),
        min_p=draw(st.sampled_from([0.0, 0.1, 0.9])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.7])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.5])),
        min_tokens=most,
        stop_token_ids=tuple(draw(st.lists(tokens, max_size=3))),
        logit_bias=draw(st.dictionaries(tokens, st.sampled_from([-100.0, 2.5]), max_size=5)),
        logprobs=draw(st.sampled_from([None, 0, 3])),
        processed_logprobs=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


def sampler_of(device: str, wanted: list[Sampling]) -> Sampler:
    sampler = Sampler(ROWS, VOCABULARY, "cpu", seed=1, end_tokens=ENDS, threads=1)
    if device == "torch":
        sampler._path = TorchPath(sampler._slots, VOCABULARY)
    for slot, sampling in enumerate(wanted):
        sampler.admit(slot, sampling, np.array([3, 5, 3], np.int32), str(slot))
    return sampler


def rules_of(kinds: list[int], ids: list[list[int]]) -> SimpleNamespace:
    starts = np.cumsum([0, *map(len, ids)]).astype(np.int32)
    flat = np.array([token for some in ids for token in some], np.int32)
    return SimpleNamespace(kinds=np.array(kinds, np.int8), starts=starts, ids=flat)


def masks_of(kinds: list[int], ids: list[list[int]]) -> np.ndarray:
    words = words_of(VOCABULARY)
    rows = [
        np.full(words, -1, np.int32) if kind != 1 else token_bits(some, words)
        for kind, some in zip(kinds, ids, strict=True)
    ]
    for row, kind, some in zip(rows, kinds, ids, strict=True):
        if kind == 2:
            row &= ~token_bits(some, words)
    return np.array(rows)


@pytest.mark.parametrize("device", ["compiled", "torch"])
@given(wanted=st.lists(samplings(), min_size=ROWS, max_size=ROWS), seed=st.integers(0, 1 << 30), data=st.data())
@settings(max_examples=examples(100))
def test_few_tokens_are_drawn_from_as_from_a_mask(device, wanted, seed, data):
    rows = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=90, unique=True).map(sorted)
    one, other = sampler_of(device, wanted), sampler_of(device, wanted)
    logits = torch.randn(3, ROWS, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4
    for step in range(3):
        kinds = data.draw(st.lists(st.integers(0, 2), min_size=ROWS, max_size=ROWS))
        ids = [data.draw(rows) if kind else [] for kind in kinds]
        slots = np.arange(ROWS, dtype=np.int32)
        few = one.draw(logits[step], slots, None, rules_of(kinds, ids))
        masked = other.draw(logits[step], slots, masks_of(kinds, ids))
        assert few.tokens.tolist() == masked.tokens.tolist()
        assert few.logprobs == masked.logprobs
        assert (few.processed is None) == (masked.processed is None)
        if few.processed is not None:
            assert few.processed.tobytes() == masked.processed.tobytes()
        assert {row: str(why) for row, why in few.bad.items()} == {row: str(why) for row, why in masked.bad.items()}


def test_a_row_fails_alone_when_its_few_tokens_are_no_numbers():
    sampler = sampler_of("compiled", [Sampling()] * ROWS)
    logits = torch.zeros(ROWS, VOCABULARY)
    logits[1, 10], logits[2, 10], logits[3, 11] = torch.nan, -torch.inf, torch.nan
    drawn = sampler.draw(logits, np.arange(ROWS, dtype=np.int32), None, rules_of([1] * ROWS, [[10]] * ROWS))
    assert drawn.tokens.tolist() == [10, -1, -1, 10]  # what no row may say is not looked at
    assert isinstance(drawn.bad[1], BadResult)
    assert isinstance(drawn.bad[2], BadPrompt)

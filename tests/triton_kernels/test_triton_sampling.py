"""Kernels that draw tokens do what torch does, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_reference import KINDS, mask_of, row_of, sampler

from gpuinfer.generation import Sampling
from gpuinfer.text.sampling import torch_path, triton_draws
from gpuinfer.text.sampling.torch_path import TorchPath
from gpuinfer.text.sampling.triton_draws import TritonDraws

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.usefixtures("interpreted")]

OPTIONS = [
    Sampling(temperature=0),
    Sampling(temperature=0.8),
    Sampling(temperature=0.01, top_p=0.5),
    Sampling(top_k=1),
    Sampling(top_k=150, processed_logprobs=True),
    Sampling(temperature=2.0, top_k=40),
    Sampling(top_p=1e-9),
    Sampling(temperature=0.8, top_p=0.95),
    Sampling(temperature=100.0, top_p=0.999999),
    Sampling(min_p=0.1),
    Sampling(temperature=1.7, top_k=40, top_p=0.9, min_p=0.02),
    Sampling(top_k=5000, top_p=0.3, logprobs=3),
    Sampling(top_p=1 / 3 + 1e-14, processed_logprobs=True),
    Sampling(top_p=0.7, repetition_penalty=1.3, logit_bias={0: 2.0}, processed_logprobs=True),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(triton_draws, "BLOCK", 128)


def kernels_and_torch(rows, vocabulary):
    """Samplers that draw by kernels, by torch and by what is compiled for processors, with all options in turn."""
    ways = [sampler(path, rows, vocabulary) for path in ("torch", "torch", "compiled")]
    ways[0]._path = TorchPath(ways[0]._slots, vocabulary, TritonDraws())
    for way in ways:
        for slot in range(rows):
            way.admit(slot, OPTIONS[slot % len(OPTIONS)], np.arange(min(vocabulary, 5), dtype=np.int32), "", slot)
    return ways


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, which the interpreter computes with
@pytest.mark.parametrize(
    ("kind", "vocabulary", "masked"),
    [
        *((kind, 200, False) for kind in KINDS),
        ("normal", 1, False),
        ("equal", 3, False),
        ("ties", 128, True),
        ("normal", 129, True),
    ],
)
def test_rows_of_all_kinds_draw_the_same_to_the_bit(kind, vocabulary, masked):
    rows, random = len(OPTIONS), np.random.default_rng(vocabulary)
    ways = kernels_and_torch(rows, vocabulary)
    masks = np.tile(mask_of(range(0, vocabulary, 3), vocabulary), (rows, 1)) if masked else None
    logits = torch.from_numpy(np.stack([row_of(kind, vocabulary, random) for _ in range(rows)]))
    own, *others = (way.draw(logits, np.arange(rows, dtype=np.int32), masks) for way in ways)
    for other in others:
        assert own.tokens.tolist() == other.tokens.tolist()
        assert own.logprobs == other.logprobs
        assert own.processed.tolist() == other.processed.tolist()
        assert own.bad.keys() == other.bad.keys()


def test_weights_are_the_same_to_the_bit():
    random = np.random.default_rng(2)
    values = torch.from_numpy(-random.random((6, 3000), np.float32) * np.array([[1e-3], [1], [10], [30], [90], [200]]))
    values, best, inverse = values.float(), torch.zeros(6, 1), torch.rand(6, 1) + 0.5
    assert torch.equal(TritonDraws().weights(values, best, inverse), torch_path.weights(values, best, inverse))


def test_tokens_are_drawn_on_the_device_of_the_logits_whichever_is_current(made_current, monkeypatch):
    way, values, launched = TritonDraws(), torch.zeros(1, 8), []
    for name in ("weigh", "pick"):
        kernel = dict.fromkeys([(1,), (1, 1)], lambda *given, **sizes: launched.append(made_current[-1].device))
        monkeypatch.setattr(way._kernels, name, kernel)
    wanted = torch_path.WantedDraws(torch.zeros(5, 1, dtype=torch.int64), False, False)
    way.drawn(values, values.amax(1), wanted)
    assert launched == [values.device] * 2


def test_both_ways_are_compared_before_the_kernels_are_used(monkeypatch, caplog):
    monkeypatch.setattr(triton_draws, "COMPARED_TOKENS", 300)
    triton_draws.compare(TritonDraws(), torch.device("cpu"))
    drawn = TritonDraws.drawn
    monkeypatch.setattr(TritonDraws, "drawn", lambda *given: tuple(one + 1 for one in drawn(*given)))
    with pytest.raises(RuntimeError, match="are drawn, and"):
        triton_draws.compare(TritonDraws(), torch.device("cpu"))

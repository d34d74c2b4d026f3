"""On a CUDA device: tokens and log-probabilities are those of the compiled kernels, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_reference import KINDS, mask_of, row_of, sampler

from gpuinfer.generation import Sampling
from gpuinfer.text.sampling.torch_path import TorchPath
from gpuinfer.text.sampling.triton_draws import draws_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda", 0)
OPTIONS = [
    Sampling(temperature=0),
    Sampling(temperature=0.8),
    Sampling(temperature=2.0, top_k=40),
    Sampling(temperature=0.8, top_p=0.95),
    Sampling(min_p=0.1, logprobs=3),
    Sampling(temperature=1.7, top_k=4000, top_p=0.9, min_p=0.02, processed_logprobs=True),
    Sampling(top_p=0.7, repetition_penalty=1.3, frequency_penalty=0.2, min_tokens=3, logit_bias={0: 2.0}),
]


@pytest.mark.parametrize("vocabulary", [1, 1000, 50_257, 128_256])
@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "our kernels"])
def test_the_device_draws_what_the_processor_draws(kernels, vocabulary):
    rows, random = 70, np.random.default_rng(vocabulary)
    own = draws_for(CUDA) if kernels else None
    assert kernels == (own is not None)
    device, processor = (sampler("compiled", rows, vocabulary) for _ in range(2))
    device._path = TorchPath(device._slots, vocabulary, own)
    for one in (device, processor):
        for slot in range(rows):
            one.admit(slot, OPTIONS[slot % len(OPTIONS)], np.arange(min(vocabulary, 9), dtype=np.int32), "", slot)
    for step in range(4):
        logits = torch.from_numpy(
            np.stack([row_of(KINDS[row % len(KINDS)], vocabulary, random) for row in range(rows)])
        )
        masks = np.tile(mask_of(range(0, vocabulary, 3), vocabulary), (rows, 1)) if step == 3 else None
        slots = np.arange(rows, dtype=np.int32)
        found, wanted = device.draw(logits.to(CUDA), slots, masks), processor.draw(logits, slots, masks)
        assert found.tokens.tolist() == wanted.tokens.tolist()
        assert found.logprobs == wanted.logprobs
        assert found.processed.tolist() == wanted.processed.tolist()
        assert found.bad.keys() == wanted.bad.keys()

"""A model that transformers' own code computes, as a CUDA device would run it: prompts, rows that go on, adapters."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

sys.path += [str(Path(__file__).parents[1] / part) for part in (".", "text")]

from steps import step_of
from text.tiny_families import tiny_family

from gpuinfer.api import ModelSpec
from gpuinfer.text.checkpoint import open_checkpoint
from gpuinfer.text.decoder.transformers_decoder import TransformersDecoder
from gpuinfer.text.transformer import Adapter, LowRank

UPLOADS = "text/decoder/torch_batch.py Uploads.room"  # until the copy before is over
TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 300, 150)]


@pytest.mark.sample
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", ["gemma2", "olmo2", "phi"])
def test_steps_with_and_without_adapters_run_on_the_device_and_wait_for_nothing(cuda, family, deterministic):
    with unset_fake_temporarily():
        checkpoint = open_checkpoint(ModelSpec(str(tiny_family(family)), kind="text"), "transformers")
        model = checkpoint.model(torch.bfloat16)
        lows = [
            LowRank(name, 0, torch.randn(4, inputs), torch.randn(outputs, 4))
            for name, (outputs, inputs) in checkpoint.traced.linears.items()
        ]
    one = TransformersDecoder(
        checkpoint.shape, checkpoint.traced, model, cuda.device, torch.bfloat16,
        slots=5, pages=40, length=160, deterministic=deterministic,
    )  # fmt: skip
    for number in (3, 7):
        one.load(number, one.pack_adapter(Adapter((tuple(lows),))))
    steps = [
        step_of((0, 0, TOKENS[:20]), (3, 0, TOKENS[:3]), (1, 0, TOKENS[:34])),
        step_of((0, 20, [5]), (3, 3, [8]), (1, 34, [7])),
    ]
    with cuda.waiting_only_in(UPLOADS):
        for step in steps:
            for numbers in ([0, 3, 7], [3, 3, 3], [0, 0, 0]):
                logits = one.forward(replace(step, adapters=np.array(numbers, np.int32)))
                assert (logits.device, logits.shape) == (cuda.device, (len(step.wanted), checkpoint.shape.vocabulary))
    one.unload(3)
    one.unload(7)

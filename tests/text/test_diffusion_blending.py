"""What masks are blended with is what torch makes of it, and depends neither on neighbours nor on threads."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from text.unmasking import MASK, answered, decoder_of, generator_over, prompt_of

from gpuinfer.text.diffusion.scoring import Blender
from gpuinfer.text.transformer import Step


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


def test_the_same_bits_with_any_neighbours_and_threads():
    dice = torch.Generator().manual_seed(1)
    embedding, logits = torch.randn(3000, 70, generator=dice), 3 * torch.randn(40, 3000, generator=dice)
    together = blender(embedding, threads=3).blended(logits, np.arange(40), 0.3)
    for place in (0, 17, 39):
        alone = blender(embedding).blended(logits, np.array([place]), 0.3)
        assert (alone[0] == together[place]).all()


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


def test_blending_changes_what_is_answered():
    texts = {
        answered(
            generator_over(decoder_of("all see all", 2, 72)),
            prompt_of("hello", 30, decoder="smoothing", options={"first": first, "most": 1.0}, ignore_eos=True),
        ).tokens
        for first in (0.0, 1.0)
    }
    assert len(texts) == 2

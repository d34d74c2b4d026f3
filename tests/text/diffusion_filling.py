"""A decoder at work without a generator: one row, the whole canvas in each step, scores by the engine's own scorer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from text.diffusion_reference import Filled, blocks_of
from torch import Tensor

from gpuinfer.generation import Sampling
from gpuinfer.text.diffusion.scoring import Asked, Scorer
from gpuinfer.text.diffusion.unmasking_decoder import MOST_IDLE, Edited, UnmaskingDecoder, View
from gpuinfer.text.diffusion.unmasking_plan import threshold_for

Model = Callable[..., Tensor]
GREEDY = Sampling(temperature=0.0)


def filled(
    decoder: UnmaskingDecoder,
    model: Model,
    mask: int,
    prompt: Sequence[int],
    length: int,
    block: int,
    steps: int,
    *,
    threshold: float | None = None,
    sampling: Sampling = GREEDY,
    embedding: Tensor | None = None,
    aligned: bool = False,
) -> Filled:
    """`steps` of the whole answer. `aligned`: blocks lie at multiples of their length, the last one whole as well, and
    see nothing behind them; `steps` are those of one block.
    """
    room = -(-(len(prompt) + length) // block) * block - len(prompt) if aligned else length
    canvas, kept, forwards = [*prompt, *[mask] * room], decoder.begin(), 0
    vocabulary = model(canvas).shape[1]
    scorer = Scorer(vocabulary, "cpu", threads=1, seed=0, mask_token=mask)
    bounds = _aligned(len(prompt), room, block, steps) if aligned else blocks_of(len(prompt), length, block, steps)
    places = list(bounds)
    for number, (start, end, own) in enumerate(places):
        step, idle, vectors = 0, 0, dict[int, Tensor]()
        while True:
            left = [at for at in range(start, end) if canvas[at] == mask]
            if not left and not decoder.edits:
                break
            logits = model(canvas[:end] if aligned else canvas, *([vectors] if vectors else []))
            asked = list(range(start, end)) if decoder.edits else left
            view, expected = _view(
                decoder, kept, scorer, logits, asked, left, canvas, len(prompt), forwards, sampling,
                {"step": step, "steps": own, "block": number, "blocks": len(places), "masks": end - start,
                 "threshold": threshold_for(decoder, threshold)},
            )  # fmt: skip
            decision = decoder.decide(kept, view)
            assert decision.commit.shape == (len(left),)
            for at, token, taken in zip(left, view.tokens.tolist(), decision.commit.tolist(), strict=True):
                canvas[at] = token if taken else mask
            edits = _edit(decision.edit, view, canvas, len(prompt))
            forwards, step = forwards + 1, step + 1
            idle = 0 if decision.commit.any() else idle + 1
            share = decoder.blend(kept, step)
            vectors = {}
            if share and embedding is not None:
                vectors = {at: embedding[mask] + share * expected[at] @ embedding for at in left if canvas[at] == mask}
            if not left and (not edits or idle == MOST_IDLE):
                break
            assert left == [] or idle < MOST_IDLE
    scorer.close()
    return Filled(canvas[len(prompt) :][:length], forwards)


def _view(
    decoder: UnmaskingDecoder, kept: Any, scorer: Scorer, logits: Tensor, asked: list[int], left: list[int],
    canvas: list[int], prompt: int, forwards: int, sampling: Sampling, more: dict[str, Any],
) -> tuple[View, dict[int, Tensor]]:  # fmt: skip
    """What the decoder sees, and the probabilities of what each mask may become."""
    some = logits[asked].contiguous()
    if type(decoder).adjust is not UnmaskingDecoder.adjust:
        decoder.adjust(kept, np.array(asked, np.int32) - prompt, some.numpy())
    positions = np.array(asked, np.int32) - prompt
    scores = scorer.score(some, [Asked(sampling, "key", 0, 0, positions, forwards)], decoder.needs)
    assert scores.bad == {}
    masked = np.isin(asked, left)
    tokens = np.array([canvas[at] for at in asked], np.int32)
    edited = Edited(positions[~masked], tokens[~masked], scores.tokens[~masked], scores.confidence[~masked])
    view = View(
        positions=positions[masked],
        tokens=scores.tokens[masked],
        confidence=scores.confidence[masked],
        margin=None if scores.margin is None else scores.margin[masked],
        entropy=None if scores.entropy is None else scores.entropy[masked],
        uniform=lambda: scores.uniform(0)[masked],
        edited=edited if decoder.edits else None,
        **more,
    )
    return view, {at: torch.softmax(some[place], 0) for place, at in enumerate(asked)}


def _edit(edit: Any, view: View, canvas: list[int], prompt: int) -> int:
    if edit is None or view.edited is None:
        return 0
    for position, token in zip(view.edited.positions[edit], view.edited.likeliest[edit], strict=True):
        canvas[prompt + int(position)] = int(token)
    return int(edit.sum())


def _aligned(prompt: int, length: int, block: int, steps: int) -> list[tuple[int, int, int]]:
    end = prompt + length
    return [
        (max(start, prompt), min(start + block, end), steps) for start in range(prompt // block * block, end, block)
    ]

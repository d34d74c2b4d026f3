"""How diffusion models of text fill their masks in, as their makers describe it: one row at a time, in plain torch,
with nothing of the engine. The judges of decoders and of the generator.

A model is a function from the tokens of a whole canvas to float32 logits [tokens, vocabulary], each row for the token
at its own position. All is at temperature 0. Where the makers are silent (a last block that is shorter, steps that
blocks do not divide) it is as docs/diffusion.md says. The mask itself never comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Model = Callable[..., Tensor]
Pick = Callable[[Tensor, list[int], "Moment"], list[int]]
"""Of confidences float64 [n] of the masks at these positions, which of the n are committed."""


@dataclass(frozen=True)
class Filled:
    """An answer, and how many forward passes it took (with guidance two at once count as one)."""

    tokens: list[int]
    forwards: int


@dataclass(frozen=True)
class Moment:
    """Where in its block a step stands."""

    step: int
    steps: int
    masks: int  # of the block as it began

    @property
    def due(self) -> int:
        """What LLaDA's schedule commits: as many in each step, one more in each of the first."""
        return self.masks // self.steps + (1 if self.step < self.masks % self.steps else 0)


def blocks_of(prompt: int, length: int, block: int, steps: int) -> Iterator[tuple[int, int, int]]:
    """First position, end and steps of each block of the answer."""
    count = -(-length // block)
    for number in range(count):
        own = max(1, steps // count + (1 if number < steps % count else 0))
        yield prompt + number * block, prompt + min(length, (number + 1) * block), own


def surest(confidence: Tensor, count: int) -> list[int]:
    """Of equal ones the first."""
    return sorted(range(len(confidence)), key=lambda place: (-float(confidence[place]), place))[:count]


def scored(logits: Tensor, mask: int) -> tuple[Tensor, Tensor]:
    """Tokens and their probabilities, float64."""
    logits = logits.clone()
    logits[:, mask] = -torch.inf
    chances, tokens = torch.softmax(logits.double(), 1).max(1)
    return tokens, chances


def llada(
    model: Model, mask: int, prompt: Sequence[int], length: int, block: int, steps: int, cfg_scale: float = 0.0
) -> Filled:
    """The generation procedure of LLaDA (Nie et al. 2025): low-confidence remasking, semi-autoregressive by blocks, and
    unsupervised classifier-free guidance.
    """
    canvas = torch.tensor([*prompt, *[mask] * length])
    given = torch.arange(len(canvas)) < len(prompt)
    forwards = 0
    for start, end, own in blocks_of(len(prompt), length, block, steps):
        masks = int((canvas[start:end] == mask).sum())
        for step in range(own):
            due = Moment(step, own, masks).due
            if due == 0:
                continue  # nothing would come of it
            forwards += 1
            logits = model(canvas.tolist())
            if cfg_scale > 0:
                nothing = model(torch.where(given, mask, canvas).tolist())
                logits = nothing + (cfg_scale + 1) * (logits - nothing)
            tokens, chances = scored(logits, mask)
            chances[end:] = -torch.inf
            chances[canvas != mask] = -torch.inf
            for position in surest(chances, due):
                canvas[position] = tokens[position]
    return Filled(canvas[len(prompt) :].tolist(), forwards)


def by_blocks(
    model: Model, mask: int, prompt: Sequence[int], length: int, block: int, steps: int, pick: Pick
) -> Filled:
    """Blocks from left to right, each until it has no mask; `pick` says what a step commits."""
    canvas = torch.tensor([*prompt, *[mask] * length])
    forwards = 0
    for start, end, own in blocks_of(len(prompt), length, block, steps):
        masks, step = end - start, 0
        while (left := [at for at in range(start, end) if canvas[at] == mask]) != []:
            tokens, chances = scored(model(canvas.tolist()), mask)
            for place in pick(chances[left], left, Moment(step, own, masks)):
                canvas[left[place]] = tokens[left[place]]
            step, forwards = step + 1, forwards + 1
    return Filled(canvas[len(prompt) :].tolist(), forwards)


def fast_dllm(threshold: float) -> Pick:
    """All from the threshold upwards; the surest in any case (Wu et al. 2025)."""

    def pick(confidence: Tensor, positions: list[int], moment: Moment) -> list[int]:
        ranked = surest(confidence, len(confidence))
        return ranked[:1] + [place for place in ranked[1:] if confidence[place] >= threshold]

    return pick


def dinfer(threshold: float, near: float = 1e-5) -> Pick:
    """All from the threshold upwards, or from a little below the surest, whichever is lower (Ma et al. 2025)."""

    def pick(confidence: Tensor, positions: list[int], moment: Moment) -> list[int]:
        bound = min(threshold, float(confidence.max()) - near)
        return [place for place, one in enumerate(confidence.tolist()) if one >= bound]

    return pick


def sdar(threshold: float) -> Pick:
    """All from the threshold upwards if these are as many as the schedule has; else as many as that."""

    def pick(confidence: Tensor, positions: list[int], moment: Moment) -> list[int]:
        sure = [place for place, one in enumerate(confidence.tolist()) if one >= threshold]
        return sure if len(sure) >= moment.due else surest(confidence, moment.due)

    return pick


def factor(size: float) -> Pick:
    """The longest beginning of the ranking in which the n-th has (n + 1) (1 - confidence) ≤ size; the first always."""

    def pick(confidence: Tensor, positions: list[int], moment: Moment) -> list[int]:
        ranked = surest(confidence, len(confidence))
        chosen = ranked[:1]
        for number, place in enumerate(ranked[1:], 2):
            if float(confidence[place]) < 1 - size / (number + 1):
                break
            chosen.append(place)
        return chosen

    return pick


def hierarchical(threshold: float, low: float) -> Pick:
    """The surest of each run if above `low`, all above the threshold; where none is above `low`, the surest of all (Ma
    et al. 2025).
    """

    def pick(confidence: Tensor, positions: list[int], moment: Moment) -> list[int]:
        if float(confidence.max()) < low:
            return surest(confidence, 1)
        chosen = {place for place, one in enumerate(confidence.tolist()) if one > threshold}
        run = [0]
        for place in [*range(1, len(positions)), None]:
            if place is not None and positions[place] == positions[place - 1] + 1:
                run.append(place)
                continue
            top = max(run, key=lambda one: (float(confidence[one]), -one))
            if float(confidence[top]) > low:
                chosen.add(top)
            run = [] if place is None else [place]
        return sorted(chosen)

    return pick


def dream(
    model: Model, mask: int, prompt: Sequence[int], length: int, steps: int, algorithm: str, last_time: float = 1e-3
) -> Filled:
    """Dream's generation (Ye et al. 2025): the whole answer is one block, over times from 1 to `last_time`."""
    canvas = torch.tensor([*prompt, *[mask] * length])
    times = torch.linspace(1, last_time, steps + 1)
    forwards = 0
    for step in range(steps):
        left = (canvas == mask).nonzero().flatten().tolist()
        share = 1 - times[step + 1] / times[step]
        count = int(len(left) * share) if step < steps - 1 else len(left)
        if count == 0:
            continue  # nothing would come of it
        forwards += 1
        logits = model(canvas.tolist())[left]
        logits[:, mask] = -torch.inf
        chances = torch.softmax(logits.double(), 1)
        tokens = chances.argmax(1)
        for place in surest(sureness(chances, algorithm), count):
            canvas[left[place]] = tokens[place]
    return Filled(canvas[len(prompt) :].tolist(), forwards)


def sureness(chances: Tensor, algorithm: str) -> Tensor:
    """Of probabilities [n, vocabulary]: the largest, its distance to the second, or the negative entropy."""
    if algorithm == "margin":
        first, second = chances.topk(2, 1).values.T
        return first - second
    if algorithm == "entropy":
        return (chances * chances.clamp_min(1e-300).log()).sum(1)
    return chances.amax(1)


def credit(
    model: Model, mask: int, prompt: Sequence[int], length: int, block: int, threshold: float,
    weight: float = 0.7, power: float = 0.2, fading: float = 0.8,
) -> Filled:  # fmt: skip
    """CreditDecoding (Wang et al. 2025) with a dense matrix of credits, one for the whole answer."""
    canvas = torch.tensor([*prompt, *[mask] * length])
    credits: Tensor | None = None
    forwards = 0
    for start, end, _ in blocks_of(len(prompt), length, block, 1):
        while (left := [at for at in range(start, end) if canvas[at] == mask]) != []:
            logits = model(canvas.tolist())
            credits = torch.zeros(logits.shape, dtype=torch.float64) if credits is None else credits * fading
            chances, tokens = torch.softmax(logits.double(), 1).max(1)
            for at in left:
                credits[at, tokens[at]] += chances[at] ** power
            fused = (logits.double() + weight * torch.log1p(credits)).float()
            tokens, chances = scored(fused, mask)
            for place in fast_dllm(threshold)(chances[left], left, Moment(0, 1, len(left))):
                canvas[left[place]] = tokens[left[place]]
            forwards += 1
    return Filled(canvas[len(prompt) :].tolist(), forwards)


def smoothing(
    model: Model, embedding: Tensor, mask: int, prompt: Sequence[int], length: int, block: int, threshold: float
) -> Filled:
    """Iteration smoothing (Ma et al. 2025, dInfer): what masks are expected to be is mixed into their embeddings. A
    block's first step has plain masks.
    """
    canvas = torch.tensor([*prompt, *[mask] * length])
    forwards = 0
    for start, end, _ in blocks_of(len(prompt), length, block, 1):
        vectors: dict[int, Tensor] = {}
        while (left := [at for at in range(start, end) if canvas[at] == mask]) != []:
            logits = model(canvas.tolist(), vectors).clone()
            logits[:, mask] = -torch.inf
            tokens, chances = scored(logits, mask)
            bound = max(1 - 0.02 * forwards, threshold)
            for place in fast_dllm(bound)(chances[left], left, Moment(0, 1, len(left))):
                canvas[left[place]] = tokens[left[place]]
            share = min(0.15 + 0.02 * forwards, 0.3)
            expected = torch.softmax(logits, 1) @ embedding
            vectors = {at: embedding[mask] + share * expected[at] for at in left if canvas[at] == mask}
            forwards += 1
    return Filled(canvas[len(prompt) :].tolist(), forwards)


def block_refinement(
    model: Model, mask: int, prompt: Sequence[int], length: int, block: int, steps: int, threshold: float,
    edit_threshold: float = 0.0, most_post_steps: int = 16,
) -> Filled:  # fmt: skip
    """LLaDA2's generation, with the edits of LLaDA2.1 (Bie et al. 2025): blocks lie at multiples of their length from
    the prompt's first token on, the last one whole as well, and a step sees nothing behind its block. `steps` are those
    of one block.
    """
    end_of_all = -(-(len(prompt) + length) // block) * block
    canvas = torch.tensor([*prompt, *[mask] * (end_of_all - len(prompt))])
    forwards = 0
    for start in range(len(prompt) // block * block, end_of_all, block):
        end = min(start + block, end_of_all)
        masks = int((canvas[start:end] == mask).sum())
        step = post_steps = 0
        while True:
            left = [at for at in range(start, end) if canvas[at] == mask]
            if not left and (edit_threshold <= 0 or post_steps == most_post_steps):
                break
            tokens, chances = scored(model(canvas[:end].tolist()), mask)
            forwards += 1
            edited = [
                at
                for at in range(max(start, len(prompt)), end)
                if edit_threshold > 0
                and canvas[at] != mask
                and tokens[at] != canvas[at]
                and chances[at] > edit_threshold
            ]
            due = max(1, Moment(step, steps, masks).due)
            sure = [at for at in left if chances[at] > threshold]
            chosen = sure if len(sure) >= due else [left[place] for place in surest(chances[left], due)]
            for at in [*chosen, *edited]:
                canvas[at] = tokens[at]
            if left:
                step += 1
                continue
            post_steps += 1
            if not edited:
                break
    return Filled(canvas[len(prompt) :][:length].tolist(), forwards)

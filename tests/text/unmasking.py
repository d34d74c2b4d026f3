"""Generators of diffusion models: small ones of random weights, one whose answers are written down, folders."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from text.decoders import DECODERS
from text.random_models import LLAMA, random_weights
from text.toy import LETTERS, run

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.generation import Completion, Generation, Prompt, Sampling, Unmasking
from gpuinfer.text.diffusion.diffusion_generator import DiffusionGenerator
from gpuinfer.text.generator.page_pool import pages_for
from gpuinfer.text.generator.setup import open_generator
from gpuinfer.text.language.language import Language
from gpuinfer.text.language.vocabulary import Vocabulary
from gpuinfer.text.text_options import TorchModelOptions
from gpuinfer.text.transformer import Decoder, Masking, Shape, Step, Weights

END, MASK = len(LETTERS), len(LETTERS) + 1
SHAPE = replace(LLAMA, family="llada", vocabulary=MASK + 1, end_tokens=(END,), masking=Masking(MASK))
KINDS: Mapping[str, Masking] = {
    "all see all": Masking(MASK),
    "shifted": Masking(MASK, shifted=True),
    "blocks of 4": Masking(MASK, block=4),
    "blocks of 8": Masking(MASK, block=8),
}
SEED = 7
USUAL = "kernels" if "kernels" in DECODERS else "torch, deterministic"


def language() -> Language:
    return Language(Vocabulary(tuple(LETTERS)), SHAPE.vocabulary, (END,), beginning=LETTERS.index(" "))


def weights_of(kind: str) -> Weights:
    weights = random_weights(replace(SHAPE, masking=KINDS[kind]))
    return replace(weights, head=replace(weights.head, weight=4.0 * weights.head.weight))


@functools.cache
def decoder_of(kind: str, slots: int, length: int, make: str = "") -> Decoder:
    """Of random weights, sure of some tokens. All tests share it: what it has in its slots is whatever was there."""
    shape = replace(SHAPE, masking=KINDS[kind])
    return DECODERS[make or USUAL](shape, weights_of(kind), torch.float32, slots=slots, length=length)


def generator_over(
    decoder: Decoder, step_tokens: int = 64, most_parts_s: float = math.inf, **more: Any
) -> DiffusionGenerator:
    how = {"seed": SEED, "end_tokens": (END,), "step_tokens": step_tokens, "threads": 1}
    return DiffusionGenerator(decoder, language(), most_parts_s=most_parts_s, **how, **more)


def generator_of(model: str, slots: int = 4, **tuning: int) -> DiffusionGenerator:
    """A built-in one by its name, or that of a folder."""
    spec = ModelSpec(model, None, 0, "int32", kind="text")
    generator = open_generator(
        spec, Setup(devices=("cpu",), seed=SEED), TorchModelOptions(slots=slots, threads=1, **tuning)
    )
    assert isinstance(generator, DiffusionGenerator)
    return generator


def prompt_of(text: str, max_tokens: int = 16, *, temperature: float = 0.0, **given: Any) -> Prompt:
    """`given`: fields of Sampling and of Unmasking, as they fall."""
    own = {name: given.pop(name) for name in Unmasking.__struct_fields__ if name in given}
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, unmasking=Unmasking(**own), **given)
    return Prompt(text=text, sampling=sampling)


def answered(generator: DiffusionGenerator, prompt: Prompt) -> Completion:
    """Its one answer."""
    (outcome,) = run(generator, [prompt])
    assert isinstance(outcome, Generation), outcome
    (completion,) = outcome.completions
    return completion


@dataclass
class Scripted:
    """`step.Decoder` that says the same at each position, whatever stands there: `script` from `prompt` on, each token
    with its confidence. It remembers the steps it was given.
    """

    script: Sequence[tuple[int, float]]
    prompt: int
    slots: int = 4
    length: int = 64
    masking: Masking = KINDS["all see all"]
    steps: list[Step] = field(default_factory=list)
    broken: int | None = None  # a token that no step survives
    room: int | None = None  # tokens of a step for which there is memory
    pages: int = 64
    device = torch.device("cpu")
    computes_in = "float32"

    @property
    def shape(self) -> Shape:
        return replace(SHAPE, masking=self.masking)

    def forward(self, step: Step) -> torch.Tensor:
        self.check(step)
        if self.room is not None and len(step.tokens) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if self.broken is not None and self.broken in step.tokens:
            raise RuntimeError("a token that this model cannot stand")
        self.steps.append(step)
        places = np.cumsum(step.lengths) - step.lengths
        positions = np.arange(len(step.tokens)) + np.repeat(step.starts - places, step.lengths)
        return torch.stack([self._logits(int(position)) for position in positions[step.wanted]])

    def _logits(self, position: int) -> torch.Tensor:
        place = position - self.prompt + self.masking.shifted
        token, confidence = self.script[place] if 0 <= place < len(self.script) else (0, 0.5)
        others = (1 - confidence) / (SHAPE.vocabulary - 2)  # the mask itself never comes
        chances = torch.full((SHAPE.vocabulary,), others)
        chances[token] = confidence
        return chances.log()

    def embedding(self) -> torch.Tensor:
        return torch.eye(SHAPE.vocabulary)

    def check(self, step: Step) -> None:
        """What a step must be."""
        for part in (step.tokens, step.pages, step.starts, step.lengths, step.wanted, step.sees):
            assert part.dtype == np.int32
            assert part.flags.c_contiguous
        assert len(step.pages) == len(step.starts) == len(step.lengths) <= self.slots
        seen = np.maximum.reduceat(step.sees, np.cumsum(step.lengths) - step.lengths)
        brought = np.maximum(seen, step.starts + step.lengths).tolist()  # positions of each segment's row
        used = [page for row, end in zip(step.pages, brought, strict=True) for page in row[: pages_for(end)].tolist()]
        assert len(used) == len(set(used))
        assert 0 <= min(used) <= max(used) < self.pages
        assert step.lengths.min() >= 1
        assert step.lengths.sum() == len(step.tokens) == len(step.sees)
        assert (step.starts + step.lengths).max() <= self.length
        assert (np.diff(step.wanted) > 0).all()
        ends = np.repeat(step.starts + step.lengths, step.lengths)
        assert ((step.sees >= 1) & (step.sees <= self.length)).all()
        assert self.masking.block is None or (step.sees <= ends).all()

    def swap(self, packed: object) -> None:
        self.script = packed

    def pack(self, weights: object) -> object:
        return weights

    def close(self) -> None: ...

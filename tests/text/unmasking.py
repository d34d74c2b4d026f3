"""Generators of diffusion models, and what they answer."""

from __future__ import annotations

from collections.abc import Sequence

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.generation import Prompt
from gpuinfer.text.diffusion.generator import DiffusionGenerator
from gpuinfer.text.generator.setup import Tuning, open_generator


def generator_of(model: str, slots: int = 4, **tuning: int) -> DiffusionGenerator:
    """A small one, by name or folder."""
    spec = ModelSpec(model, None, 0, "int32", kind="text")
    generator = open_generator(spec, Setup(devices=("cpu",), seed=7), Tuning(slots=slots, threads=1, **tuning))
    assert isinstance(generator, DiffusionGenerator)
    return generator


def run(generator: DiffusionGenerator, prompts: Sequence[Prompt]) -> list[object]:
    """The outcomes of all prompts, as many at once as there are slots for."""
    outcomes: list[object] = [None] * len(prompts)
    waiting = []
    for number, prepared in enumerate(generator.prepare(prompts)):
        if isinstance(prepared, Exception):
            outcomes[number] = prepared
        else:
            waiting.append((number, prepared))
    while waiting or generator.busy:
        while waiting and waiting[0][1].samples <= generator.free_slots:
            generator.add(*waiting.pop(0))
        for number, outcome in generator.step().finished:
            assert outcomes[number] is None
            outcomes[number] = outcome
    return outcomes

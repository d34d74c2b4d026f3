"""How a prompt's answer is to be filled in: what was asked for, what the model says, and what cannot be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from msgspec import structs

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import MOST_GUIDANCE, Prompt, Sampling, Unmasking
from gpuinfer.text.diffusion.caching import Cache
from gpuinfer.text.diffusion.choosing import threshold_for
from gpuinfer.text.diffusion.deciding import UnmaskingDecoder
from gpuinfer.text.generator.prepared import Prepared
from gpuinfer.text.sampling import check_sampling
from gpuinfer.text.shape import Masking, Shape

USUAL = {"dream": "dream", "llada2": "block-refinement", "sdar": "threshold"}  # decoders, by family
OTHERWISE = "low-confidence"
Choose = Callable[[Sampling, str], UnmaskingDecoder]
"""The decoder that a request asks for, else that of this name: `choosing.decoder_for`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one prompt's answers are filled in."""

    decoder: UnmaskingDecoder
    threshold: float
    steps: int | None  # of the whole answer; None: one for each token
    block: int | None  # positions; None: the whole answer, or the model's own
    scale: float  # of classifier-free guidance; 0: none
    cache: Cache
    shifted: bool  # a position's logits are for the one after it

    def steps_of(self, block: int, blocks: int, masks: int) -> int:
        """Those planned for one of the answer's blocks, of `masks` masks."""
        if self.steps is None or not blocks:
            return masks
        each, more = divmod(self.steps, blocks)
        return max(1, each + (block < more))

    @property
    def slots(self) -> int:
        """That one sample takes: what guides it has a canvas of its own."""
        return 2 if self.scale else 1


@dataclass(frozen=True, slots=True, eq=False)
class Planned(Prepared):
    """A prompt that is ready to be added."""

    plan: Plan = field(kw_only=True)


def planned(prepared: Prepared, plan: Plan) -> Planned:
    return Planned(**{one.name: getattr(prepared, one.name) for one in fields(prepared)}, plan=plan)


def plan_of(prompt: Prompt, shape: Shape, choose: Choose, slots: int) -> Plan:
    """How this prompt asks to be answered. Raises `BadPrompt` for what cannot be, `WorkError` for a broken decoder."""
    assert shape.masking is not None
    sampling = prompt.sampling
    _refuse_orders(sampling)
    check_sampling(structs.replace(sampling, max_tokens=max(1, sampling.max_tokens)), shape.vocabulary)
    asked, masking = sampling.unmasking or Unmasking(), shape.masking
    decoder = choose(sampling, usual_decoder(shape))
    return Plan(
        decoder,
        threshold_for(decoder, asked.threshold),
        _whole("steps", asked.steps),
        _block(asked.block_length, masking),
        _scale(asked.cfg_scale, shape, slots),
        _cache(asked.cache, masking),
        masking.shifted,
    )


def usual_decoder(shape: Shape) -> str:
    """The name of the one that answers where none is asked for."""
    return USUAL.get(shape.family, OTHERWISE)


def usual(shape: Shape) -> dict[str, str | int | bool | None]:
    """What is done where a request says nothing, and what follows from the model: for reports."""
    assert shape.masking is not None
    block = shape.masking.block
    return {
        "decoder": usual_decoder(shape),
        "cache": _cache(None, shape.masking),
        "block": block,
        "block_causal": block is not None,
    }


def _refuse_orders(sampling: Sampling) -> None:
    """What asks for tokens one after another."""
    if sampling.constraint is not None:
        raise BadPrompt(
            "a constraint says what may follow what was written, and this model fills its answer in in any order. "
            "Leave it out, or use a model that goes from left to right."
        )
    if (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0):
        raise BadPrompt(
            "penalties count the tokens before, and this model fills its answer in in any order. Leave them out."
        )
    if sampling.prompt_logprobs is not None:
        raise BadPrompt("a masked diffusion model gives no log-probabilities of its prompt. Leave prompt_logprobs out.")
    if sampling.processed_logprobs:
        raise BadPrompt(
            "a masked diffusion model chooses where it writes too: there is no probability of what it drew after "
            "filters, which training on rollouts goes by. Use a model that goes from left to right, or leave "
            "processed_logprobs out; logprobs are there."
        )


def _whole(name: str, asked: int | None) -> int | None:
    if asked is not None and (not isinstance(asked, int) or isinstance(asked, bool) or asked < 1):
        raise BadPrompt(f"{name} is {asked!r}. Give a whole number of 1 or more, or leave it out.")
    return asked


def _block(asked: int | None, masking: Masking) -> int | None:
    asked = _whole("block_length", asked)
    if asked is not None and masking.block is not None and masking.block % asked:
        raise BadPrompt(
            f"block_length is {asked}, and this model has learnt with blocks of {masking.block}. "
            "Give that, or what divides it, or leave it out."
        )
    return asked


def _scale(asked: float, shape: Shape, slots: int) -> float:
    if not _is_number(asked) or not 0.0 <= asked <= MOST_GUIDANCE:
        raise BadPrompt(f"cfg_scale is {asked!r}. Give a number from 0 (no guidance) to {MOST_GUIDANCE:g}.")
    if asked and shape.masking is not None and not shape.masking.guided:
        raise BadPrompt(f"models of family {shape.family} were not trained to be guided. Leave cfg_scale out.")
    if asked and slots < 2:
        raise BadPrompt("guidance takes a second slot, and there is one. Leave cfg_scale out, or use -B slots=2.")
    return float(asked)


def _cache(asked: Cache | None, masking: Masking) -> Cache:
    if asked is None:
        return "none" if masking.block is None else "exact"
    known = ("none", "prefix", "dual", "vicinity") if masking.block is None else ("none", "exact")
    if asked not in known:
        why = "sees all of its canvas" if masking.block is None else "sees no later block"
        raise BadPrompt(f"cache is {asked!r}, and this model {why}. Choose from {', '.join(known)}.")
    return asked


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

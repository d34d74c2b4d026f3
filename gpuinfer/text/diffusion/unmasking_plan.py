"""How the answer to a prompt is filled in: the unmasking decoder with its options, where blocks lie on the canvas, and
which positions a step computes; what a request may not ask for.

A token that becomes known changes what every position computes that sees it. Where all positions see all (`prefix`,
`dual`, `vicinity`) the cached keys and values are therefore an approximation, which a whole pass at each block's start
corrects. In block-causal models no position sees a later block: the cache of finished blocks is exact (`exact`).

`prefix`, `dual`: Wu et al. 2025, "Fast-dLLM". `vicinity`: Ma et al. 2025, "dInfer". `exact`: Arriola et al. 2025,
"Block Diffusion".
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from msgspec import structs

from gpuinfer.config import blame, registry
from gpuinfer.config.options import GivenValue, check
from gpuinfer.errors import BadPrompt, PluginError, UsageError
from gpuinfer.generation import MOST_GUIDANCE, Prompt, Sampling, Unmasking
from gpuinfer.text.diffusion.unmasking_decoder import UnmaskingDecoder
from gpuinfer.text.generator.prompts import Prepared
from gpuinfer.text.sampling import check_sampling
from gpuinfer.text.transformer import Masking, Shape

KEPT = 256  # decoders with different options: requests bring them, so there is a bound


def decoder_for(sampling: Sampling, default: str) -> UnmaskingDecoder:
    """The decoder that the request names, else the default one. Requests with the same options share it.

    Raises BadPrompt for an unknown one, for unknown or invalid options, for a threshold out of range or
    given to a decoder that has none, and for a logit bias where that would mean nothing.
    """
    asked = sampling.unmasking or Unmasking()
    name = asked.decoder or default
    try:
        decoder = make_decoder(name, json.dumps(dict(asked.options), sort_keys=True, default=str))
    except UsageError as error:
        raise BadPrompt(str(error)) from error
    if (threshold := asked.threshold) is not None:
        if decoder.default_threshold is None:
            others = " or ".join(with_threshold())
            raise BadPrompt(f"decoder '{name}' has no threshold. Leave it out, or choose {others}.")
        if not (isinstance(threshold, int | float) and 0 <= threshold <= 1):  # a NaN is in no range
            raise BadPrompt(f"threshold is {threshold!r}. Give a number from 0 to 1.")
    if sampling.logit_bias and not decoder.biased:
        raise BadPrompt(f"decoder '{name}' takes no logit_bias. Leave it out, or choose another decoder.")
    return decoder


@functools.lru_cache(maxsize=KEPT)
def make_decoder(name: str, options: str) -> UnmaskingDecoder:
    """A decoder with these options, a JSON object. Raises UsageError, and WorkError where its `__init__` raises."""
    kind = registry.load("decoders", name)
    given: Mapping[str, Any] = json.loads(options)
    values = {key: GivenValue(value, f"decoder option {key}") for key, value in given.items()}
    values = check(kind.Options, values, f"decoder '{name}'")
    with blame.blaming(kind, "__init__"):
        decoder: UnmaskingDecoder = kind(kind.Options(**values))
    decoder.name = name
    return decoder


def with_threshold() -> list[str]:
    """The names of the loadable decoders with a threshold."""
    found = []
    for name in registry.names("decoders"):
        try:
            kind = registry.load("decoders", name)
        except PluginError:
            continue
        if kind.default_threshold is not None:
            found.append(name)
    return found


@dataclass(frozen=True, slots=True)
class CanvasLayout:
    """Positions of one row, from 0: none is padding. The last block may be shorter than the others; in block-causal
    models, whose blocks are counted from the canvas' beginning, so may the first, as some of it is prompt.
    """

    prompt: int  # positions, 1 or more
    end: int  # of the canvas
    block: int  # positions that are decided on together
    origin: int  # where blocks are counted from: the answer's beginning, or 0
    attention: int | None  # positions of a block of a block-causal model, a multiple of `block`; None: all see all

    @property
    def blocks(self) -> int:
        return -(-(self.end - self.origin) // self.block) - self._first

    def bounds(self, number: int) -> tuple[int, int]:
        """Where the answer's block of this number, from 0, begins and ends."""
        start = self.origin + (self._first + number) * self.block
        return max(self.prompt, start), min(self.end, start + self.block)

    def seen(self, position: int) -> int:
        """How many positions, from the canvas' beginning, one at `position` sees."""
        return self.end if self.attention is None else min(self.end, (position // self.attention + 1) * self.attention)

    @property
    def _first(self) -> int:
        return (self.prompt - self.origin) // self.block


def laid_out(prompt: int, limit: int, block: int | None, attention: int | None, length: int) -> CanvasLayout:
    """A canvas for an answer of `limit` tokens, in a context of `length` positions.

    The canvas of a block-causal model goes on to the end of its last block, as far as there is room: the model was
    trained on whole blocks. Positions beyond the limit are filled in too, and are no part of the answer.
    """
    end = prompt + limit
    if attention is None:
        return CanvasLayout(prompt, end, block or max(1, limit), prompt, None)
    return CanvasLayout(prompt, min(length, -(-end // attention) * attention), block or attention, 0, attention)


CacheMode = Literal["none", "prefix", "dual", "vicinity", "exact"]
VICINITY = 16  # positions on either side of a block
WARM_STEPS = 4  # of an answer, that compute all


def cache_reach(
    cache: CacheMode, layout: CanvasLayout, start: int, stop: int, *, fresh: bool, warm: bool, stored: int
) -> tuple[int, int]:
    """The first position and the end of what a step computes for a row whose block lies at `start` to `stop`.

    `fresh`: the block's first step. `warm`: of its answer no more than `WARM_STEPS` steps have been. `stored`: so many
    positions from the beginning will never change.
    """
    if cache == "exact":
        return stored, layout.seen(stop - 1)
    if layout.attention is not None:
        return 0, layout.seen(stop - 1)
    if cache == "none" or fresh or (cache == "vicinity" and warm):
        return 0, layout.end
    if cache == "prefix":
        return start, layout.end
    if cache == "dual":
        return start, stop
    return max(0, start - VICINITY), min(layout.end, stop + VICINITY)


USUAL = {"dream": "dream", "llada2": "block-refinement", "sdar": "threshold"}  # decoders, by family
OTHERWISE = "low-confidence"
Choose = Callable[[Sampling, str], UnmaskingDecoder]
"""The decoder that a request asks for, else that of this name: `choosing.decoder_for`."""


@dataclass(frozen=True, slots=True)
class UnmaskingPlan:
    """How one prompt's answers are filled in."""

    decoder: UnmaskingDecoder
    threshold: float
    steps: int | None  # of the whole answer; None: one for each token
    block: int | None  # positions; None: the whole answer, or the model's own
    scale: float  # of classifier-free guidance; 0: none
    cache: CacheMode
    shifted: bool  # a position's logits are for the one after it

    def steps_of(self, block: int, blocks: int, masks: int) -> int:
        """Those planned for one of the answer's blocks, of `masks` masks."""
        if self.steps is None or not blocks:
            return masks
        each, more = divmod(self.steps, blocks)
        return max(1, each + (block < more))

    @property
    def slots(self) -> int:
        """Slots of one sample: the guiding twin has a canvas of its own."""
        return 2 if self.scale else 1


@dataclass(frozen=True, slots=True, eq=False)
class PlannedPrompt(Prepared):
    """A prompt that is ready to be added."""

    plan: UnmaskingPlan = field(kw_only=True)


def planned_prompt(prepared: Prepared, plan: UnmaskingPlan) -> PlannedPrompt:
    return PlannedPrompt(**{one.name: getattr(prepared, one.name) for one in fields(prepared)}, plan=plan)


def plan_of(prompt: Prompt, shape: Shape, choose: Choose, slots: int) -> UnmaskingPlan:
    """How this prompt is to be answered. Raises `BadPrompt` for what is not supported, `WorkError` for a broken
    decoder.
    """
    assert shape.masking is not None
    sampling = prompt.sampling
    _refuse_orders(sampling)
    check_sampling(structs.replace(sampling, max_tokens=max(1, sampling.max_tokens)), shape.vocabulary)
    asked, masking = sampling.unmasking or Unmasking(), shape.masking
    decoder = choose(sampling, usual_decoder(shape))
    threshold = decoder.default_threshold if asked.threshold is None else asked.threshold
    return UnmaskingPlan(
        decoder,
        1.0 if threshold is None else float(threshold),
        _whole("steps", asked.steps),
        _block(asked.block_length, masking),
        _scale(asked.cfg_scale, shape, slots),
        _cache(asked.cache, masking),
        masking.shifted,
    )


def usual_decoder(shape: Shape) -> str:
    """The name of the decoder where a request names none."""
    return USUAL.get(shape.family, OTHERWISE)


def usual_unmasking(shape: Shape) -> dict[str, str | int | bool | None]:
    """The settings of a request that sets nothing, and those of the model: for reports."""
    assert shape.masking is not None
    block = shape.masking.block
    return {
        "decoder": usual_decoder(shape),
        "cache": _cache(None, shape.masking),
        "block": block,
        "block_causal": block is not None,
    }


def _refuse_orders(sampling: Sampling) -> None:
    """Refuse options that need tokens one after another."""
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
    number = isinstance(asked, int | float) and not isinstance(asked, bool) and math.isfinite(asked)
    if not number or not 0.0 <= asked <= MOST_GUIDANCE:
        raise BadPrompt(f"cfg_scale is {asked!r}. Give a number from 0 (no guidance) to {MOST_GUIDANCE:g}.")
    if asked and shape.masking is not None and not shape.masking.guided:
        raise BadPrompt(f"models of family {shape.family} were not trained to be guided. Leave cfg_scale out.")
    if asked and slots < 2:
        raise BadPrompt("guidance takes a second slot, and there is one. Leave cfg_scale out, or use -B slots=2.")
    return float(asked)


def _cache(asked: CacheMode | None, masking: Masking) -> CacheMode:
    if asked is None:
        return "none" if masking.block is None else "exact"
    known = ("none", "prefix", "dual", "vicinity") if masking.block is None else ("none", "exact")
    if asked not in known:
        why = "sees all of its canvas" if masking.block is None else "sees no later block"
        raise BadPrompt(f"cache is {asked!r}, and this model {why}. Choose from {', '.join(known)}.")
    return asked

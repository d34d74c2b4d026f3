"""Prompts prepared as vLLM's requests: tokens, limits and constraints as our own generator prepares them, and
`Sampling` as `SamplingParams`, with the same meaning or a `BadPrompt` that names the field. Plain values go out of
here, so that all of it can be tested without vLLM.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from gpuinfer.backends.vllm_engine.lora_versions import VllmAdapter
from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Listed, Prompt, Sampling
from gpuinfer.text.generator.prompts import Prepared, prepare, unmasking_field
from gpuinfer.text.language.grammar import constraint_key, grammar_of
from gpuinfer.text.language.language import Language
from gpuinfer.text.sampling import check_sampling

HOTTEST, COLDEST = 2.0, 0.01  # temperatures that vLLM takes; a lower one, but for 0, it would raise to that
SEEDS = 1 << 62


def vllm_seed(run: int, sampling: Sampling, key: str, sample: int, begun: int = 0) -> int:
    """The seed of one sample: another for each key and number, the same in every run with the same seed.

    `begun`: tokens that have been drawn already. vLLM draws from the beginning of a seed's numbers, so an answer that
    goes on elsewhere has other numbers than one that never stopped.
    """
    named = key if sampling.seed is None or sampling.keyed else ""
    base = run if sampling.seed is None else sampling.seed
    text = f"{base}\0{sample}\0{begun}\0{named}"
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()) % SEEDS


def is_plain(sampling: Sampling) -> bool:
    """Whether tokens are drawn from the model's own distribution, changed by nothing; or the likeliest is taken."""
    return (
        sampling.temperature in (0.0, 1.0)
        and (sampling.temperature == 0.0 or (not sampling.top_k and sampling.top_p == 1.0 and sampling.min_p == 0.0))
        and sampling.repetition_penalty == 1.0
        and sampling.presence_penalty == sampling.frequency_penalty == 0.0
        and not sampling.logit_bias
        and not sampling.min_tokens
        and sampling.constraint is None
    )


def check_vllm_sampling(sampling: Sampling, begun: bool, processed: bool = True) -> None:
    """Raises `BadPrompt` for what vLLM would do in another way than asked. Ranges have been checked.

    `processed`: the engine's steps give log-probabilities after temperature and filters, not raw ones.
    """
    if sampling.unmasking is not None:
        raise BadPrompt(
            f"{unmasking_field(sampling.unmasking)} says how a diffusion model fills its masks in, and vLLM goes from "
            "left to right. Leave it out, or use --backend inprocess."
        )
    if sampling.processed_logprobs and not processed and sampling.temperature > 0.0 and not is_plain(sampling):
        raise BadPrompt(
            "processed_logprobs are wanted, and this vLLM gives raw ones. Start it with processed_logprobs as its "
            "logprobs_mode (-B logprobs_mode=processed_logprobs), or draw at temperature 1 without filters."
        )
    if sampling.temperature > HOTTEST or 0.0 < sampling.temperature < COLDEST:
        raise BadPrompt(
            f"temperature is {sampling.temperature:g}, and vLLM takes 0, or {COLDEST:g} to {HOTTEST:g}. Use such a one."
        )
    grammar = sampling.constraint is not None and sampling.constraint.listed is None
    if begun and (sampling.presence_penalty or sampling.frequency_penalty or grammar):
        what = "a constraint" if grammar else "presence or frequency penalty"
        raise BadPrompt(f"vLLM cannot go on with an answer with {what} that has begun elsewhere. Ask for it anew.")


def sampling_parameters(
    sampling: Sampling, *, limit: int, seed: int, ends: Sequence[int], logprobs: int | None, growing: bool
) -> dict[str, Any]:
    """The fields of `SamplingParams` of one sample, but for output_kind, prompt log-probabilities and constraint.

    `ends` are the model's end tokens: they go as stop tokens, so that all of them count, whatever the tokenizer calls
    its end. `limit`: at most so many tokens. `growing`: tokens are wanted as they come.
    """
    stops = [*([] if sampling.ignore_eos else ends), *sampling.stop_token_ids]
    fields: dict[str, Any] = {
        "max_tokens": max(1, limit),
        "min_tokens": min(sampling.min_tokens, max(1, limit)),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop_token_ids": list(dict.fromkeys(stops)),
        "ignore_eos": True,
        "detokenize": False,
        "skip_clone": True,
    }
    if sampling.temperature > 0.0:
        fields["seed"] = seed
    if sampling.logit_bias:
        fields["logit_bias"] = dict(sampling.logit_bias)
    if logprobs is not None:
        fields["logprobs"] = logprobs
    return fields


@dataclass(frozen=True, slots=True)
class VllmRequest:
    """What an engine or a server is asked for one sample: the prompt's tokens, and fields of `SamplingParams`."""

    number: str
    tokens: Sequence[int]
    fields: Mapping[str, Any]
    adapter: VllmAdapter | None = None
    grammar: str | None = None
    growing: bool = False  # what is new comes each time, else one output at the end


@dataclass(frozen=True, slots=True, eq=False)
class VllmPrompt:
    """A prompt that vLLM can be asked."""

    prepared: Prepared
    language: Language
    adapter: str | None = None
    grammar: str | None = None  # llguidance's, as our own engine would have it
    listed: Listed | None = None  # for our own logits processor
    parts: bool = False
    embeds: bool = False  # the pooled state of its tokens is wanted, no answer


def refuse_task(prompt: Prompt, pooling: str | None) -> None:
    """Raises `BadPrompt` for what an engine of this kind does not compute. `pooling`: how an engine that was started
    for embeddings pools; None: it draws answers.
    """
    if pooling is None:
        if prompt.embed is not None:
            raise BadPrompt(
                "this vLLM engine draws answers, and an engine has no embeddings beside them. Start another with "
                "-B runner=pooling, or use --backend inprocess, which does both."
            )
        return
    if prompt.embed is None:
        raise BadPrompt(
            "this vLLM engine was started for embeddings (-B runner=pooling), and draws no answers. Ask for "
            "embeddings, or start another without it."
        )
    if prompt.embed not in ("model", pooling):
        raise BadPrompt(
            f"pooling by '{prompt.embed}' is wanted, and this vLLM engine pools by '{pooling}'. Leave it out, or start "
            """one with -B engine_args='{"pooler_config": {"seq_pooling_type": "MEAN"}}' (or LAST, CLS)."""
        )
    if prompt.samples != 1:
        raise BadPrompt(f"{prompt.samples} samples of an embedding, of which there is one. Ask for one.")


@dataclass(frozen=True, slots=True)
class VllmModel:
    """What vLLM says of a model that it serves, as far as prompts are checked against it."""

    family: str
    vocabulary: int
    positions: int  # the longest context it was made for
    masking: None = None  # it goes from left to right


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine holds at most. vLLM makes rows wait for its own pages: ours never refuse one."""

    shape: VllmModel
    slots: int
    length: int
    pages: int = sys.maxsize


class PromptPreparer:
    """What `text.model.TextModel` asks of a generator, but for the steps, which are vLLM's."""

    def __init__(
        self,
        language: Language,
        model: VllmModel,
        slots: int,
        length: int,
        facts: Mapping[str, Any],
        processed: bool = True,
        pooling: str | None = None,
    ) -> None:
        """`pooling`: as `refuse_task` has it."""
        self._language, self._processed, self._pooling = language, processed, pooling
        self.slots, self.facts = slots, facts
        self._limits = EngineLimits(model, slots, length)

    def prepare(
        self, prompts: Sequence[Prompt], enter: Callable[[str], None] = lambda station: None
    ) -> list[VllmPrompt | Exception]:
        """Each ready to be asked, or the `BadPrompt` that says why not. Thread-safe."""
        plain = [
            one if one.adapter is one.embed is None else structs.replace(one, adapter=None, embed=None)
            for one in prompts
        ]
        found: list[VllmPrompt | Exception] = []
        for prompt, prepared in zip(prompts, prepare(self._language, plain, self._limits, enter), strict=True):
            if isinstance(prepared, Exception):
                found.append(prepared)
                continue
            sampling, constraint = prompt.sampling, prompt.sampling.constraint
            listed = None if constraint is None else constraint.listed
            try:
                refuse_task(prompt, self._pooling)
                drawing = structs.replace(sampling, max_tokens=max(1, sampling.max_tokens))
                check_sampling(drawing, self._limits.shape.vocabulary)
                check_vllm_sampling(sampling, bool(prepared.begun), self._processed)
                grammar = None if constraint is None or listed is not None else grammar_of(constraint_key(constraint))
            except BadPrompt as error:
                found.append(error)
            else:
                embeds = prompt.embed is not None
                found.append(VllmPrompt(prepared, self._language, prompt.adapter, grammar, listed, embeds=embeds))
        return found

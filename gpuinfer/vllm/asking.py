"""Prompts made ready for vLLM: tokens, limits and constraint, as our own generator makes them ready."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Constraint, Listed, Prompt
from gpuinfer.text.generator.prepared import Prepared, prepare
from gpuinfer.text.language.grammars import grammar_of, key_of
from gpuinfer.text.language.language import Language
from gpuinfer.text.sampling import check_sampling
from gpuinfer.text.shape import Shape
from gpuinfer.vllm import sampling as mapping


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A prompt that vLLM can be asked."""

    prepared: Prepared
    language: Language
    adapter: str | None = None
    grammar: str | None = None  # llguidance's, as our own engine would have it
    listed: Listed | None = None  # for our own logits processor
    parts: bool = False


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine holds at most. vLLM makes rows wait for its own pages: ours never refuse one."""

    shape: Shape
    slots: int
    length: int
    pages: int = sys.maxsize


class Prompts:
    """What `text.model.TextModel` asks of a generator, but for the steps, which are vLLM's."""

    def __init__(
        self,
        language: Language,
        shape: Shape,
        slots: int,
        length: int,
        facts: Mapping[str, Any],
        constrains: bool,
        processed: bool = True,
    ) -> None:
        self._processed = processed
        self.slots, self.facts = slots, facts
        self._language, self._constrains = language, constrains
        self._limits = EngineLimits(shape, slots, length)

    def prepare(
        self, prompts: Sequence[Prompt], enter: Callable[[str], None] = lambda station: None
    ) -> list[Asked | Exception]:
        """Each ready to be asked, or the `BadPrompt` that says why not. Thread-safe."""
        plain = [one if one.adapter is None else structs.replace(one, adapter=None) for one in prompts]
        found = prepare(self._language, plain, self._limits, enter)
        return [
            one if isinstance(one, Exception) else self._asked(prompt, one)
            for prompt, one in zip(prompts, found, strict=True)
        ]

    def _asked(self, prompt: Prompt, prepared: Prepared) -> Asked | Exception:
        try:
            sampling = prompt.sampling
            check_sampling(
                structs.replace(sampling, max_tokens=max(1, sampling.max_tokens)), self._limits.shape.vocabulary
            )
            mapping.check(sampling, bool(prepared.begun), self._processed)
            grammar = self._grammar(sampling.constraint)
        except BadPrompt as error:
            return error
        listed = None if sampling.constraint is None else sampling.constraint.listed
        return Asked(prepared, self._language, prompt.adapter, grammar, listed)

    def _grammar(self, constraint: Constraint | None) -> str | None:
        if constraint is None:
            return None
        if not self._constrains:
            raise BadPrompt(
                "vLLM cannot keep an answer to a constraint without a tokenizer. Add one to the model's folder."
            )
        return None if constraint.listed is not None else grammar_of(key_of(constraint))

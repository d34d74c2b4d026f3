"""What a generator needs of the parts that others make: the language and the sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.errors import BadPrompt, RequestError
from gpuinfer.generation import Constraint, Logprob, Prompt, Sampling

Ints = NDArray[np.int32]


class Growing(Protocol):
    """An answer's text as it grows."""

    @property
    def text(self) -> str: ...
    @property
    def kept(self) -> int: ...
    def push(self, token: int) -> str | None: ...


class Matcher(Protocol):
    """Which tokens may come next."""

    @property
    def complete(self) -> bool: ...
    def mask(self, into: Ints) -> None: ...
    def advance(self, token: int) -> None: ...
    def copy(self) -> Matcher: ...


class Language(Protocol):
    """From prompts to tokens and back; `encode` and `matcher` from any thread."""

    @property
    def end_tokens(self) -> tuple[int, ...]: ...
    def encode(self, prompts: Sequence[Prompt]) -> list[Ints | BadPrompt]: ...
    def decode(self, tokens: Sequence[int], special_tokens: bool = False) -> str: ...
    def growing(self, stop: Sequence[str], special_tokens: bool = False) -> Growing: ...
    def matcher(self, constraint: Constraint) -> Matcher: ...


class Drawn(Protocol):
    """The tokens of one draw: int32 [rows], and their log-probabilities where wanted; `bad`: rows that have none."""

    @property
    def tokens(self) -> Ints: ...
    @property
    def logprobs(self) -> Sequence[Logprob | None]: ...
    @property
    def bad(self) -> Mapping[int, RequestError]: ...


class Sampler(Protocol):
    """From logits to tokens, by slot."""

    def admit(self, slot: int, sampling: Sampling, prompt_tokens: Ints, key: str, sample: int) -> None: ...
    def release(self, slot: int) -> None: ...
    def draw(self, logits: Tensor, slots: Ints, masks: Ints | None) -> Drawn: ...
    def prompt_logprobs(self, logits: Tensor, tokens: Ints, wanted: int) -> Sequence[Logprob]: ...
    def close(self) -> None: ...

"""A served model's tokenizer, chat template and grammars in the process that serves it, whichever process computes."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from gpuinfer.api import ModelSpec
from gpuinfer.errors import BadPrompt, UsageError
from gpuinfer.generation import Prompt

if TYPE_CHECKING:
    from gpuinfer.text.language import Language


class ModelLanguage:
    """Opened when it is first asked for; threads may share it."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._language: Language | None = None

    def get(self) -> Language:
        """It may take a second: not for an event loop's thread. Raises `UsageError` where only the backend can read the
        model.
        """
        from gpuinfer.text.language.transformers_tokenizer import open_model_language

        with self._lock:
            if self._language is None:
                try:
                    self._language = open_model_language(self._spec)
                except UsageError as error:
                    raise UsageError(f"texts cannot be tokenized here: {error} Give token ids.") from error
            return self._language

    async def opened(self) -> Language:
        """The language, for an event loop. Raises `BadPrompt` where it cannot be had."""
        if self._language is not None:
            return self._language
        try:
            return await asyncio.to_thread(self.get)
        except UsageError as error:
            raise BadPrompt(str(error)) from error

    def tokens_of(self, *prompts: Prompt) -> list[tuple[int, ...]]:
        """The tokens of each prompt. Raises `BadPrompt`, and `UsageError` as `get`."""
        found = []
        for one in self.get().encode(prompts):
            if isinstance(one, BadPrompt):
                raise one
            found.append(tuple(one.tolist()))
        return found

    def continuation(self, before: str, after: str) -> tuple[tuple[int, ...], int]:
        """The tokens of both texts together, and from which of them on they are the second one's: what follows the
        tokens that `before` and the whole begin with alike. Raises `BadPrompt` where either has no token of its own.
        """
        if not after:
            raise BadPrompt("the continuation is empty. Give at least one token.")
        alone, whole = self.tokens_of(Prompt(text=before), Prompt(text=before + after))
        pairs = enumerate(zip(alone, whole, strict=False))
        start = next((place for place, (one, other) in pairs if one != other), min(len(alone), len(whole)))
        if before and not start:
            raise BadPrompt(
                "one token spans the end of the first text and the beginning of the second, so that none comes before "
                "the second. Begin it with a space, or write more in the first."
            )
        return whole, start

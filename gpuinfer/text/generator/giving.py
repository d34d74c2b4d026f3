"""An answer that is given out while it grows: what is certain of it, and the rest once it is complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gpuinfer.generation import Completion, Logprob, Part


class Growing(Protocol):
    """An answer's text as it grows."""

    @property
    def text(self) -> str: ...
    @property
    def kept(self) -> int: ...
    def push(self, token: int) -> str | None: ...
    def settled(self) -> tuple[str, int]: ...


class Given:
    """How much of one sample's answer has been given out."""

    __slots__ = ("_growing", "_sample", "characters", "tokens")

    def __init__(self, sample: int, growing: Growing) -> None:
        self._sample, self._growing = sample, growing
        self.characters = self.tokens = 0

    def more(self, answer: NDArray[np.int32], logprobs: Sequence[Logprob] | None) -> Part | None:
        """What has become certain with the token that was pushed last; None when nothing has.

        `answer`: int32 [tokens or more], all that have been drawn.
        """
        start = self.tokens
        text, self.tokens = self._growing.settled()
        if start == self.tokens and not text:
            return None
        self.characters += len(text)
        return Part(
            sample=self._sample,
            text=text,
            tokens=tuple(answer[start : self.tokens].tolist()),
            logprobs=None if logprobs is None else tuple(logprobs[start : self.tokens]),
        )

    def rest(self, answer: Completion) -> Part:
        """What is left of the answer, which is complete. It is the sample's last part, and may hold no token."""
        return Part(
            sample=self._sample,
            text=answer.text[self.characters :],
            tokens=answer.tokens[self.tokens :],
            logprobs=None if answer.logprobs is None else answer.logprobs[self.tokens :],
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
        )

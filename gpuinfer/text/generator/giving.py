"""An answer that is given out while it grows: what is certain of it, and the rest once it is complete.

Each part costs some 20 µs, half of it here and half where it is read. So all readers together get so many a second: few
readers have every token by itself, and where there are many a part holds what has come since the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gpuinfer.generation import Completion, Logprob, Part

MOST_PARTS_S = 2000.0  # parts a second, of all readers; a first token does not wait for it


class Growing(Protocol):
    """An answer's text as it grows."""

    @property
    def text(self) -> str: ...
    @property
    def kept(self) -> int: ...
    def push(self, token: int) -> str | None: ...
    def settled(self) -> tuple[str, int]: ...


class Given:
    """How much of one sample's answer has been given out.

    `pushed`: somebody else pushes each token to `growing`, to see whether it completes a stop string.
    """

    __slots__ = ("_drawn", "_growing", "_pushed", "_sample", "characters", "tokens")

    def __init__(self, sample: int, growing: Growing, *, pushed: bool = False) -> None:
        self._sample, self._growing, self._pushed = sample, growing, pushed
        self._drawn = 0  # tokens that `growing` has
        self.characters = self.tokens = 0  # given out

    def more(self, answer: NDArray[np.int32], logprobs: Sequence[Logprob] | None) -> Part | None:
        """What has become certain since the last time; None when nothing has.

        `answer`: int32 [tokens], all that have been drawn.
        """
        if not self._pushed:
            for token in answer[self._drawn :].tolist():
                self._growing.push(token)
            self._drawn = len(answer)
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

"""An answer that is given out while it grows: what is certain of it, and the rest once it is complete.

Each part costs some 20 µs, half of it here and half where it is read. So all readers together get so many a second: few
readers have every token by itself, and where there are many a part holds what has come since the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from gpuinfer.generation import Completion, Logprob, Part
from gpuinfer.text.generator.seams import Growing
from gpuinfer.text.versions import Spans, begun_in

Spell = Callable[[Logprob], Logprob]

MOST_PARTS_S = 2000.0  # parts a second, of all readers; a first token does not wait for it


class Given:
    """How much of one sample's answer has been given out.

    `pushed`: somebody else pushes each token to `growing`, to see whether it completes a stop string. `before`:
    characters and tokens that have been given out elsewhere; `growing` has these tokens. `spell`: names the tokens of a
    log-probability.
    """

    __slots__ = ("_drawn", "_growing", "_pushed", "_sample", "_spell", "characters", "tokens")

    def __init__(
        self,
        sample: int,
        growing: Growing,
        *,
        pushed: bool = False,
        before: tuple[int, int] = (0, 0),
        spell: Spell | None = None,
    ) -> None:
        self._sample, self._growing, self._pushed, self._spell = sample, growing, pushed, spell
        self.characters, self.tokens = before  # given out
        self._drawn = self.tokens  # tokens that `growing` has

    def more(
        self,
        answer: NDArray[np.int32],
        logprobs: Sequence[Logprob] | None,
        processed: Sequence[float] | None,
        versions: Spans,
    ) -> Part | None:
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
        found = None if logprobs is None else tuple(logprobs[start : self.tokens])
        return Part(
            sample=self._sample,
            text=text,
            tokens=tuple(answer[start : self.tokens].tolist()),
            logprobs=found if found is None or self._spell is None else tuple(map(self._spell, found)),
            processed=None if processed is None else tuple(processed[start : self.tokens]),
            versions=begun_in(versions, start, self.tokens),
        )

    def finish(self, answer: Completion) -> Part:
        """The last part of an answer of which all has been given out elsewhere."""
        self.characters, self.tokens = len(answer.text), len(answer.tokens)
        return self.rest(answer)

    def rest(self, answer: Completion) -> Part:
        """What is left of the answer, which is complete. It is the sample's last part, and may hold no token."""
        return Part(
            sample=self._sample,
            text=answer.text[self.characters :],
            tokens=answer.tokens[self.tokens :],
            logprobs=None if answer.logprobs is None else answer.logprobs[self.tokens :],
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            processed=None if answer.processed is None else answer.processed[self.tokens :],
            versions=begun_in(answer.versions, self.tokens),
        )

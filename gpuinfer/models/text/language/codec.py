"""What a tokenizer is to the rest of the program, whatever it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import BadPrompt
from gpuinfer.models.text.language.spelling import Spelling

Encoded = NDArray[np.int32] | BadPrompt


class Codec(Protocol):
    """Texts to tokens and back. Threads may share one."""

    spelling: Spelling
    literal: Spelling  # in which special tokens have a text too
    size: int  # one more than the highest token
    hidden: frozenset[int]  # special tokens: never part of a text

    def encode(self, texts: Sequence[str], special_tokens: bool) -> list[Encoded]:
        """One result for each text, in order: tokens, or why it has none."""
        ...

    def decode(self, tokens: Sequence[int], special_tokens: bool = False) -> str:
        """Tokens that the vocabulary does not have are left out, and special ones unless they are wanted."""
        ...


def bad_unicode(error: UnicodeEncodeError) -> BadPrompt:
    return BadPrompt(
        f"the text is not valid Unicode: half a surrogate pair at character {error.start}. Write the whole character."
    )

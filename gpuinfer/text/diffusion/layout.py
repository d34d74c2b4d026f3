"""Where an answer's blocks lie on its canvas: the prompt's positions, then the answer's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
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


def laid_out(prompt: int, limit: int, block: int | None, attention: int | None, length: int) -> Layout:
    """A canvas for an answer of `limit` tokens, in a context of `length` positions.

    That of a block-causal model goes on to the end of its last block, as far as there is room: it has learnt with whole
    blocks. What is beyond the limit is filled in with the rest, and is no part of the answer.
    """
    end = prompt + limit
    if attention is None:
        return Layout(prompt, end, block or max(1, limit), prompt, None)
    return Layout(prompt, min(length, -(-end // attention) * attention), block or attention, 0, attention)

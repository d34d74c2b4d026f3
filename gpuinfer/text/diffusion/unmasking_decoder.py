"""The contract of unmasking decoders: after each step of a diffusion model a decoder decides which masks become tokens.

A third party registers one under the entry point group `gpuinfer.decoders`, as the built-in ones are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from gpuinfer import api

Need = Literal["margin", "entropy"]


@dataclass(frozen=True, slots=True)
class View:
    """One row's block before a step's decision. Arrays are to be read only; n masks are left, by ascending position.

    Nothing of another row is in it: what is decided here is the same in any company.
    """

    positions: NDArray[np.int32]  # [n] in the answer, from 0
    tokens: NDArray[np.int32]  # [n] what each becomes if it is committed now
    confidence: NDArray[np.float64]  # [n] probability of that token, without temperature and noise
    margin: NDArray[np.float64] | None  # [n] the likeliest token's probability less the second's; if `needs` has it
    entropy: NDArray[np.float64] | None  # [n] in nats; likewise
    step: int  # steps of this block that have decided already
    steps: int  # planned of this block, 1 or more
    block: int  # which block, from 0
    blocks: int  # of the answer
    masks: int  # of the block as it began
    threshold: float  # the request's, else the decoder's own; 1 where it has none
    uniform: Callable[[], NDArray[np.float64]]  # [n] in [0, 1), by seed, key, position and step alone
    edited: Edited | None = None  # the block's committed tokens, if the decoder `edits`


@dataclass(frozen=True, slots=True)
class Edited:
    """Tokens of the block that earlier steps committed (none of the prompt), and what they would be now."""

    positions: NDArray[np.int32]  # [m]
    tokens: NDArray[np.int32]  # [m] as they stand
    likeliest: NDArray[np.int32]  # [m] what the model would have there
    confidence: NDArray[np.float64]  # [m] of the likeliest


@dataclass(frozen=True, slots=True)
class Decision:
    """Which of the view's masks become tokens. One that commits nothing for `MOST_IDLE` steps on end ends its row."""

    commit: NDArray[np.bool_]  # [n]
    edit: NDArray[np.bool_] | None = None  # [m] of `View.edited`: which take their likeliest


MOST_IDLE = 16  # steps without a committed token, after which a decoder is named and its row fails


class UnmaskingDecoder(ABC):
    """One way to choose. An instance serves all rows that ask for it with the same options; it keeps nothing of a row
    but what `begin` returns. All calls come from one thread.
    """

    class Options(api.Options):
        """What `Unmasking.options` may hold."""

    name: str = ""  # filled in from the entry point
    needs: frozenset[Need] = frozenset()  # may follow from the options, as `edits` may
    edits: bool = False
    """Wants `View.edited`. A block whose masks are gone goes on, with views of no mask, until a decision edits nothing
    or `MOST_IDLE` steps have passed: until then none of its tokens is given out."""
    biased: ClassVar[bool] = True  # logit bias means what it says
    default_threshold: ClassVar[float | None] = None  # None: it has none, and a request that gives one is refused

    def __init__(self, options: api.Options | None = None) -> None:
        self.options: Any = options if options is not None else self.Options()

    def begin(self) -> Any:
        """The decoder's state for one row, from its first step to its last; passed to every call about it."""
        return None

    def adjust(self, kept: Any, positions: NDArray[np.int32], logits: NDArray[np.float32]) -> None:
        """Change the logits [n, vocabulary] of the block's masks in place, before anything is drawn from them.

        Only called where a class overrides it.
        """
        raise NotImplementedError

    def blend(self, kept: Any, step: int) -> float:
        """How much of its expected embedding (Σ probability × embedding) is added to a mask's own in the block's next
        step. 0: none, and nothing is computed for it.
        """
        return 0.0

    @abstractmethod
    def decide(self, kept: Any, view: View) -> Decision:
        """Which masks are committed now. At least one, unless there is a reason to wait."""


def quota(masks: int, steps: int, step: int) -> int:
    """How many of a block's `masks` its step number `step` of `steps` commits: as many as go into each, the first ones
    one more (Nie et al. 2025, "LLaDA").
    """
    each, more = divmod(masks, steps)
    return each + (step < more)

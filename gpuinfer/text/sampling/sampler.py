"""What the generator calls: a token for each row of logits, by the settings of the row's slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.errors import BadPrompt, BadResult, RequestError
from gpuinfer.generation import Candidate, Logprob, Sampling
from gpuinfer.text.sampling.cpu import CpuPath
from gpuinfer.text.sampling.cpu_draw import EMPTY
from gpuinfer.text.sampling.slots import NO_TOKENS, Rules, Slots
from gpuinfer.text.sampling.torch_path import TorchPath
from gpuinfer.text.sampling.triton_draws import draws_for

NOT_WANTED: NDArray[np.float64] = np.zeros(0)
IMPOSSIBLE = -9999.0  # stands for a log-probability of minus infinity, which JSON has no number for, as in OpenAI's API


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one call drew: `tokens` int32 [rows]; -1 for the rows in `bad`, which says why each of them has failed."""

    tokens: NDArray[np.int32]
    logprobs: Sequence[Logprob | None]
    processed: NDArray[np.float64] | None = None  # [rows], of those that want it; None: no row does
    bad: Mapping[int, RequestError] = field(default_factory=dict)


class Sampler:
    """Draws for `slots` rows at once, from logits of `vocabulary` tokens on `device`. All calls come from one thread.

    A row's token depends on its own logits, settings and history, bit by bit, and on nothing else in the call.
    """

    def __init__(
        self,
        slots: int,
        vocabulary: int,
        device: torch.device | str,
        *,
        seed: int,
        end_tokens: Sequence[int],
        threads: int,
        deterministic: bool = False,  # it always is
    ) -> None:
        self.vocabulary = vocabulary
        self._slots = Slots(slots, vocabulary, seed, end_tokens)
        self._path: Any
        if torch.device(device).type == "cpu":
            self._path = CpuPath(self._slots, vocabulary, threads)
        else:
            self._path = TorchPath(self._slots, vocabulary, draws_for(torch.device(device)))
        self._words = -(-vocabulary // 32)

    def admit(
        self,
        slot: int,
        sampling: Sampling,
        prompt_tokens: NDArray[np.int32],
        key: str = "",
        sample: int = 0,
        begun: NDArray[np.int32] = NO_TOKENS,
    ) -> None:
        """Start an answer in the slot, whose earlier one is forgotten. It goes on after the tokens `begun`, int32, as
        if they had been drawn here.

        Raises BadPrompt when a setting is out of its range or names a token outside the vocabulary.
        """
        self._slots.admit(slot, sampling, prompt_tokens, key, sample, begun)

    def release(self, slot: int) -> None:
        """The slot's answer is done."""
        self._slots.release(slot)

    def draw(
        self,
        logits: Tensor,
        slots: NDArray[np.int32],
        masks: NDArray[np.int32] | None = None,
        rules: Rules | None = None,
    ) -> Drawn:
        """A token for each row of `logits` float32 [rows, vocabulary]; row i is slot `slots[i]`'s; none comes twice.

        masks: int32 [rows, words of 32 tokens]; the tokens whose bits are set may come. Where they leave nothing but
        tokens that `min_tokens` bars, these may come. `rules`: the same for rows that few tokens alone may come in, or
        all but a few; such a row has no mask. Of few tokens only these are looked at, and what is drawn is what would
        be drawn with a mask, to the bit. A row fails alone, in `Drawn.bad`: with BadResult when its logits
        hold NaN or +inf, with BadPrompt when no token may come. It may be drawn for again. Logits are not changed.
        """
        if logits.shape != (len(slots), self.vocabulary) or (masks is not None and masks.shape[1] < self._words):
            raise ValueError(
                f"logits {tuple(logits.shape)} or masks do not fit {len(slots)} rows of {self.vocabulary}."
            )
        slots = np.array(slots, np.int32)
        if masks is not None:
            masks = np.require(masks, np.int32, ["C", "W"])
        self._slots.make_room_to_note()
        processed = np.zeros(len(slots)) if self._slots.with_processed else NOT_WANTED
        tokens = self._path.draw(logits, slots, masks, processed, rules)
        bad = self._bad(tokens) if len(tokens) and tokens.min() < 0 else {}
        logprobs = self._logprobs(logits, slots, tokens) if self._slots.with_logprobs else [None] * len(slots)
        return Drawn(tokens, logprobs, processed if self._slots.with_processed else None, bad)

    def given_logprobs(self, logits: Tensor, tokens: NDArray[np.int32], wanted: int) -> list[Logprob]:
        """Of each row of `logits` [rows, vocabulary] the log-probability of a token that was not drawn here, and the
        `wanted` likeliest.

        Raises BadResult when a row holds NaN or +inf.
        """
        rows = np.arange(len(tokens), dtype=np.int64)
        return self._described(logits, rows, np.array(tokens, np.int32), np.full(len(tokens), wanted, np.int64))

    def close(self) -> None:
        """Let go of threads."""
        self._path.close()

    def _logprobs(self, logits: Tensor, slots: NDArray[np.int32], tokens: NDArray[np.int32]) -> list[Logprob | None]:
        wanted = self._slots.records["logprobs"][slots].astype(np.int64)
        rows = np.flatnonzero((wanted >= 0) & (tokens >= 0))
        found: list[Logprob | None] = [None] * len(slots)
        if len(rows):
            for row, logprob in zip(rows, self._described(logits, rows, tokens[rows], wanted[rows]), strict=True):
                found[row] = logprob
        return found

    def _described(
        self, logits: Tensor, rows: NDArray[np.int64], chosen: NDArray[np.int32], wanted: NDArray[np.int64]
    ) -> list[Logprob]:
        wanted = np.minimum(wanted, self.vocabulary)
        ranks, logprobs, likeliest = self._path.logprobs(logits, rows, chosen, wanted)
        if len(ranks) and ranks.min() < 1:
            raise BadResult(f"the model's logits hold NaN or +inf in {int((ranks < 1).sum())} rows. Check the weights.")
        columns = (chosen, ranks, logprobs, likeliest, wanted)
        return [logprob_of(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def _bad(self, tokens: NDArray[np.int32]) -> dict[int, RequestError]:
        """Why rows have failed; their tokens become -1."""
        bad = {int(row): failure(int(tokens[row])) for row in np.flatnonzero(tokens < 0)}
        tokens[list(bad)] = -1
        return bad


def failure(code: int) -> RequestError:
    if code == EMPTY:
        return BadPrompt("no token may come: the constraint and the biases leave nothing. Loosen the constraint.")
    return BadResult("the model's logits hold NaN or +inf for this row. Check the weights, or try another dtype.")


def logprob_of(token: int, rank: int, logprobs: list[float], likeliest: list[int], wanted: int) -> Logprob:
    """One row's answer. Tokens of no probability are not among the likeliest."""
    pairs = zip(likeliest[:wanted], logprobs[1 : 1 + wanted], strict=True)
    beside = tuple(Candidate(other, value, place) for place, (other, value) in enumerate(pairs, 1) if value > -1e30)
    return Logprob(Candidate(token, max(logprobs[0], IMPOSSIBLE), rank), beside)

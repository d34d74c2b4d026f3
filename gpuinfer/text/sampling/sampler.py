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
from gpuinfer.text.sampling.compiled_path import CompleteDraw, CpuPath
from gpuinfer.text.sampling.cpu_draw import EMPTY
from gpuinfer.text.sampling.slot_settings import NO_TOKENS, SamplingSlots, TokenRules
from gpuinfer.text.sampling.torch_path import Described, QueuedDraw, TorchPath
from gpuinfer.text.sampling.triton_draws import draws_for

IMPOSSIBLE = -9999.0  # stands for a log-probability of minus infinity, which JSON has no number for, as in OpenAI's API


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """What one call drew: `tokens` int32 [rows]; -1 for the rows in `bad`, which says why each of them has failed."""

    tokens: NDArray[np.int32]
    logprobs: Sequence[Logprob | None]
    processed: NDArray[np.float64] | None = None  # [rows], of those that want it; None: no row does
    bad: Mapping[int, RequestError] = field(default_factory=dict)


class PendingDraw:
    """A draw that has begun. `tokens` int64 [rows] lie on the device of the logits, once it has come to them; they are
    negative for rows that no token can be drawn for.
    """

    def __init__(self, queued: QueuedDraw | CompleteDraw, wanted: NDArray[np.int32], processes: bool) -> None:
        self._queued, self._wanted, self._processes, self.tokens = queued, wanted, processes, queued.tokens

    @property
    def ready(self) -> bool:
        """Whether `finish` has nothing to wait for."""
        return self._queued.ready

    def finish(self, kept: NDArray[np.bool_] | None = None) -> DrawnTokens:
        """Wait for what was drawn. Of rows that are not `kept`, bool [rows], nothing is noted: their slots may be
        others' by now.
        """
        found = self._queued.finish(kept)
        tokens = found.codes
        bad: dict[int, RequestError] = {}
        if len(tokens) and tokens.min() < 0:
            bad = {int(row): draw_failure(int(tokens[row])) for row in np.flatnonzero(tokens < 0)}
            tokens[list(bad)] = -1
        logprobs: list[Logprob | None] = [None] * len(tokens)
        if found.described is not None:
            wanted, chosen = self._wanted[found.rows], tokens[found.rows]
            for row, logprob in zip(found.rows.tolist(), logprobs_of(found.described, chosen, wanted), strict=True):
                logprobs[row] = logprob if tokens[row] >= 0 else None
        return DrawnTokens(tokens, logprobs, found.processed if self._processes else None, bad)


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
        compiled: bool = True,
    ) -> None:
        """`compiled`: by kernels of our own where there are any; else by torch's operations, with the same tokens."""
        self.vocabulary = vocabulary
        self._slots = SamplingSlots(slots, vocabulary, seed, end_tokens)
        self._path: Any
        if torch.device(device).type == "cpu" and compiled:
            self._path = CpuPath(self._slots, vocabulary, threads)
        else:
            own = draws_for(torch.device(device)) if compiled and torch.device(device).type != "cpu" else None
            self._path = TorchPath(self._slots, vocabulary, own)
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

    @property
    def remembers(self) -> bool:
        """Whether what some row draws next depends on which tokens it has drawn, and not on their number alone."""
        return bool(self._slots.penalised)

    def go_back(self, slot: int, drawn: int) -> None:
        """The slot's answer has so many tokens: those that were drawn after them are not wanted."""
        self._slots.records["drawn"][slot] = drawn

    def draw(
        self,
        logits: Tensor,
        slots: NDArray[np.int32],
        masks: NDArray[np.int32] | None = None,
        rules: TokenRules | None = None,
    ) -> DrawnTokens:
        """See `begin`; and wait for it."""
        return self.begin(logits, slots, masks, rules).finish()

    def begin(
        self,
        logits: Tensor,
        slots: NDArray[np.int32],
        masks: NDArray[np.int32] | None = None,
        rules: TokenRules | None = None,
    ) -> PendingDraw:
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
        processes = bool(self._slots.with_processed)
        wanted = np.minimum(self._slots.records["logprobs"][slots], self.vocabulary)
        return PendingDraw(self._path.begin(logits, slots, masks, processes, rules), wanted, processes)

    def given_logprobs(self, logits: Tensor, tokens: NDArray[np.int32], wanted: int) -> list[Logprob]:
        """Of each row of `logits` [rows, vocabulary] the log-probability of a token that was not drawn here, and the
        `wanted` likeliest.

        Raises BadResult when a row holds NaN or +inf.
        """
        rows, chosen = np.arange(len(tokens), dtype=np.int64), np.array(tokens, np.int32)
        each = np.full(len(tokens), min(wanted, self.vocabulary), np.int64)
        described = self._path.logprobs(logits, rows, chosen, each)
        ranks = described[0]
        if len(ranks) and ranks.min() < 1:
            raise BadResult(f"the model's logits hold NaN or +inf in {int((ranks < 1).sum())} rows. Check the weights.")
        return logprobs_of(described, chosen, each)

    def close(self) -> None:
        """Free threads."""
        self._path.close()


def logprobs_of(described: Described, chosen: NDArray[np.int32], wanted: NDArray[Any]) -> list[Logprob]:
    """Log-probabilities of each row, with `wanted` of its likeliest tokens."""
    ranks, logprobs, likeliest = described
    columns = (chosen, ranks, logprobs, likeliest, wanted)
    return [logprob_of(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def draw_failure(code: int) -> RequestError:
    if code == EMPTY:
        return BadPrompt("no token may come: the constraint and the biases leave nothing. Loosen the constraint.")
    return BadResult("the model's logits hold NaN or +inf for this row. Check the weights, or try another dtype.")


def logprob_of(token: int, rank: int, logprobs: list[float], likeliest: list[int], wanted: int) -> Logprob:
    """One row's answer. Tokens of no probability are not among the likeliest."""
    pairs = zip(likeliest[:wanted], logprobs[1 : 1 + wanted], strict=True)
    beside = tuple(Candidate(other, value, place) for place, (other, value) in enumerate(pairs, 1) if value > -1e30)
    return Logprob(Candidate(token, max(logprobs[0], IMPOSSIBLE), rank), beside)

"""Settings of sampling by slot: one record of numbers each, and lists of tokens for the slots that have any; and the
check of a request's settings before it takes a slot.

The lists are as long as a slot's own tokens: a matrix [slots, vocabulary] would be the largest thing in memory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import MOST_LOGPROBS, MOST_PENALTY, MOST_REPETITION, MOST_TEMPERATURE, Sampling

MAX_BIASES = 1024
MAX_STOP_TOKENS = 1024
MAX_STOPS, LONGEST_STOPS = 64, 4096  # stop strings, and their characters: all are looked for at each token
SEEDS = range(-(1 << 63), 1 << 64)
GREEDY_BELOW = 1e-5  # temperatures under it count as 0: the division would leave the range of float32


def check_sampling(sampling: Sampling, vocabulary: int) -> None:
    """Raise BadPrompt when a value is out of its range, or a token id outside the vocabulary."""
    _within("temperature", sampling.temperature, 0.0, MOST_TEMPERATURE)
    _within("top_p", sampling.top_p, 0.0, 1.0, open_below=True)
    _within("min_p", sampling.min_p, 0.0, 1.0)
    _within("repetition_penalty", sampling.repetition_penalty, 0.0, MOST_REPETITION, open_below=True)
    _within("presence_penalty", sampling.presence_penalty, -MOST_PENALTY, MOST_PENALTY)
    _within("frequency_penalty", sampling.frequency_penalty, -MOST_PENALTY, MOST_PENALTY)
    _whole("top_k", sampling.top_k, 0)
    _whole("max_tokens", sampling.max_tokens, 1)
    _whole("min_tokens", sampling.min_tokens, 0, sampling.max_tokens)
    _whole("logprobs", sampling.logprobs, 0, MOST_LOGPROBS)
    _whole("prompt_logprobs", sampling.prompt_logprobs, 0, MOST_LOGPROBS)
    _whole("prompt_logprob_start", sampling.prompt_logprob_start, 0)
    _whole("seed", sampling.seed, SEEDS.start, SEEDS.stop - 1)
    if sampling.logit_bias:
        _at_most("logit_bias", len(sampling.logit_bias), MAX_BIASES)
        _in_vocabulary("logit_bias", sampling.logit_bias, vocabulary)
        for token, bias in sampling.logit_bias.items():
            if not math.isfinite(bias):
                cure = "Give a finite number; -100 bars a token in practice."
                raise BadPrompt(f"logit_bias of token {token} is {bias}. {cure}")
    if sampling.stop:
        _at_most("stop", len(sampling.stop), MAX_STOPS)
        if (length := sum(map(len, sampling.stop))) > LONGEST_STOPS:
            raise BadPrompt(f"the stop strings have {length} characters in all. Give at most {LONGEST_STOPS}.")
    if sampling.stop_token_ids:
        _at_most("stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_TOKENS)
        _in_vocabulary("stop_token_ids", sampling.stop_token_ids, vocabulary)


def _within(name: str, value: float, least: float, most: float, open_below: bool = False) -> None:
    if not (least <= value <= most) or (open_below and value == least):  # a NaN is in no range
        low = f"above {least:g} and at most" if open_below else f"from {least:g} to"
        raise BadPrompt(f"{name} is {value}. Give a number {low} {most:g}.")


def _whole(name: str, value: int | None, least: int, most: int | None = None) -> None:
    if value is None or (isinstance(value, int) and value >= least and (most is None or value <= most)):
        return
    raise BadPrompt(f"{name} is {value}. Give a whole number of {least} or more{f', at most {most}' if most else ''}.")


def _at_most(name: str, count: int, most: int) -> None:
    if count > most:
        raise BadPrompt(f"{name} has {count} entries. Give at most {most}.")


def _in_vocabulary(name: str, tokens: Iterable[int], vocabulary: int) -> None:
    for token in tokens:
        if not (isinstance(token, int) and 0 <= token < vocabulary):
            raise BadPrompt(f"{name} names token {token}. The model's tokens are 0 to {vocabulary - 1}.")


class TokenRules(Protocol):
    """What rows may say: `kinds` int8 [rows], 0: anything, 1: its ids alone, 2: anything but its ids. Those of row i
    are `ids[starts[i]:starts[i + 1]]`, ascending: `starts` int32 [rows + 1], `ids` int32.
    """

    @property
    def kinds(self) -> NDArray[np.int8]: ...
    @property
    def starts(self) -> NDArray[np.int32]: ...
    @property
    def ids(self) -> NDArray[np.int32]: ...


SETTINGS = [
    ("inverse", np.float32),  # 1 / temperature; 0: the likeliest token
    ("floor", np.float64),  # min-p: tokens whose logit is so far (0 or less) from the best one stay
    ("top_p", np.float64),
    ("top_k", np.int64),  # 0: all
    ("min_tokens", np.int64),
    ("repetition", np.float32),
    ("presence", np.float32),
    ("frequency", np.float32),
    ("penalised", np.int32),  # 1: its tokens are noted
    ("logprobs", np.int32),  # -1: none wanted
    ("processed", np.int32),  # 1: wanted
]
OWN = [
    ("seed", np.uint64),
    ("key", np.uint64),
    ("sample", np.uint64),
    ("drawn", np.int64),  # tokens so far: the position that random numbers are drawn for
    ("biases", np.int32),  # lengths of its lists
    ("stops", np.int32),
    ("seen", np.int32),
]
NO_TOKENS: NDArray[np.int32] = np.zeros(0, np.int32)
SLOT = np.dtype(SETTINGS + OWN, align=True)
MASK_64 = (1 << 64) - 1


class SlotLists:
    """A list of values for each slot, `values` [slots, room]; how many there are stands in the slot's record."""

    def __init__(self, slots: int, dtype: Any) -> None:
        self.values: NDArray[Any] = np.zeros((slots, 0), dtype)

    def make_room(self, room: int) -> None:
        """Room for lists of that length, doubled so that this happens seldom. Memory is taken as it is written to."""
        slots, old = self.values.shape
        if room > old:
            grown = np.zeros((slots, max(room, 2 * old, 16)), self.values.dtype)
            grown[:, :old] = self.values
            self.values = grown

    def put(self, slot: int, values: Any) -> None:
        self.make_room(len(values))
        self.values[slot, : len(values)] = values


class SamplingSlots:
    """The records and lists of all slots. `ends` are the model's end tokens, int32."""

    def __init__(self, slots: int, vocabulary: int, seed: int, end_tokens: Sequence[int]) -> None:
        self.records = np.zeros(slots, SLOT)
        self.bias_ids, self.bias_values = SlotLists(slots, np.int32), SlotLists(slots, np.float32)
        self.stops = SlotLists(slots, np.int32)
        self.seen_ids, self.seen_counts = (
            SlotLists(slots, np.int32),
            SlotLists(slots, np.int32),
        )  # counts: in the answer
        self.ends = np.array([token for token in end_tokens if 0 <= token < vocabulary], np.int32)
        self.penalised, self.with_logprobs, self.with_processed = set[int](), set[int](), set[int]()
        self._vocabulary, self._seed = vocabulary, seed
        self._last: tuple[Sampling, tuple[Any, ...]] | None = None  # most prompts share one

    def admit(
        self,
        slot: int,
        sampling: Sampling,
        prompt: NDArray[np.int32],
        key: str,
        sample: int,
        begun: NDArray[np.int32] = NO_TOKENS,
    ) -> None:
        """Start an answer in the slot, after the tokens `begun`. Raises BadPrompt, the slot as it was."""
        if self._last is None or self._last[0] is not sampling:
            check_sampling(sampling, self._vocabulary)
            self._last = sampling, settings_of(sampling)
        settings, seen, penalised = self._last[1], NO_TOKENS, is_penalised(sampling)
        if sampling.repetition_penalty != 1.0 and len(prompt):  # else no penalty asks for the prompt's tokens
            seen = np.unique(prompt).astype(np.int32)
            if seen[0] < 0 or seen[-1] >= self._vocabulary:
                ends = f"{seen[0]} to {seen[-1]}"
                raise BadPrompt(f"the prompt has tokens {ends}. The model's are 0 to {self._vocabulary - 1}.")
        if penalised:
            seen = np.union1d(seen, begun)
        self.release(slot)
        seed = self._seed if sampling.seed is None else sampling.seed
        named = hash_of(key) if sampling.seed is None or sampling.keyed else 0
        lengths = (len(sampling.logit_bias), len(sampling.stop_token_ids), len(seen))
        self.records[slot] = (*settings, seed & MASK_64, named, sample, len(begun), *lengths)
        if lengths[0]:
            self.bias_ids.put(slot, list(sampling.logit_bias))
            self.bias_values.put(slot, list(sampling.logit_bias.values()))
        if lengths[1]:
            self.stops.put(slot, sampling.stop_token_ids)
        if penalised:
            self.seen_ids.put(slot, seen)
            self.seen_counts.put(slot, np.bincount(np.searchsorted(seen, begun), minlength=len(seen)))
            self.penalised.add(slot)
        if sampling.logprobs is not None:
            self.with_logprobs.add(slot)
        if sampling.processed_logprobs:
            self.with_processed.add(slot)

    def release(self, slot: int) -> None:
        for group in (self.penalised, self.with_logprobs, self.with_processed):
            group.discard(slot)

    def make_room_to_note(self) -> None:
        """Room for one more token in the lists of every slot that is penalised."""
        if self.penalised:
            room = int(self.records["seen"].max()) + 1
            self.seen_ids.make_room(room)
            self.seen_counts.make_room(room)

    def lists(self) -> tuple[NDArray[Any], ...]:
        """What kernels take: biases (ids, values), stop tokens, end tokens, tokens seen (ids, counts)."""
        return (
            self.bias_ids.values,
            self.bias_values.values,
            self.stops.values,
            self.ends,
            self.seen_ids.values,
            self.seen_counts.values,
        )


def settings_of(sampling: Sampling) -> tuple[Any, ...]:
    """The fields of SETTINGS."""
    greedy = sampling.temperature < GREEDY_BELOW
    floor = -math.inf if not sampling.min_p else sampling.temperature * math.log(sampling.min_p)
    return (
        0.0 if greedy else 1.0 / sampling.temperature,
        floor,
        sampling.top_p,
        min(sampling.top_k, 1 << 40),
        min(sampling.min_tokens, 1 << 40),
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        is_penalised(sampling),
        -1 if sampling.logprobs is None else sampling.logprobs,
        sampling.processed_logprobs,
    )


def is_penalised(sampling: Sampling) -> bool:
    return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0)


def hash_of(key: str) -> int:
    """64 bits that stand for the key."""
    return int.from_bytes(hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest(), "little")

"""What may be asked of an answer. All of it is said before a slot is taken, and every list has a bound."""

from __future__ import annotations

import math
from collections.abc import Iterable

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import MOST_LOGPROBS, MOST_PENALTY, MOST_REPETITION, MOST_TEMPERATURE, Sampling

MAX_BIASES = 1024
MAX_STOP_TOKENS = 1024
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
    _whole("seed", sampling.seed, SEEDS.start, SEEDS.stop - 1)
    if sampling.logit_bias:
        _check_biases(sampling, vocabulary)
    if sampling.stop_token_ids:
        _at_most("stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_TOKENS)
        _in_vocabulary("stop_token_ids", sampling.stop_token_ids, vocabulary)


def _check_biases(sampling: Sampling, vocabulary: int) -> None:
    _at_most("logit_bias", len(sampling.logit_bias), MAX_BIASES)
    _in_vocabulary("logit_bias", sampling.logit_bias, vocabulary)
    for token, bias in sampling.logit_bias.items():
        if not math.isfinite(bias):
            raise BadPrompt(
                f"logit_bias of token {token} is {bias}. Give a finite number; -100 bars a token in practice."
            )


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

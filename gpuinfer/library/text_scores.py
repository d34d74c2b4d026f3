"""How likely a model of text thinks that prompts go on in some way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct

from gpuinfer.errors import BadPrompt, GpuinferError, UsageError, unwrap
from gpuinfer.generation import Generation, Prompt, Sampling
from gpuinfer.library.llm_session import OpenedLLM
from gpuinfer.serving.model_language import ModelLanguage


class ContinuationScore(Struct, frozen=True, kw_only=True):
    """How likely a model thinks that a prompt goes on so."""

    tokens: tuple[int, ...]  # of the continuation
    logprobs: tuple[float, ...]  # of each of them, after all that comes before it
    greedy: bool  # whether each of them is the likeliest token at its place

    @property
    def logprob(self) -> float:
        """Of the whole continuation."""
        return sum(self.logprobs)


class ScoringPrompts:
    """Pairs of prompts and continuations as prompts that nothing is drawn for."""

    def __init__(self, language: ModelLanguage) -> None:
        self._language = language

    def pairs(self, prompts: Any, continuations: Any, adapter: str | None) -> list[Prompt]:
        """One for each continuation. Raises `UsageError` for lists that do not fit, `BadPrompt` for a bad pair."""
        several = [continuations] if is_one_text(continuations) else list(continuations)
        before = [prompts] * len(several) if is_one_text(prompts) else list(prompts)
        if len(before) != len(several):
            raise UsageError(
                f"{len(before)} prompts and {len(several)} continuations: each prompt has one. Give as many, or one "
                "prompt for all."
            )
        rows = []
        for number, pair in enumerate(zip(before, several, strict=True)):
            try:
                tokens, start = self._tokens(*pair)
            except (BadPrompt, UsageError) as error:
                raise type(error)(f"continuation {number}: {error}") from None
            sampling = Sampling(max_tokens=0, prompt_logprobs=0, prompt_logprob_start=start)
            rows.append(Prompt(tokens=tokens, sampling=sampling, key="score", adapter=adapter))
        return rows

    def _tokens(self, prompt: Any, continuation: Any) -> tuple[tuple[int, ...], int]:
        """All tokens, and how many of them are the prompt's."""
        if not isinstance(prompt, str) and not isinstance(continuation, str):
            before, after = token_ids(prompt), token_ids(continuation)
            whole, start = (*before, *after), len(before)
        elif isinstance(prompt, str) and isinstance(continuation, str):
            whole, start = self._language.continuation(prompt, continuation)
        else:
            raise BadPrompt("of prompt and continuation one is a text and one is token ids. Give both alike.")
        if start == len(whole):
            raise BadPrompt("the continuation is empty. Give at least one token.")
        if not start:
            raise BadPrompt("nothing comes before the continuation. Give a prompt of at least one token.")
        return whole, start


async def generations_of(
    opened: OpenedLLM, rows: Sequence[Prompt], timeout: float | None, request: dict[str, Any], noun: str
) -> list[Generation]:
    """What the model made of each row, all asked at once, on the session's loop. Raises the first error, whose `index`
    is the row's place; its message calls the row by `noun` and that.
    """
    requester = opened.requester(**request)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(opened.ask(requester, row, timeout, None)) for row in rows]
    except BaseExceptionGroup as errors:
        raise unwrap(errors) from None
    generations = []
    for number, task in enumerate(tasks):
        found = task.result()
        if isinstance(found, GpuinferError):
            found.args, found.index = (f"{noun} {number}: {found}",), number
            raise found
        generations.append(found)
    return generations


async def scores_of(
    opened: OpenedLLM, rows: Sequence[Prompt], timeout: float | None, request: dict[str, Any]
) -> list[ContinuationScore]:
    """On the session's loop. Raises the first error, whose `index` is the pair's place."""
    found = await generations_of(opened, rows, timeout, request, "continuation")
    return list(map(score_of, rows, found))


def score_of(row: Prompt, found: Generation) -> ContinuationScore:
    start = row.sampling.prompt_logprob_start
    logprobs = [one for one in (found.prompt_logprobs or ())[start:] if one is not None]
    return ContinuationScore(
        tokens=(row.tokens or ())[start:],
        logprobs=tuple(one.chosen.logprob for one in logprobs),
        greedy=all(one.chosen.rank == 1 for one in logprobs),
    )


def is_one_text(value: Any) -> bool:
    """A text, or token ids."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return bool(value) and isinstance(value[0], int)
    if isinstance(value, str):
        return True
    if not isinstance(value, Iterable):
        raise UsageError(f"{value!r:.60} cannot be scored. Give texts, or token ids.")
    return False


def token_ids(value: Any) -> tuple[int, ...]:
    """Raises `BadPrompt` for what are none."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple) or not all(type(one) is int and 0 <= one < 1 << 31 for one in value):
        raise BadPrompt(f"{value!r:.60} is neither a text nor token ids. Give one of these.")
    return tuple(value)

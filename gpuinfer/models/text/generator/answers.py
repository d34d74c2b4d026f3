"""When an answer ends, and what it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpuinfer.generation import Completion
from gpuinfer.models.text.generator.parts import Language
from gpuinfer.models.text.generator.work import Row


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an answer is complete."""

    reason: Literal["stop", "length"]
    cause: int | str | None = None  # the stop token or string
    silent: bool = False  # its last token is no part of the text


END_TOKEN = Ending("stop", silent=True)
COMPLETE = Ending("stop")
FULL = Ending("length")


def ending(row: Row, token: int, count: int, *, full: bool) -> Ending | None:
    """Whether the answer ends with `token`, its `count`-th, which is not the model's own end token."""
    sampling = row.work.prepared.sampling
    if token in sampling.stop_token_ids:
        return Ending("stop", token, silent=True)
    if row.growing is not None:
        stop = row.growing.push(token)
        if stop is not None and count >= sampling.min_tokens:
            return Ending("stop", stop)
    if row.matcher is not None:
        row.matcher.advance(token)
        if row.matcher.complete:
            return COMPLETE
    return FULL if full else None


def completion(language: Language, row: Row, tokens: list[int], end: Ending) -> Completion:
    """The answer as it is delivered."""
    if isinstance(end.cause, str) and row.growing is not None:
        text = row.growing.text
        tokens = tokens[: row.growing.kept]
    else:
        special = not row.work.prepared.sampling.skip_special_tokens
        text = language.decode(tokens[:-1] if end.silent else tokens, special)
    logprobs = None if row.logprobs is None else tuple(row.logprobs[: len(tokens)])
    return Completion(
        text=text, tokens=tuple(tokens), finish_reason=end.reason, stop_reason=end.cause, logprobs=logprobs
    )

"""Whether a backend of text does what a prompt asks for, or refuses that with `BadPrompt`: it must not ignore it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from gpuinfer.api import Backend
from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Completion, Generation
from gpuinfer.testing.parts import TOKENS, MakePrompt, asked, sampled

SEEDS = range(1, 9)
CHATS: Sequence[Mapping[str, Any]] = [
    {"messages": ({"role": "user", "content": content},)}
    for content in ("yes", "Which way does the river flow?", "Write a verse of eleven words about the sea at night.")
]
TOKENISED: Sequence[Mapping[str, Any]] = [
    {"tokens": tokens} for tokens in ((1, 2), (2, 1, 3, 5), (7, 6, 5, 4, 3, 2, 1))
]


async def draws_as_told(backend: Backend, make_prompt: MakePrompt) -> str | None:
    """By seed at a temperature above 0, and the likeliest token at 0."""
    prompt = sampled(make_prompt(1, 0), max_tokens=TOKENS)

    async def drawn(temperature: float, seed: int) -> Sequence[Completion]:
        answer, _ = await asked(backend, sampled(prompt, temperature=temperature, seed=seed), parts=False)
        return _plain(answer)

    try:
        greedy = [await drawn(0.0, seed) for seed in SEEDS[:3]]
        answers = [await drawn(1.0, seed) for seed in (*SEEDS, SEEDS[0])]
    except BadPrompt:
        return None
    refuse = "or refuse a prompt that asks for it with BadPrompt."
    if greedy != greedy[:1] * len(greedy):
        return f"at temperature 0 it answers otherwise with another seed. Take the likeliest token at 0, {refuse}"
    if answers[0] != answers[-1]:
        return f"at temperature 1 one seed drew two answers. Draw by `Sampling.seed` alone, {refuse}"
    if answers == answers[:1] * len(answers):
        return (
            f"at temperature 1 {len(SEEDS)} seeds drew the same answer. Draw by `Sampling.temperature` and "
            f"`Sampling.seed`, {refuse}"
        )
    return None


async def stops_as_told(backend: Backend, make_prompt: MakePrompt) -> str | None:
    """At a string and at a token that the answer is known to come to."""
    prompt = sampled(make_prompt(1, 0), max_tokens=TOKENS)
    whole = (await asked(backend, prompt, parts=False))[0].completions[0]
    printable = re.findall(r"[!-~]{1,3}", whole.text)
    for stop in printable[len(printable) // 2 :][:1]:
        text = whole.text[: whole.text.index(stop)]
        found = await _completion(backend, sampled(prompt, stop=(stop,)))
        if found is not None and (found.text, found.finish_reason, found.stop_reason) != (text, "stop", stop):
            return (
                f"an answer with the stop string {stop!r} is {found.text!r:.40}, ended by {found.finish_reason} "
                f"({found.stop_reason!r}), where {text!r:.40} comes before it. End there, with finish_reason 'stop' "
                "and the string as stop_reason, or refuse the prompt with BadPrompt."
            )
    for token in whole.tokens[len(whole.tokens) // 2 :][:1]:
        found = await _completion(backend, sampled(prompt, stop_token_ids=(token,)))
        before = whole.tokens.index(token)
        if found is not None and (found.finish_reason != "stop" or len(found.tokens) > before + 1):
            return (
                f"an answer with the stop token {token} goes on after it. End there, with finish_reason 'stop', or "
                "refuse the prompt with BadPrompt."
            )
    return None


async def reads_every_form(backend: Backend, make_prompt: MakePrompt) -> str | None:
    """Chats and tokens in the place of a text."""
    prompt = structs.replace(sampled(make_prompt(1, 0), max_tokens=TOKENS), text=None)
    for name, forms in (("messages", CHATS), ("tokens", TOKENISED)):
        try:
            answers = [(await asked(backend, structs.replace(prompt, **form), parts=False))[0] for form in forms]
        except BadPrompt:
            continue
        told = [(_plain(answer), answer.prompt_tokens) for answer in answers]
        if told == told[:1] * len(told):
            return (
                f"{len(forms)} prompts with other `{name}` got one answer, and were of as many tokens. Read "
                f"`Prompt.{name}`, or refuse a prompt that has them with BadPrompt."
            )
    return None


async def _completion(backend: Backend, prompt: Any) -> Completion | None:
    """None: it was refused."""
    try:
        return (await asked(backend, prompt, parts=False))[0].completions[0]
    except BadPrompt:
        return None


def _plain(answer: Generation) -> Sequence[Any]:
    return [(one.text, one.tokens) for one in answer.completions]

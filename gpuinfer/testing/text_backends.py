"""What a backend of text promises: it does what a prompt asks for or refuses with `BadPrompt`, and it gives answers in
parts as it says. One that gives no parts promises nothing about them.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from msgspec import structs

from gpuinfer.api import Backend, Request
from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Completion, Generation, Part, Prompt

TOKENS = 12  # of an answer that is read
MANY = 64  # of one whose reader leaves

MakePrompt = Callable[[int, int], Prompt]
"""From a number of samples and a seed to a prompt; other seeds give other prompts."""


async def parts_make_the_answer(backend: Backend, make_prompt: MakePrompt) -> str | None:
    """With and without a stop string, one sample and several."""
    samples = min(2, backend.limits.max_rows)
    prompts = [sampled(make_prompt(count, seed), max_tokens=TOKENS) for seed, count in enumerate((1, samples))]
    answers = []
    for prompt in prompts:
        whole, unasked = await request_answer(backend, prompt, parts=False)
        if unasked:
            return "it gave parts of an answer that no reader asked for. Yield them for a request with `parts` alone."
        answers.append(whole)
    for prompt in [*prompts, *map(_stopped, prompts, answers)]:
        try:
            whole, received = await request_answer(backend, prompt, parts=True)
        except BadPrompt:
            if not prompt.sampling.stop:  # which it may refuse
                raise
            continue
        if received and (fault := fault_of_parts(received, whole)):
            return fault
    return None


async def reader_may_leave(backend: Backend, make_prompt: MakePrompt) -> str | None:
    """After the first part; all slots are for others then."""
    rows = backend.limits.slots or backend.limits.max_rows
    batch = [Request(sampled(make_prompt(1, seed), max_tokens=MANY), parts=True) for seed in range(min(rows, 8))]
    left = False
    async for event in backend.stream(tuple(batch)):  # it ends, however
        if not event.last and not left:
            left = True
            for request in batch:
                backend.cancel(request)
    for seed in range(2):
        whole, received = await request_answer(backend, make_prompt(min(rows, 8), seed), parts=True)
        if received and (fault := fault_of_parts(received, whole)):
            return f"after a reader has left: {fault}"
    return None


async def begun_goes_on(backend: Backend, make_prompt: MakePrompt) -> str | None:
    """Answers that have begun with a different number of tokens each: their own, and those of another prompt's answer,
    which a backend that begins again cannot know. To refuse such a prompt is as well.
    """
    samples = min(2, backend.limits.max_rows)
    prompt, other = (sampled(make_prompt(samples, seed), max_tokens=TOKENS) for seed in (0, 1))
    answers = [(await request_answer(backend, one, parts=False))[0] for one in (prompt, other)]
    for shift in (1, TOKENS // 2):
        for whole in answers:
            begun = tuple(one.tokens[: shift + sample] for sample, one in enumerate(whole.completions))
            if not any(begun):
                return "its answers have no tokens, so that no request can go on with them. Give Completion.tokens."
            if fault := await _fault_of_going_on(backend, structs.replace(prompt, begun=begun)):
                return fault
    return None


async def _fault_of_going_on(backend: Backend, prompt: Prompt) -> str | None:
    try:
        answer, received = await request_answer(backend, prompt, parts=True)
    except BadPrompt:
        return None
    for sample, (had, one) in enumerate(zip(prompt.begun, answer.completions, strict=True)):
        if one.tokens[: len(had)] != had:
            return (
                f"an answer that had begun with {had!s:.60} is {one.tokens!s:.60}. Go on after `Prompt.begun`, or "
                "refuse the prompt with BadPrompt."
            )
        after = tuple(token for part in received if part.sample == sample for token in part.tokens)
        if received and had + after != one.tokens:
            return f"after the begun tokens {had!s:.60} its parts gave {after!s:.60}. Give out what follows them."
    return None


def fault_of_parts(received: Sequence[Any], whole: Generation) -> str | None:
    """What is wrong with the parts of an answer, in the order in which they came."""
    for part in received:
        if not isinstance(part, Part):
            return f"a part of an answer is a {type(part).__name__}. Yield gpuinfer.generation.Part."
        if not 0 <= part.sample < len(whole.completions):
            return f"a part is of sample {part.sample}, of {len(whole.completions)}. Count from 0, as in completions."
    for sample, answer in enumerate(whole.completions):
        if fault := _fault_of_sample([part for part in received if part.sample == sample], answer):
            return f"{fault} (sample {sample})"
    return None


def _fault_of_sample(parts: Sequence[Part], answer: Completion) -> str | None:
    ended = [part.finish_reason is not None or part.stop_reason is not None for part in parts]
    if not parts or any(ended[:-1]) or parts[-1].finish_reason is None:
        return "a sample's parts end with one that has its finish_reason, and no other has. Give one last part each"
    tokens = tuple(token for part in parts for token in part.tokens)
    if tokens != answer.tokens:
        return f"parts joined have the tokens {tokens!s:.60} and the answer {answer.tokens!s:.60}. Hold back more"
    text = "".join(part.text for part in parts)
    if text != answer.text:
        return f"parts joined say {text!r:.60} and the answer {answer.text!r:.60}. Hold back what may be taken back"
    if (parts[-1].finish_reason, parts[-1].stop_reason) != (answer.finish_reason, answer.stop_reason):
        return "the last part ended for another reason than the answer. Give both the same"
    spans = tuple(span for part in parts for span in part.versions)
    if spans != tuple(span for span in answer.versions if span != (0, "")):
        return f"parts joined say that {spans!s:.60} drew them and the answer {answer.versions!s:.60}. Say the same"
    logprobs = tuple(one for part in parts for one in part.logprobs or ())
    if logprobs != (answer.logprobs or ()):
        return "parts joined have other log-probabilities than the answer. Give each with its token"
    return None


async def request_answer(backend: Backend, prompt: Prompt, *, parts: bool) -> tuple[Generation, list[Any]]:
    """The answer, and its parts. Raises the error of the request, and `ValueError` for what comes after the end."""
    request = Request(prompt, prompt.samples, parts=parts)
    received, answers = list[Any](), list[Generation]()
    async for event in backend.stream((request,)):
        if answers:
            raise ValueError("something came after the answer. End each request with its one event of last=True")
        if not event.last:
            received.append(event.value)
        elif event.error is not None:
            raise event.error
        elif isinstance(event.value, Exception):  # as `infer` may refuse one of a batch
            raise event.value
        else:
            answers.append(event.value)
    if len(answers) != 1:
        raise ValueError("a prompt got no answer. Yield an event with last=True")
    return answers[0], received


def sampled(prompt: Prompt, **changed: Any) -> Prompt:
    """The same with other fields of its `Sampling`."""
    return structs.replace(prompt, sampling=structs.replace(prompt.sampling, **changed))


def _stopped(prompt: Prompt, whole: Generation) -> Prompt:
    """The same with a stop string from the middle of its answer, which parts must not give away."""
    text = whole.completions[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    return sampled(prompt, stop=(stop,) if stop else ())


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
        answer, _ = await request_answer(backend, sampled(prompt, temperature=temperature, seed=seed), parts=False)
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
    whole = (await request_answer(backend, prompt, parts=False))[0].completions[0]
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
            answers = [
                (await request_answer(backend, structs.replace(prompt, **form), parts=False))[0] for form in forms
            ]
        except BadPrompt:
            continue
        found = [(_plain(answer), answer.prompt_tokens) for answer in answers]
        if found == found[:1] * len(found):
            return (
                f"{len(forms)} prompts with other `{name}` got one answer, and were of as many tokens. Read "
                f"`Prompt.{name}`, or refuse a prompt that has them with BadPrompt."
            )
    return None


async def _completion(backend: Backend, prompt: Any) -> Completion | None:
    """None: it was refused."""
    try:
        return (await request_answer(backend, prompt, parts=False))[0].completions[0]
    except BadPrompt:
        return None


def _plain(answer: Generation) -> Sequence[Any]:
    return [(one.text, one.tokens) for one in answer.completions]


PROMISES: dict[str, Callable[[Backend, MakePrompt], Awaitable[str | None]]] = {
    "gives parts that make the answer": parts_make_the_answer,
    "goes on with an answer that has begun": begun_goes_on,
    "draws as a prompt tells it": draws_as_told,
    "stops where a prompt tells it": stops_as_told,
    "reads chats and tokens, or refuses them": reads_every_form,
    "lets a reader leave": reader_may_leave,
}

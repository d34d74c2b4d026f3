"""From the body of a request to a prompt, or to an error with its cure. Rows of a file have the same fields:
`parse_prompt` makes prompts of both.
"""

from __future__ import annotations

import difflib
import functools
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Raw, Struct

from gpuinfer.config.options import choices
from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Prompt, Rendering, Sampling
from gpuinfer.serving.openai import sampling_fields
from gpuinfer.serving.openai.sampling_fields import is_default, requested_rendering, sampling_changes
from gpuinfer.serving.openai.schema import (
    OF_CHATS,
    USUAL,
    InputRow,
    LooseBody,
    RequestBody,
    Texts,
    UnsupportedFields,
)

URLS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}  # and the field that holds the prompt
TOKENS = 1 << 31  # ids of any vocabulary are below
MOST_SHOWN = 60  # characters of a name that is not known
UNKNOWN = re.compile(r"unknown field `(.*)`", re.S)
UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # its byte order marks
HIGH, LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
OTHER_WORD = re.compile(r"^Invalid enum value .* at `\$\.(\w+)`$")  # a field's name, not what a client sent: it is kept
HALF = re.compile(b"%s(?!%s)|(?<!%s)%s" % (HIGH, LOW, HIGH, LOW))  # a lone surrogate


class BadRequest(BadPrompt):
    """A request that cannot be answered. `param` is the field to blame, where it is known."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class PromptDefaults:
    """The values of requests and rows that set nothing else."""

    sampling: Sampling = field(default_factory=Sampling)
    rendering: Rendering = field(default_factory=Rendering)
    samples: int = 1
    truncate: Any = None
    strict: bool = True  # an unknown field is an error
    adapter: str | None = None  # of rows that name none


class ParsedRequest(Struct, kw_only=True, gc=False):
    """The parsed body of a request. The prompt has no key yet."""

    prompt: Prompt
    said: tuple[Any, ...]  # what distinguishes the request from others
    chat: bool  # answered as a chat, or as a completion
    model: str | None = None  # as the request names it
    stream: bool = False  # the answer is sent in chunks
    usage: bool = False  # and the last chunk has the count of tokens
    tool_choice: Any = None  # as the request has it
    parallel_tool_calls: Any = None


class RequestReader:
    """Parses the bodies of requests. `streams`: whether answers in chunks, and calls of tools, are possible. `cure`:
    what else helps against an unknown field.
    """

    def __init__(self, defaults: PromptDefaults, *, streams: bool = False, cure: str = "") -> None:
        self._defaults, self._cure = defaults, cure
        self._able = ("stream", "tool_choice") if streams else ()
        self._body: Any = msgspec.json.Decoder(RequestBody if defaults.strict else LooseBody)

    def read(self, body: bytes | Raw, url: str) -> ParsedRequest:
        """The request to one of `URLS`. Raises `BadPrompt`, most often `BadRequest`."""
        return self._parsed(self._decoded(body, url), url)

    def read_all(self, body: bytes | Raw, url: str, most: int) -> tuple[ParsedRequest, ...]:
        """The requests in a body for completions, which may hold several prompts, `most` at most: one for each."""
        request = self._decoded(body, url)
        prompt: Any = request.prompt
        if not isinstance(prompt, list) or len(prompt) < 2 or all(isinstance(one, int) for one in prompt):
            return (self._parsed(request, url),)
        if len(prompt) > most:
            raise BadRequest(
                f"`prompt` holds {len(prompt)} prompts, and {most} are the most. Send several requests.", "prompt"
            )
        return tuple([self._parsed(msgspec.structs.replace(request, prompt=one), url) for one in prompt])

    def _decoded(self, body: bytes | Raw, url: str) -> RequestBody:
        try:
            request: RequestBody = self._body.decode(body)
        except (ValueError, RecursionError) as error:
            raise unreadable(error, RequestBody, bytes(body), "request", self._cure) from error
        name = URLS[url]
        if getattr(request, name) is None:
            raise BadRequest(f"the request's body has no `{name}`. Give it, or another url.", name)
        refuse_unsupported(request, self._able)
        return request

    def _parsed(self, request: RequestBody, url: str) -> ParsedRequest:
        if request.messages is not None:
            request.messages = [_with_arguments(one, number) for number, one in enumerate(request.messages)]
        prompt, said = parse_prompt(request, None, self._defaults)
        if prompt.sampling.logprobs is not None:
            sampling = msgspec.structs.replace(prompt.sampling, spelled=True)
            prompt = msgspec.structs.replace(prompt, sampling=sampling)
        options = request.stream_options if isinstance(request.stream_options, dict) else {}
        return ParsedRequest(
            prompt=prompt,
            said=said,
            chat=URLS[url] == "messages",
            model=request.model,
            stream=bool(request.stream),
            usage=bool(options.get("include_usage")),
            tool_choice=request.tool_choice,
            parallel_tool_calls=request.parallel_tool_calls,
        )


def _with_arguments(message: dict[str, Any], number: int) -> dict[str, Any]:
    """A message whose calls have their arguments as an object, as templates read them: OpenAI's clients send their
    JSON. Raises `BadRequest`.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    found: list[Any] = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        given = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(function, dict) and isinstance(given, str):
            try:
                call = {**call, "function": {**function, "arguments": msgspec.json.decode(given or "{}")}}
            except (ValueError, RecursionError):
                name = f"messages[{number}].tool_calls[{index}].function.arguments"
                raise BadRequest(f"`{name}` is not JSON. Send the calls of the answer as they came.", name) from None
        found.append(call)
    return {**message, "tool_calls": found}


def parse_prompt(
    asked: InputRow | RequestBody, tokens: list[int] | None, defaults: PromptDefaults
) -> tuple[Prompt, tuple[Any, ...]]:
    """The prompt, and what distinguishes it from others: text, tokens, messages, options. Raises `BadPrompt`."""
    text: Any = asked.prompt
    if type(text) is not str or tokens is not None or asked.messages is not None:
        text, tokens = text_or_tokens(asked.prompt, tokens, asked.messages)
    written = defaults.rendering
    if is_default(asked):
        own: dict[str, Any] = {}
        sampling, samples, truncate, special = defaults.sampling, defaults.samples, None, True
    else:
        own = sampling_changes(asked)
        sampling = msgspec.structs.replace(defaults.sampling, **own) if own else defaults.sampling
        if sampling.keyed and "seed" in own:
            sampling = msgspec.structs.replace(sampling, keyed=False)
        if filled := sampling_fields.requested_unmasking(asked):
            sampling = msgspec.structs.replace(
                sampling, unmasking=sampling_fields.override_unmasking(sampling.unmasking, filled)
            )
            own["unmasking"] = filled
        samples, truncate = asked.n or defaults.samples, asked.truncate
        special = asked.add_special_tokens is not False
        of_chat = [name for name in OF_CHATS if getattr(asked, name)]
        of_chat += ["add_generation_prompt"] if asked.add_generation_prompt is False else []  # true is as it is anyway
        if of_chat and asked.messages is None:
            why = f"`{of_chat[0]}` is said of a chat, and this is a prompt. Give messages, or take it out."
            raise BadRequest(why, of_chat[0])
        if of_chat:
            written = requested_rendering(asked, written)
            own["rendering"] = msgspec.to_builtins(written)
    prompt = Prompt(
        text=text,
        tokens=None if tokens is None else tuple(tokens),
        messages=None if asked.messages is None else tuple(asked.messages),
        rendering=written,
        sampling=sampling,
        samples=samples,
        truncate=truncate or defaults.truncate,
        special_tokens=special,
    )
    if "logit_bias" in own:
        own["logit_bias"] = sorted(own["logit_bias"].items())
    wishes = (own, asked.n, truncate, special) if own or asked.n or truncate or not special else None
    return prompt, (text, tokens, asked.messages, wishes)


def text_or_tokens(
    prompt: Texts | None,
    tokens: list[int] | None,
    messages: Sequence[Mapping[str, Any]] | None,
    field: str = "prompt",
) -> tuple[str | None, list[int] | None]:
    """The text or the tokens; neither for a chat. Raises `BadRequest` unless it is exactly one of the three, which
    names the place; `field`: that of `prompt`.
    """
    given = [one for one in (prompt, tokens, messages) if one is not None]
    if len(given) != 1:
        names = "prompt, prompt_token_ids and messages"
        raise BadRequest(f"one of {names} is wanted, and this has {len(given) or 'none'}. Give one.")
    if messages is not None:
        if not messages:
            raise BadRequest("`messages` is empty. Give at least one message.", "messages")
        for number, message in enumerate(messages):
            if not isinstance(message.get("role"), str):
                name = f"messages[{number}]"
                raise BadRequest(f'`{name}` has no role. Write {{"role": "user", "content": …}}.', name)
        return None, None
    if prompt is None:
        return None, tokens
    alone = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt  # a list of one prompt
    if isinstance(alone, str):
        return alone, None
    listed: list[Any] = alone if isinstance(alone, list) else [alone]
    if not all(isinstance(one, int) for one in listed):
        why = (
            f"`{field}` is neither one text nor one list of token ids. Give each prompt a request or a row of its own."
        )
        raise BadRequest(why, field)
    inside = f"{field}[0]" if isinstance(alone, list) and alone is not prompt else field
    for number, token in enumerate(listed):
        if not 0 <= token < TOKENS:
            place = f"{inside}[{number}]"
            raise BadRequest(
                f"`{place}` is {str(token)[:MOST_SHOWN]}, and token ids are from 0 to {TOKENS - 1:,}. Correct it.",
                place,
            )
    return None, listed


_unusual = operator.attrgetter(*USUAL)


def refuse_unsupported(asked: UnsupportedFields, able: tuple[str, ...] = ()) -> None:
    """Raises `BadRequest` for fields that would change the answer and are not supported, unless `able` has them."""
    if asked.best_of is None and not any(_unusual(asked)):  # most requests
        return
    for name, usual in USUAL.items():
        if (wished := getattr(asked, name)) and wished not in usual and name not in able:
            raise _not_to_be_had(name)
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise _not_to_be_had("best_of")


def _not_to_be_had(name: str) -> BadRequest:
    return BadRequest(f"`{name}` is not to be had here. Take it out.", name)


def unreadable(error: BaseException, wanted: type[Struct], text: bytes, what: str, cure: str = "") -> BadRequest:
    """Why `what`, a row or a request, is not a `wanted`. `cure`: what else helps against an unknown field."""
    if isinstance(error, RecursionError):
        return BadRequest(f"the {what} is nested too deeply. Make it flatter.")
    if b"\0" in text or text.startswith(UTF_16):
        return BadRequest(f"the {what} is not UTF-8; it looks like UTF-16. Write it as UTF-8.")
    if isinstance(error, UnicodeDecodeError):
        return BadRequest(f"the {what} is not UTF-8 ({error.reason}). Write it as UTF-8.")
    if unknown := UNKNOWN.search(str(error)):
        name = unknown.group(1)[:MOST_SHOWN]
        return BadRequest(f"there is no field `{name}`.{_near(name, wanted)} Take it out{cure}.", name)
    if isinstance(error, msgspec.ValidationError):
        other = OTHER_WORD.search(str(error))
        return BadRequest(f"{error}. {_choices(other[1], wanted) if other else 'Correct it.'}")
    if HALF.search(text):
        why = "an escape \\ud800 to \\udfff stands alone, which is half of a character. Write whole characters."
        return BadRequest(why)
    form = "one JSON object a line" if what == "row" else "one JSON object"
    return BadRequest(f"the {what} is not JSON: {error}. Write {form}.")


@functools.lru_cache(256)
def _choices(name: str, wanted: type[Struct]) -> str:
    """The words that a field takes, where it takes some words alone."""
    kind = next((field.type for field in msgspec.structs.fields(wanted) if field.encode_name == name), None)
    words = choices(kind)
    return f"Choose from {', '.join(words)}." if words else "Correct it."


@functools.lru_cache(256)
def _near(name: str, wanted: type[Struct]) -> str:
    near = difflib.get_close_matches(name, wanted.__struct_fields__, n=1, cutoff=0.5)
    return f" Did you mean `{near[0]}`?" if near else ""

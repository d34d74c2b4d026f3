"""What a row may not be, each in a sentence with the cure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuinfer.errors import BadPrompt
from gpuinfer.workloads.generate.asking import OF_CHATS, USUAL, Body, Drawing, Row, Texts, Wishes

URLS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}
MOST_SHOWN = 60  # characters of a name that is not known


class BadRow(BadPrompt):
    """A row that is not what a row can be."""


def one_of(
    prompt: Texts | None, tokens: list[int] | None, messages: list[Mapping[str, Any]] | None
) -> tuple[str | None, list[int] | None]:
    """The text or the tokens; neither for a chat. Raises `BadRow` unless it is exactly one of the three."""
    given = [one for one in (prompt, tokens, messages) if one is not None]
    if len(given) != 1:
        names = "prompt, prompt_token_ids and messages"
        raise BadRow(f"a row has one of {names}, and this one has {len(given) or 'none'}. Give one.")
    if messages is not None:
        _check_chat(messages)
        return None, None
    return _text_or_tokens(prompt) if prompt is not None else (None, tokens)


def _text_or_tokens(prompt: Texts) -> tuple[str | None, list[int] | None]:
    alone = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt  # a list of one prompt
    if isinstance(alone, str):
        return alone, None
    tokens = [one for one in (alone if isinstance(alone, list) else [alone]) if isinstance(one, int)]
    if len(tokens) == (len(alone) if isinstance(alone, list) else 1) and all(0 <= one < 1 << 31 for one in tokens):
        return None, tokens
    raise BadRow("`prompt` is neither one text nor one list of token ids. Give each prompt a row of its own.")


def _check_chat(messages: list[Mapping[str, Any]]) -> None:
    if not messages:
        raise BadRow("`messages` is empty. Give at least one message.")
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise BadRow(f'`messages[{number}]` has no role. Write {{"role": "user", "content": …}}.')


def field_of(row: Row) -> str:
    """Which field of a request's body holds the prompt. Raises `BadRow`."""
    if row.url not in URLS:
        raise BadRow(f"no requests of url {_short(row.url)} are answered. Choose from {', '.join(URLS)}.")
    if row.method not in (None, "POST"):
        raise BadRow(f"a request of method {_short(row.method)} asks nothing. Write POST.")
    if not row.body:
        raise BadRow("the request has no body. Give one.")
    return URLS[row.url]


def refuse_body(body: Body, field: str) -> None:
    """Raises `BadRow` for a request without its prompt, and for what is not to be had."""
    if getattr(body, field) is None:
        raise BadRow(f"the request's body has no `{field}`. Give it, or another url.")
    refuse_wishes(body)


def refuse_wishes(row: Wishes) -> None:
    """Raises `BadRow` for what would change the answer and is not to be had."""
    for name, usual in USUAL.items():
        if (wished := getattr(row, name)) and wished not in usual:
            raise _not_to_be_had(name)
    if row.best_of is not None and row.best_of != (row.n or 1):
        raise _not_to_be_had("best_of")


def of_chats(row: Drawing, is_chat: bool) -> bool:
    """Whether the row says how its chat is to be written. Raises `BadRow` when it is none."""
    given = [name for name in OF_CHATS if getattr(row, name)]
    given += ["add_generation_prompt"] if row.add_generation_prompt is False else []  # true is as it is anyway
    if given and not is_chat:
        raise BadRow(f"`{given[0]}` is said of a chat, and this row has a prompt. Give messages, or take it out.")
    return bool(given)


def _not_to_be_had(name: str) -> BadRow:
    return BadRow(f"`{name}` is not to be had here. Take it out.")


def _short(value: str | None) -> str:
    return "none" if value is None else f"'{value[:MOST_SHOWN]}'"

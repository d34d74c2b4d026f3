"""Chats whose last message the model is to go on with: what a template writes after that message is cut off.

How a template ends a message nobody knows but the template. So the message's text is given a mark at its end, and the
chat ends where the mark comes out, as transformers has it: where the template trims texts, the mark loses the space at
its end, and the text before it is trimmed too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpuinfer.errors import BadPrompt

MARK = "<<here the last message is to go on>> "
LOST = "the model's chat template does not write the last message as it is, so it cannot be gone on with"


def marked(chat: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The chat with a mark at the end of its last message. Raises `BadPrompt` for a message without a text."""
    last = chat[-1]
    content = last.get("content")
    if isinstance(content, str):
        return [*chat[:-1], {**last, "content": content + MARK}]
    parts = list(content or ())
    places = [place for place, part in enumerate(parts) if "text" in part]
    if not places:
        raise BadPrompt("the last message has no text to go on with. Give it one, or leave continue_final_message out.")
    part = parts[places[-1]]
    parts[places[-1]] = {**part, "text": part["text"] + MARK}
    return [*chat[:-1], {**last, "content": parts}]


def cut(text: str, chat: Sequence[Mapping[str, Any]]) -> str:
    """The text of a marked chat up to its mark. Raises `BadPrompt` where that has been lost."""
    place = text.rfind(MARK.rstrip())
    content = chat[-1]["content"]
    said = content if isinstance(content, str) else [part["text"] for part in content if "text" in part][-1]
    if place < 0 or said.strip() not in text:
        raise BadPrompt(f"{LOST}. Leave continue_final_message out.")
    return text[:place] if text.startswith(MARK, place) else text[:place].rstrip()

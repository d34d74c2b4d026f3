"""From a chat to the text that the model was trained to see.

Chats whose last message the model is to go on with: what a template writes after that message is cut off.

How a template ends a message nobody knows but the template. So the message's text is given a mark at its end, and the
chat ends where the mark comes out, as transformers has it: where the template trims texts, the mark loses the space at
its end, and the text before it is trimmed too.
"""

from __future__ import annotations

import difflib
import logging
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import Template, TemplateError, meta

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Rendering
from gpuinfer.text.language.files import TokenizerSettings
from gpuinfer.text.language.sandbox import Sandbox

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


MOST_MESSAGES = 10_000
SHOWN = 300  # characters of a template's own complaint
PROBE = "probe-of-a-list"
PLAIN = Rendering()

log = logging.getLogger(__name__)


class ChatTemplates:
    """A model's chat templates: one, or a second for chats with tools. Threads may share them."""

    def __init__(self, settings: TokenizerSettings) -> None:
        self._plain = ChatTemplate(settings.template or "", settings.named)
        own = settings.tool_template
        self._with_tools = self._plain if own is None else ChatTemplate(own, settings.named)

    def render(self, messages: Sequence[Mapping[str, Any]], rendering: Rendering) -> str:
        """The text that the chat begins the answer with. Raises `BadPrompt`."""
        return (self._with_tools if rendering.tools else self._plain).render(messages, rendering)


class ChatTemplate:
    """One chat template."""

    def __init__(self, source: str, named: Mapping[str, str]) -> None:
        self.source, self.named = source, named
        self._sandbox = Sandbox()
        self._reads_lists: bool | None = None
        self._unread: set[str] = set()  # what was given to the template and changed nothing
        self._lock = threading.Lock()

    def render(self, messages: Sequence[Mapping[str, Any]], rendering: Rendering = PLAIN) -> str:
        """Raises `BadPrompt`."""
        if rendering is not PLAIN:
            self._check(rendering)
        chat: Sequence[Mapping[str, Any]] = [self._checked(message) for message in checked_chat(messages)]
        text = self._rendered(marked(chat) if rendering.continue_final_message else chat, rendering)
        return cut(text, chat) if rendering.continue_final_message else text

    def _check(self, rendering: Rendering) -> None:
        """Raises `BadPrompt` for what cannot be, and for tools of which the model would never hear. Says once which
        variables the template does not read: transformers is silent about all of it.
        """
        if rendering.continue_final_message and rendering.add_generation_prompt:
            raise BadPrompt(
                "continue_final_message goes on with the last message and add_generation_prompt begins a new one. "
                "Ask for one of them."
            )
        if "messages" in rendering.variables:
            raise BadPrompt("chat_template_kwargs sets `messages`, which are the chat itself. Take it out.")
        reads = self._reads or {"tools"}  # a template that is none is told when it renders
        if rendering.tools and "tools" not in reads:
            raise BadPrompt(
                "the model's chat template does not read `tools`, so the model would not hear of them. Take them out, "
                "describe them in a message, or use a model that was trained with tools."
            )
        unread = {*rendering.variables} - self._reads
        for name in sorted(unread - self._unread):
            near = difflib.get_close_matches(name, self._reads, n=1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            log.warning("the model's chat template does not read `%s`, which changes nothing.%s", name, hint)
        self._unread |= unread

    @cached_property
    def _reads(self) -> frozenset[str]:
        try:
            return frozenset(meta.find_undeclared_variables(self._sandbox.parse(self.source)))
        except TemplateError:  # which rendering says
            return frozenset()

    def _rendered(self, chat: Sequence[Mapping[str, Any]], rendering: Rendering) -> str:
        try:
            return self._render(chat, rendering)
        except TemplateError as error:
            raise BadPrompt(f"the model's chat template refuses this chat: {_shortened(error)}") from None
        except (RecursionError, MemoryError) as error:
            raise BadPrompt(
                f"this chat is nested too deep or too large for its template: {_shortened(error)}"
            ) from None
        except Exception as error:  # noqa: BLE001 - a template is a program: it may raise anything
            raise BadPrompt(
                f"the model's chat template fails on this chat: {type(error).__name__}: {_shortened(error)}"
            ) from None

    def _render(self, chat: Sequence[Mapping[str, Any]], rendering: Rendering = PLAIN) -> str:
        variables = {
            **self.named,
            "messages": chat,
            "tools": list(rendering.tools) if rendering.tools else None,
            "documents": None,
            "add_generation_prompt": rendering.add_generation_prompt,
            **rendering.variables,
        }
        return self._sandbox.write(self._template, variables)

    @cached_property
    def _template(self) -> Template:
        return self._sandbox.from_string(self.source)

    def _checked(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Parts of a content stay parts for a template that knows them; for others they become one text."""
        content = message.get("content")
        if content is None or isinstance(content, str):
            return dict(message)
        texts = text_parts(content)
        if self._knows_lists():
            return dict(message)
        return {**message, "content": "\n".join(texts)}

    def _knows_lists(self) -> bool:
        """Tried out: a template that takes any content for a text prints a list as Python writes it, or fails."""
        with self._lock:
            if self._reads_lists is None:
                self._reads_lists = self._tried()
            return self._reads_lists

    def _tried(self) -> bool:
        parts = [{"type": "text", "text": PROBE}]
        try:
            text = self._render([{"role": "user", "content": parts}])
        except Exception:  # noqa: BLE001 - any failure says that it does not know lists
            return False
        return PROBE in text and f"'{PROBE}'" not in text and f'"{PROBE}"' not in text


def checked_chat(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Raises `BadPrompt` unless these are messages with roles."""
    if not messages:
        raise BadPrompt("a chat needs at least one message. Give one, such as {role: user, content: …}.")
    if len(messages) > MOST_MESSAGES:
        raise BadPrompt(f"a chat of {len(messages)} messages. Give at most {MOST_MESSAGES}.")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadPrompt(f"message {number} of the chat has no role. Give it one: system, user or assistant.")
    return messages


def text_parts(content: Any) -> list[str]:
    """The texts of a content given in parts. Raises `BadPrompt` for parts of another kind."""
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise BadPrompt(f"a message's content is a {type(content).__name__}. Give a text, or a list of text parts.")
    return [_text_of(part) for part in content]


def _text_of(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text":
        raise BadPrompt(f"a message holds a part of type '{kind}', and this model reads text alone. Leave it out.")
    if not isinstance(text, str):
        raise BadPrompt('a text part of a message has no text. Write it as {"type": "text", "text": "…"}.')
    return text


def _shortened(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"

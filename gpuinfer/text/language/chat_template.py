"""From a chat to the prompt in the form that the model was trained on.

Templates come with the model and run in Jinja's immutable sandbox, with the functions that Hugging Face templates
expect and limits on turns, time and size.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, wraps
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.filters import do_format
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Rendering
from gpuinfer.text.language.tokenizer import TokenizerSettings

LONGEST = 16 * 2**20  # characters of one value, and of a rendered chat
MOST_TURNS = 1_000_000  # of all loops and macros together
MOST_SECONDS = 20.0  # of one rendering: turns may be costly
LARGEST_WIDTH = 1_000_000
WIDENING = ("batch", "center", "indent", "slice")  # filters that pad
_WIDE = re.compile(r"%[^a-zA-Z%]*(\*|[0-9]{6})|\{[^}]*[0-9]{6}")  # a width in a format that would fill memory


class TemplateLimit(TemplateError):
    """The template has reached a limit."""


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training. Here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 - as the library declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Metered(NodeTransformer):
    """Counts turns of loops and calls of macros, and measures the results of `~`, which no other hook sees."""

    def counted(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("turn", [], node.lineno), lineno=node.lineno))
        return node  # type: ignore[no-any-return]

    visit_For = visit_Macro = visit_CallBlock = counted

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes, node.lineno)


def _call(method: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    function = nodes.EnvironmentAttribute(method, lineno=line)
    return nodes.Call(function, arguments, [], None, None, lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits. Threads share it; each has its own count of turns."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"])
        self.filters["tojson"] = tojson
        self.filters.update({name: _guarded(self.filters[name]) for name in WIDENING})

        def formatted(text: Any, *values: Any, **named: Any) -> str:
            _check_format(text)
            _check_widths((*values, *named.values()))
            return str(do_format(text, *values, **named))

        self.filters["format"] = formatted
        self.globals.pop("lipsum", None)
        self.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
        self._meter = threading.local()

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Metered().visit(super()._parse(source, name, filename))
        return tree

    def write(self, template: Template, variables: Mapping[str, Any]) -> str:
        """Render a template of this sandbox. Raises `jinja2.TemplateError`, and errors of the template itself."""
        self._meter.turns, self._meter.end = 0, time.monotonic() + MOST_SECONDS
        parts, length = [], 0
        for part in template.generate(variables):
            length += len(part)
            self._fits(length)
            parts.append(part)
        return "".join(parts)

    def turn(self) -> None:
        self._meter.turns += 1
        if self._meter.turns > MOST_TURNS or time.monotonic() > self._meter.end:
            raise TemplateLimit(f"it has not come to an end after {self._meter.turns} turns of its loops")

    def joined(self, *values: Any) -> str:
        texts = [str(value) for value in values]
        self._fits(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._fits(_size_of(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, *arguments: Any, **named: Any) -> Any:  # type: ignore[override]
        if isinstance(getattr(obj, "__self__", None), str):
            _check_widths((*arguments, *named.values()))
        return super().call(context, obj, *arguments, **named)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def _fits(self, size: float) -> None:
        if size > LONGEST:
            raise TemplateLimit(f"it makes a text of more than {LONGEST} characters")


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter without wide padding. Jinja's marks on the function are kept."""

    @wraps(function)
    def guarded(*arguments: Any, **named: Any) -> Any:
        _check_widths((*arguments, *named.values()))
        return function(*arguments, **named)

    return guarded


def _check_widths(values: Sequence[Any]) -> None:
    """Raises `TemplateLimit` for a number that could pad a text without end."""
    for value in values:
        if isinstance(value, int) and abs(value) > LARGEST_WIDTH:
            raise TemplateLimit(f"it widens a text to {value:.3g} characters")


def _check_format(text: Any) -> None:
    if isinstance(text, str) and _WIDE.search(text):
        raise TemplateLimit("it widens a text by its format")


def _size_of(operator: str, left: Any, right: Any) -> float:
    """The largest size of a result: characters, items, or too many for a number of over 4096 bits."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * (max(right, 0) if operator == "**" else 1) + right.bit_length()
        return LONGEST + 1 if bits > 4096 else 0
    if operator == "%":
        _check_format(left)
        return 0
    sizes = [len(value) if hasattr(value, "__len__") else 0 for value in (left, right)]
    if operator == "*":
        times = next((value for value in (left, right) if isinstance(value, int)), 1)
        return sum(sizes) * max(times, 0)
    return sum(sizes)


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


MARK = "<<here the last message is to go on>> "


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

    @property
    def source(self) -> str:
        own = self._with_tools
        return self._plain.source if own is self._plain else f"{self._plain.source}\n{own.source}"

    @property
    def reads_tools(self) -> bool:
        return "tools" in self._with_tools.reads

    def render(self, messages: Sequence[Mapping[str, Any]], rendering: Rendering) -> str:
        """The chat as a prompt. Raises `BadPrompt`."""
        return (self._with_tools if rendering.tools else self._plain).render(messages, rendering)


class ChatTemplate:
    def __init__(self, source: str, named: Mapping[str, str]) -> None:
        self.source, self.named = source, named
        self._sandbox = Sandbox()
        self._reads_lists: bool | None = None
        self._unread: set[str] = set()  # variables that the template does not read, once warned of
        self._lock = threading.Lock()

    def render(self, messages: Sequence[Mapping[str, Any]], rendering: Rendering = PLAIN) -> str:
        """Raises `BadPrompt`."""
        if rendering is not PLAIN:
            self._check(rendering)
        if not messages:
            raise BadPrompt("a chat needs at least one message. Give one, such as {role: user, content: …}.")
        if len(messages) > MOST_MESSAGES:
            raise BadPrompt(f"a chat of {len(messages)} messages. Give at most {MOST_MESSAGES}.")
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise BadPrompt(f"message {number} of the chat has no role. Give it one: system, user or assistant.")
        chat = [self._plain(message) for message in messages]
        if rendering.continue_final_message:
            return self._continued(chat, rendering)
        return self._written(chat, rendering)

    def _continued(self, chat: list[dict[str, Any]], rendering: Rendering) -> str:
        """The chat up to where its last message ends, which a mark shows."""
        content = chat[-1].get("content")
        parts = [{"text": content}] if isinstance(content, str) else list(content or ())
        places = [place for place, part in enumerate(parts) if "text" in part]
        if not places:
            raise BadPrompt(
                "the last message has no text to go on with. Give it one, or leave continue_final_message out."
            )
        last = parts[places[-1]]["text"]
        parts[places[-1]] = {**parts[places[-1]], "text": last + MARK}
        marked = {**chat[-1], "content": last + MARK if isinstance(content, str) else parts}
        text = self._written([*chat[:-1], marked], rendering)
        place = text.rfind(MARK.rstrip())
        if place < 0 or last.strip() not in text:
            raise BadPrompt(
                "the model's chat template does not write the last message as it is, so it cannot be gone on with. "
                "Leave continue_final_message out."
            )
        return text[:place] if text.startswith(MARK, place) else text[:place].rstrip()

    def _written(self, chat: Sequence[Mapping[str, Any]], rendering: Rendering) -> str:
        why: Exception
        try:
            return self._render(chat, rendering)
        except TemplateError as error:
            what, why = "the model's chat template refuses this chat", error
        except (RecursionError, MemoryError) as error:
            what, why = "this chat is nested too deep or too large for its template", error
        except Exception as error:  # noqa: BLE001 - a template is a program: it may raise anything
            what, why = f"the model's chat template fails on this chat: {type(error).__name__}", error
        text = " ".join(str(why).split())
        raise BadPrompt(f"{what}: {text if len(text) <= SHOWN else text[: SHOWN - 1] + '…'}")

    def _check(self, rendering: Rendering) -> None:
        """Raises `BadPrompt` for contradictions, and for tools if the template does not read them. Warns once of other
        variables that the template does not read. transformers ignores all of these.
        """
        if rendering.continue_final_message and rendering.add_generation_prompt:
            raise BadPrompt(
                "continue_final_message goes on with the last message and add_generation_prompt begins a new one. "
                "Ask for one of them."
            )
        if "messages" in rendering.variables:
            raise BadPrompt("chat_template_kwargs sets `messages`, which are the chat itself. Take it out.")
        reads = self.reads or {"tools"}  # a damaged template is an error when it renders
        if rendering.tools and "tools" not in reads:
            raise BadPrompt(
                "the model's chat template does not read `tools`, so the model would not hear of them. Take them out, "
                "or use a model that was trained with tools; a server with --tool-format hermes describes them in a "
                "message."
            )
        unread = {*rendering.variables} - self.reads
        for name in sorted(unread - self._unread):
            near = difflib.get_close_matches(name, self.reads, n=1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            log.warning("the model's chat template does not read `%s`, which changes nothing.%s", name, hint)
        self._unread |= unread

    @cached_property
    def reads(self) -> frozenset[str]:
        """The variables that the template reads; none of a damaged one."""
        try:
            return frozenset(meta.find_undeclared_variables(self._sandbox.parse(self.source)))
        except TemplateError:  # rendering reports the error
            return frozenset()

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

    def _plain(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A content of parts stays a list for a template that reads lists; for others it becomes one text."""
        content = message.get("content")
        if content is None or isinstance(content, str):
            return dict(message)
        if not isinstance(content, Sequence) or isinstance(content, bytes):
            raise BadPrompt(f"a message's content is a {type(content).__name__}. Give a text, or a list of text parts.")
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text":
                raise BadPrompt(
                    f"a message holds a part of type '{kind}', and this model reads text alone. Leave it out."
                )
            if not isinstance(part.get("text"), str):
                raise BadPrompt('a text part of a message has no text. Write it as {"type": "text", "text": "…"}.')
        with self._lock:
            if self._reads_lists is None:  # a template that expects texts prints a list in Python's form, or fails
                try:
                    text = self._render([{"role": "user", "content": [{"type": "text", "text": PROBE}]}])
                    self._reads_lists = PROBE in text and f"'{PROBE}'" not in text and f'"{PROBE}"' not in text
                except Exception:  # noqa: BLE001 - any failure means that the template does not read lists
                    self._reads_lists = False
        if self._reads_lists:
            return dict(message)
        return {**message, "content": "\n".join(part["text"] for part in content)}

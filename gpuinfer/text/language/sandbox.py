"""Where chat templates run: Jinja's immutable sandbox, with the functions that the templates of Hugging Face folders
expect, and an end to everything.

A template comes with the model and is trusted as far as its weights are; no client passes one. The limits are there so
that a template which runs away with somebody's messages fails that prompt and no more.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.filters import do_format
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

LONGEST = 16 * 2**20  # characters of one value, and of a rendered chat
MOST_TURNS = 1_000_000  # of all loops and macros together
MOST_SECONDS = 20.0  # of one rendering: turns may be costly
LARGEST_WIDTH = 1_000_000
WIDENING = ("batch", "center", "indent", "slice")  # filters that fill up
_WIDE = re.compile(r"%[^a-zA-Z%]*(\*|[0-9]{6})|\{[^}]*[0-9]{6}")  # a width in a format that would fill memory


class TooMuch(TemplateError):
    """The template has reached a limit."""


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training. Here it is a scope and nothing else."""

    tags = {"generation"}  # noqa: RUF012 - as the library declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Metered(NodeTransformer):
    """Counts each turn of a loop and each call of a macro, and measures what `~` joins: that no other hook sees."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._counted(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._counted(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._counted(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes, node.lineno)

    def _counted(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("turn", [], node.lineno), lineno=node.lineno))
        return node  # type: ignore[no-any-return]


def _call(method: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    function = nodes.EnvironmentAttribute(method, lineno=line)
    return nodes.Call(function, arguments, [], None, None, lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    """One for all threads: each counts its own turns."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"])
        self.filters["tojson"] = tojson
        self.filters.update({name: _guarded(self.filters[name]) for name in WIDENING})
        self.filters["format"] = _formatted
        self.globals.pop("lipsum", None)
        self.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
        self._meter = threading.local()

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Metered().visit(super()._parse(source, name, filename))
        return tree

    def write(self, template: Template, variables: Mapping[str, Any]) -> str:
        """Render a template of this sandbox. Raises `jinja2.TemplateError`, and whatever the template provokes."""
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
            raise TooMuch(f"it has not come to an end after {self._meter.turns} turns of its loops")

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
            raise TooMuch(f"it makes a text of more than {LONGEST} characters")


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that makes nothing wide. What Jinja notes on the function is kept."""

    @wraps(function)
    def guarded(*arguments: Any, **named: Any) -> Any:
        _check_widths((*arguments, *named.values()))
        return function(*arguments, **named)

    return guarded


def _check_widths(values: Sequence[Any]) -> None:
    """Numbers by which a text could be filled up."""
    for value in values:
        if isinstance(value, int) and abs(value) > LARGEST_WIDTH:
            raise TooMuch(f"it widens a text to {value:.3g} characters")


def _check_format(text: Any) -> None:
    if isinstance(text, str) and _WIDE.search(text):
        raise TooMuch("it widens a text by its format")


def _size_of(operator: str, left: Any, right: Any) -> float:
    """How large a result may become: characters, items, or bits of a number (of which few are allowed)."""
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


def _formatted(text: Any, *values: Any, **named: Any) -> str:
    """The filter `format`, without room to fill."""
    _check_format(text)
    _check_widths((*values, *named.values()))
    return str(do_format(text, *values, **named))


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike Jinja's own it does not write HTML's characters as escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

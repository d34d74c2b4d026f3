"""Markdown on a terminal: what `gpuinfer docs` shows, as text that a pager takes."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markdown import Heading, Markdown
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

ACCENT, FAINT = "bold cyan", "dim"
STYLES = {"markdown.code": "cyan", "markdown.table.header": "dim", "markdown.table.border": "dim"}
INDENT = "  "
WIDEST = 100  # columns: a longer line is hard to read
PICTURE = re.compile(r"!\[([^\]]*)\]\([^)]*\)")
LINK = re.compile(r"\[([^\]]*)\]\((?:[^):]*/)?([^/):#]*?)(?:\.md)?(#[^)]*)?\)")


class LeftHeading(Heading):
    """Where the eye looks for it: rich centres them."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        self.text.stylize(ACCENT if self.tag in ("h1", "h2") else "bold")
        yield Text()
        yield self.text


class OnTerminal(Markdown):
    """Markdown as a terminal has it."""

    elements = {**Markdown.elements, "heading_open": LeftHeading}  # noqa: RUF012 (as rich has it)


def markdown(text: str) -> RenderableType:
    """Links name what `gpuinfer docs` takes, pictures what they show."""
    named = LINK.sub(_linked, PICTURE.sub(r"(picture: \1)", text))
    return OnTerminal(named, hyperlinks=False, code_theme="ansi_dark")


def _linked(link: re.Match[str]) -> str:
    words, page, anchor = link[1], link[2], link[3] or ""
    address = f"{page}{anchor}"
    return words if not page or words in (page, f"{page}.md") else f"{words} (`{address}`)"


def shown_passage(title: str, address: str, text: str) -> RenderableType:
    """One section below its headings, with what to type to see it again."""
    head = Table.grid(expand=True, padding=(0, 2))
    head.add_column(ratio=1)
    head.add_column(justify="right", style=FAINT, no_wrap=True)
    head.add_row(Text(title, style=ACCENT), f"gpuinfer docs {address}")
    return Group(head, Padding(markdown(text), (1, 0, 1, 0)))


def address_list(title: str, rows: Sequence[Sequence[str]]) -> RenderableType:
    """Addresses and what is there, a line each."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, min_width=max((len(row[0]) + len(INDENT) for row in rows), default=0))
    table.add_column(style=FAINT, overflow="ellipsis", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(f"{INDENT}{cell}" if not index else cell) for index, cell in enumerate(row)))
    return Group(Text(title, style=ACCENT), table, "")


def draw_text(parts: Sequence[RenderableType], *, columns: int, colour: bool) -> str:
    """All of it as text of so many columns; with colour as a terminal's sequences."""
    width = min(columns, WIDEST)
    console = Console(file=io.StringIO(), width=width, force_terminal=colour, legacy_windows=False, theme=Theme(STYLES))
    console.print(*parts, sep="\n")
    assert isinstance(console.file, io.StringIO)
    text = "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()).strip("\n")
    return re.sub(r"\n{3,}", "\n\n", text) + "\n"

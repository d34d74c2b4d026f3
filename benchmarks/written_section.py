"""A part of a page that a benchmark writes: what is between two comments that name it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def written(page: Path, name: str) -> str:
    """What the page has between the comments. Raises `ValueError` where they are not there."""
    begin, end = marks(name)
    text = page.read_text()
    return text[text.index(begin) + len(begin) : text.index(end)].strip("\n")


def write(page: Path, name: str, lines: Iterable[str]) -> None:
    """Put these lines in the place of what is between the comments."""
    begin, end = marks(name)
    text = page.read_text()
    before, after = text[: text.index(begin) + len(begin)], text[text.index(end) :]
    page.write_text("\n".join([before, *lines, after]))


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    heads = list(columns)
    return [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *(f"| {' | '.join(row)} |" for row in rows)]

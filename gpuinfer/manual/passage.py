"""What of a section is shown to who asked for some words: all of it, or of a long one the parts that have them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from gpuinfer.manual.pages import FENCE, Section
from gpuinfer.manual.search import stems

WHOLE = 30  # lines of a section that is shown whole
GAP = "…"
RULE = re.compile(r"[\s|:-]+")  # the line below a table's head


def passage(section: Section, words: frozenset[str]) -> str:
    """Markdown. Of a long section the paragraphs, items and rows of tables that hold one of the words, as `stems` has
    them: those with the most of the words where there are too many.
    """
    if section.text.count("\n") < WHOLE:
        return section.text
    blocks = list(_blocks(section.text))
    held = [len(words.intersection(stems("\n".join(block)))) for block in blocks]
    least = next((least for least in range(1, max(held) + 1) if _lines(blocks, held, least) <= WHOLE), max(held))
    shown: list[str] = []
    for index, block in enumerate(blocks):
        if max(held) == 0 and index == 0:  # its name alone has them: how it begins
            shown.append("\n".join(block))
        elif held[index] and (held[index] >= least or _is_table(block)):
            shown.append("\n".join(_rows(block, words, least) if _is_table(block) else block))
        elif not shown or shown[-1] != GAP:
            shown.append(GAP)
    return "\n\n".join(shown).strip(f"\n{GAP}")


def _lines(blocks: list[list[str]], held: list[int], least: int) -> int:
    return sum(len(block) for block, count in zip(blocks, held, strict=True) if count >= least and not _is_table(block))


def _blocks(text: str) -> Iterator[list[str]]:
    """Paragraphs, items of lists, tables, code: the lines of each."""
    block: list[str] = []
    fenced = False
    for line in text.splitlines():
        starts = not fenced and (not line.strip() or line.startswith("- ") or bool(FENCE.match(line)))
        if starts and block:
            yield block
            block = []
        if FENCE.match(line):
            fenced = not fenced
        if line.strip() or fenced:
            block.append(line)
    if block:
        yield block


def _is_table(block: list[str]) -> bool:
    return len(block) > 2 and block[0].lstrip().startswith("|") and RULE.fullmatch(block[1]) is not None


def _rows(table: list[str], words: frozenset[str], least: int) -> Iterable[str]:
    """Its head, and the rows that hold as many of the words as any does, up to `least`."""
    held = [len(words.intersection(stems(row))) for row in table[2:]]
    enough = max(1, min(least, max(held)))
    return [*table[:2], *(row for row, count in zip(table[2:], held, strict=True) if count >= enough)]

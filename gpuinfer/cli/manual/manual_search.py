"""Which sections answer a few words best, by SQLite's full-text search (FTS5: BM25 and Porter's stems), where a word
counts more in a name, a heading or the first column of a table, and what of a section is shown for it.
"""

from __future__ import annotations

import difflib
import re
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuinfer.cli.manual.manual_pages import FENCE, ManualPage, ManualSection

WORD = re.compile(r"(?<![\w-])--?[a-z][\w-]*|[^\W_]+(?:[-_.][^\W_]+)*")
CODE = re.compile(r"`([^`\n]+)`")
FIRST_CELL = re.compile(r"^\|([^|]*)\|", re.M)  # of a row: what the row is about
WEIGHTS = {"name": 3, "heading": 3, "above": 1, "about": 0.6, "code": 0.2, "text": 0.1}  # of a word in a column
RANKS = {
    "architecture": 0.5,
    "decisions/": 0.5,
    "benchmarks": 0.5,
    "reference/": 0.5,
    "tutorials/": 0.8,
    "questions": 1.3,
}  # pages for people who know the guides count less; the page for newcomers counts more
FLAG_RANKS = {"reference/": 2.0}  # the reference describes each flag
COMMAND_RANK = 1.3  # of the section of a command whose name is the query
NEAR, NEARER = 0.7, 0.8  # likeness of words: to be offered, to be searched instead
OFFERED = 5
LETTERS = 3  # of a word that is taken for the beginning of another
SPELLED = 5  # letters of a word that is taken for a misspelling: shorter ones are near to many
SYNONYMS = {"accelerator": "device", "gpu": "device", "license": "licence", "multiple": "several"}
"""What people search for → what the pages call it: both words are searched."""
SMALL = {"a", "an", "and", "are", "can", "do", "does", "for", "from", "how", "i", "in", "is", "it", "my", "of", "on"}
SMALL |= {"or", "the", "to", "what", "when", "where", "which", "with"}


@dataclass(frozen=True, slots=True)
class FoundSection:
    """The sections that hold the words, best first, and how the words were read."""

    sections: Sequence[ManualSection]
    words: Collection[str]  # the words that were searched in the end
    instead: Mapping[str, str]  # a word that no page has → the word that was searched in its place
    unknown: Mapping[str, Sequence[str]]  # a word that no page has → words that are a little like it


def search(pages: Iterable[ManualPage], query: str) -> FoundSection:
    """The sections that answer the query, best first; each holds at least one of its words. A section with all words
    comes before one that has some of them often.
    """
    sections = [section for page in pages for section in page.sections]
    index = _index(WEIGHTS, map(_columns, sections))
    spelled: set[str] = set()  # filled when a word is met that no page has
    instead: dict[str, str] = {}
    unknown: dict[str, Sequence[str]] = {}
    having: dict[str, dict[int, float]] = {}
    words = list(dict.fromkeys(WORD.findall(query.lower())))
    for word in [word for word in words if word not in SMALL] or words:
        found = _scores(index, word)
        if also := SYNONYMS.get(word):
            for number, score in _scores(index, also).items():
                found[number] = found.get(number, 0.0) + score
        if not found:
            spelled = spelled or {one for section in sections for one in _spellings(section)}
            begun = [known for known in spelled if len(word) >= LETTERS and known.startswith(word)]
            alike = sorted(begun, key=lambda known: (len(known), known)) or _like(word, spelled, NEARER)
            if near := next(iter(alike), ""):
                instead[word] = near
                found = _scores(index, near)
            else:
                unknown[word] = _like(word, spelled, NEAR)
        if found:
            having[instead.get(word, word)] = found
    index.close()
    ranks = FLAG_RANKS if any(word.startswith("-") for word in having) else RANKS
    command = f"gpuinfer {' '.join(words)}"
    totals: dict[int, float] = {}
    for number in {number for found in having.values() for number in found}:
        scores = [found[number] for found in having.values() if number in found]
        page = sections[number].page
        rank = next((rank for beginning, rank in ranks.items() if page.startswith(beginning)), 1.0)
        if sections[number].headings[-1] == command:
            rank = COMMAND_RANK
        totals[number] = sum(scores) * (len(scores) / len(having)) ** 3 * rank
    best = sorted(totals, key=lambda number: (-totals[number], number))
    return FoundSection([sections[number] for number in best], tuple(having), instead, unknown)


def _index(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> sqlite3.Connection:
    """A full-text table in memory, its rows numbered from 0."""
    names = list(columns)
    database = sqlite3.connect(":memory:")
    database.execute(f"CREATE VIRTUAL TABLE found USING fts5({', '.join(names)}, tokenize = 'porter unicode61')")
    marks = ", ".join("?" * len(names))
    database.executemany(
        f"INSERT INTO found(rowid, {', '.join(names)}) VALUES (?, {marks})",
        ((number, *row) for number, row in enumerate(rows)),
    )
    return database


def _columns(section: ManualSection) -> tuple[str, ...]:
    """The section's texts in the order of `WEIGHTS`."""
    about, code = " ".join(FIRST_CELL.findall(section.text)), " ".join(CODE.findall(section.text))
    return section.page, section.headings[-1], " ".join(section.headings[:-1]), about, code, section.text


def _scores(index: sqlite3.Connection, word: str) -> dict[int, float]:
    """Row → score, of the rows that hold the word; a word of several parts, as `max-new-tokens`, is a phrase, and a
    flag must stand there with its dashes.
    """
    weights = ", ".join(map(str, WEIGHTS.values()))
    query = f"SELECT rowid, -bm25(found, {weights}) FROM found WHERE found MATCH ? AND instr(lower(heading || text), ?)"
    return dict(index.execute(query, (f'"{word}"', word if word.startswith("-") else "")))


def _spellings(section: ManualSection) -> Iterator[str]:
    text = " ".join(_columns(section)).lower().replace("_", "-")
    for word in WORD.findall(text):
        yield from (word, *re.split(r"[-_.]", word.strip("-")))


def _like(word: str, spelled: Collection[str], likeness: float) -> Sequence[str]:
    start = re.match("-*.", word)  # a flag is like flags, and a misspelled word mostly has its first letter right
    if start is None or len(word.strip("-")) < SPELLED:
        return ()
    among = sorted(known for known in spelled if known.startswith(start[0]) and known not in SMALL)
    return difflib.get_close_matches(word, among, n=OFFERED, cutoff=likeness)


WHOLE = 30  # lines of a section that is shown whole
GAP = "…"
RULE = re.compile(r"[\s|:-]+")  # the line below a table's head


def passage(section: ManualSection, words: Collection[str]) -> str:
    """Markdown. Of a long section the paragraphs, items and rows of tables that hold one of the words, as
    `FoundSection.words` has them: those with the most of the words where there are too many.
    """
    if section.text.count("\n") < WHOLE:
        return section.text
    blocks = list(_blocks(section.text))
    held = _held(["\n".join(block) for block in blocks], words)
    lines = [0 if _is_table(block) else len(block) for block in blocks]
    least = next(
        (
            least
            for least in range(1, max(held) + 1)
            if sum(count for count, many in zip(lines, held, strict=True) if many >= least) <= WHOLE
        ),
        max(held),
    )
    shown: list[str] = []
    for index, block in enumerate(blocks):
        if max(held) == 0 and index == 0:  # its name alone has them: how it begins
            shown.append("\n".join(block))
        elif held[index] and (held[index] >= least or _is_table(block)):
            shown.append("\n".join(_rows(block, words, least) if _is_table(block) else block))
        elif not shown or shown[-1] != GAP:
            shown.append(GAP)
    return "\n\n".join(shown).strip(f"\n{GAP}")


def _held(texts: Sequence[str], words: Collection[str]) -> list[int]:
    """How many of the words each text holds."""
    index = _index(["text"], ([text] for text in texts))
    counts = [0] * len(texts)
    for word in words:
        for (number,) in index.execute("SELECT rowid FROM found WHERE found MATCH ?", (f'"{word}"',)):
            counts[number] += 1
    index.close()
    return counts


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


def _rows(table: list[str], words: Collection[str], least: int) -> Iterable[str]:
    """Its head, and the rows that hold as many of the words as any does, up to `least`."""
    held = _held(table[2:], words)
    enough = max(1, min(least, max(held)))
    return [*table[:2], *(row for row, count in zip(table[2:], held, strict=True) if count >= enough)]

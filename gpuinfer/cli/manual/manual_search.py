"""Which sections answer a few words best, by BM25 (Robertson, Walker and Beaulieu 1999), where a word counts more in a
name, a heading or the first column of a table, and what of a section is shown for it.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from gpuinfer.cli.manual.manual_pages import FENCE, ManualPage, ManualSection

WORD = re.compile(r"(?<![\w-])--?[a-z][\w-]*|[^\W_]+(?:[-_.][^\W_]+)*")
CODE = re.compile(r"`([^`\n]+)`")
FIRST_CELL = re.compile(r"^\|([^|]*)\|", re.M)  # of a row: what the row is about
NAME, HEADING, ABOUT, IN_CODE, IN_TEXT = 8.0, 8.0, 3.0, 1.0, 1.0  # what a word counts where it stands
SATURATION, LENGTH = 6.0, 0.4  # k1 and b of BM25
WORDS = {
    "architecture": 0.5,
    "decisions/": 0.5,
    "benchmarks": 0.5,
    "reference/": 0.5,
    "tutorials/": 0.8,
    "questions": 1.3,
}  # pages for those who know the guides; the one for those who do not
FLAGS = {"reference/": 2.0}  # where each is told
NEAR, NEARER = 0.7, 0.8  # likeness of words: to be offered, to be taken
OFFERED = 5
LETTERS = 3  # of a word that is taken for the beginning of another
SPELLED = 5  # letters of a word that is taken for a misspelling: shorter ones are near to many
MEANT = {"accelerator": "device", "gpu": "device", "license": "licence", "multiple": "several"}
"""What people ask by → what the pages call it: a section that has either word has it."""
SMALL = {"a", "an", "and", "are", "can", "do", "does", "for", "from", "how", "i", "in", "is", "it", "my", "of", "on"}
SMALL |= {"or", "the", "to", "what", "when", "where", "which", "with"}
ENDINGS = ("ings", "ing", "ed", "es", "s", "e")


@dataclass(frozen=True, slots=True)
class FoundSection:
    """The sections that hold the words, best first, and what was made of the words."""

    sections: Sequence[ManualSection]
    words: frozenset[str]  # as `stems` has them, that were looked for in the end
    instead: Mapping[str, str]  # a word that stands nowhere → the one that was looked for in its place
    unknown: Mapping[str, Sequence[str]]  # a word that is like none → those that are a little like it


def search(pages: Iterable[ManualPage], query: str) -> FoundSection:
    """The sections that answer the query, best first; at least one of its words stands in each."""
    sections = [section for page in pages for section in page.sections]
    told = [f"{one.page} {' '.join(one.headings)} {one.text}".lower().replace("_", "-") for one in sections]
    spelled: dict[str, str] = {}  # made when a word is met that nobody says
    instead: dict[str, str] = {}
    unknown: dict[str, Sequence[str]] = {}
    having: dict[str, dict[int, float]] = {}
    for word in _asked(query):
        found = _where(stem_of(word), sections, told)
        if also := MEANT.get(stem_of(word)):
            for index, much in _where(stem_of(also), sections, told).items():
                found[index] = found.get(index, 0.0) + much
        if not found:
            spelled = spelled or _spelled(told)
            if near := _taken_for(word, spelled):
                instead[word] = near
                found = _where(stem_of(near), sections, told)
            else:
                unknown[word] = _like(word, spelled, NEAR)
        if found:
            having[stem_of(instead.get(word, word))] = found
    scores = _scores(having, [len(text) for text in told])
    ranks = FLAGS if any(word.startswith("-") for word in having) else WORDS
    best = sorted(scores, key=lambda index: -scores[index] * _rank(sections[index].page, ranks))
    return FoundSection([sections[index] for index in best], frozenset(having), instead, unknown)


def stems(text: str) -> list[str]:
    """The words of a text in the form in which they are compared. `max-new-tokens` is itself and its three words."""
    return [stem for word in WORD.findall(text.lower()) for stem in _forms(word)]


@cache
def _forms(word: str) -> tuple[str, ...]:
    parts = re.split(r"[-_.]", word.strip("-"))
    whole = (stem_of(word), stem_of(word.lstrip("-"))) if word.startswith("-") else (stem_of(word),)
    return (*whole, *map(stem_of, parts)) if len(parts) > 1 else whole


@cache
def stem_of(word: str) -> str:
    """Without the ending that tells batch, batches, batched and batching apart. A flag is left as it is."""
    word = word.replace("_", "-")
    if word.startswith("-"):
        return word
    if word.endswith("ies") and len(word) > LETTERS + 1:
        word = f"{word[:-3]}y"
    for ending in ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= LETTERS and not word.endswith("ss"):
            word = word[: -len(ending)]
            break
    return word[:-1] if len(word) > LETTERS and word[-1] == word[-2] and word[-1] not in "aeiousl" else word


def _asked(query: str) -> list[str]:
    """The query's words, without those that stand everywhere where there are others."""
    words = list(dict.fromkeys(WORD.findall(query.lower())))
    return [word for word in words if word not in SMALL] or words


def _rank(page: str, ranks: Mapping[str, float]) -> float:
    return next((rank for beginning, rank in ranks.items() if page.startswith(beginning)), 1.0)


def _where(stem: str, sections: Sequence[ManualSection], told: Sequence[str]) -> dict[int, float]:
    """The sections in which the word stands, by number, and how much of it there is in each, by where it stands."""
    found = {index: _weight(stem, sections[index]) for index, text in enumerate(told) if stem in text}
    return {index: weight for index, weight in found.items() if weight}


def _weight(stem: str, section: ManualSection) -> float:
    places = [
        (NAME, section.page),
        (HEADING, section.headings[-1]),
        (HEADING / 2, " ".join(section.headings[:-1])),
        (ABOUT, " ".join(FIRST_CELL.findall(section.text))),
        (IN_CODE, " ".join(CODE.findall(section.text))),
        (IN_TEXT, section.text),
    ]
    return sum(weight * stems(text).count(stem) for weight, text in places)


def _scores(having: Mapping[str, Mapping[int, float]], lengths: Sequence[int]) -> dict[int, float]:
    """A score for each section; one that has all words comes before one that has some of them often."""
    usual = sum(lengths) / max(1, len(lengths))
    scores: dict[int, float] = {}
    met: dict[int, int] = {}
    for found in having.values():
        rarity = math.log(1 + (len(lengths) - len(found) + 0.5) / (len(found) + 0.5))
        for index, much in found.items():
            score = rarity * much / (much + SATURATION * (1 - LENGTH + LENGTH * lengths[index] / usual))
            scores[index] = scores.get(index, 0.0) + score
            met[index] = met.get(index, 0) + 1
    return {index: score * (met[index] / len(having)) ** 2 for index, score in scores.items()}


def _spelled(told: Iterable[str]) -> dict[str, str]:
    """Every word of the pages by its stem: the shortest spelling of it."""
    found: dict[str, str] = {}
    for word in {word for text in told for word in WORD.findall(text)}:
        for part in (word, *re.split(r"[-_.]", word.strip("-"))):
            stem = stem_of(part)
            if stem and (stem not in found or len(part) < len(found[stem])):
                found[stem] = part
    return found


def _taken_for(word: str, spelled: Mapping[str, str]) -> str:
    """The word that was meant, "" when none is near enough: one that begins so, or one that is spelled almost so."""
    begun = [known for known in spelled.values() if len(word) >= LETTERS and known.startswith(word)]
    return min(begun, key=len) if begun else next(iter(_like(word, spelled, NEARER)), "")


def _like(word: str, spelled: Mapping[str, str], likeness: float) -> Sequence[str]:
    start = re.match("-*.", word)  # a flag is like flags, and who misspells a word gets its first letter right
    if start is None or len(word.strip("-")) < SPELLED:
        return ()
    among = [known for known in spelled.values() if known.startswith(start[0]) and known not in SMALL]
    return difflib.get_close_matches(word, among, n=OFFERED, cutoff=likeness)


WHOLE = 30  # lines of a section that is shown whole
GAP = "…"
RULE = re.compile(r"[\s|:-]+")  # the line below a table's head


def passage(section: ManualSection, words: frozenset[str]) -> str:
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

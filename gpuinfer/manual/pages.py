"""Pages and their sections, read from the Markdown that travels in the package (`gpuinfer/pages` is `docs/`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable

FENCE = re.compile(r"^\s*(```+|~~~+)")
HEADING = re.compile(r"(#{1,6})\s+(.+?)\s*#*$")
HOME, FOLDER = "index", "README"  # the page that is met first; the page that stands for its folder


@dataclass(frozen=True, slots=True)
class Section:
    """What stands below one heading, up to the next."""

    page: str  # the page's name
    anchor: str  # of the heading, as the site has it; "" for the page's own
    headings: tuple[str, ...]  # the page's title first, this heading last
    text: str  # Markdown, without the heading

    @property
    def address(self) -> str:
        """What `gpuinfer docs` takes to show it."""
        return f"{self.page}#{self.anchor}" if self.anchor else self.page


@dataclass(frozen=True, slots=True)
class Page:
    """One Markdown file."""

    name: str  # its path without the suffix; a folder's own page has the folder's name
    title: str
    text: str
    sections: tuple[Section, ...]


def pages() -> dict[str, Page]:
    """Every page by its name, sorted by it."""
    root = resources.files("gpuinfer").joinpath("pages")
    found = (read(name, file.read_text(encoding="utf-8")) for name, file in _files(root, ""))
    return {page.name: page for page in sorted(found, key=lambda page: page.name)}


def _files(folder: Traversable, inside: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files(entry, f"{inside}{entry.name}/")
        elif entry.name.endswith(".md"):
            yield f"{inside}{entry.name.removesuffix('.md')}", entry


def read(path: str, text: str) -> Page:
    """A page from its path (`decisions/http`, `decisions/README`) and its Markdown."""
    name = path.removesuffix(f"/{FOLDER}")
    sections = list(_sections(name, text))
    return Page(name, sections[0].headings[0], text, tuple(sections))


def _sections(name: str, text: str) -> Iterator[Section]:
    above: list[tuple[int, str]] = []  # level and words of the headings that this one stands below, and its own
    anchors: dict[str, int] = {}
    anchor, fence = "", ""
    lines: list[str] = []

    def section() -> Section:
        headings = tuple(words for _, words in above) or (name,)
        return Section(name, anchor, headings, "\n".join(lines).strip("\n"))

    for line in text.splitlines():
        if mark := FENCE.match(line):
            fence = "" if fence and mark[1].startswith(fence) else fence or mark[1]
        heading = None if fence else HEADING.match(line)
        if heading is None:
            lines.append(line)
            continue
        if above or any(lines):
            yield section()
        level, words = len(heading[1]), plain(heading[2])
        while above and above[-1][0] >= level:
            above.pop()
        above.append((level, words))
        anchor, lines = _numbered(slug(words), anchors) if len(above) > 1 else "", []
    yield section()


def slug(heading: str) -> str:
    """A heading's anchor, as Python-Markdown makes it (and GitHub, but for signs between spaces)."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def _numbered(anchor: str, taken: dict[str, int]) -> str:
    """Told apart from equal ones above it."""
    taken[anchor] = taken.get(anchor, -1) + 1
    return f"{anchor}_{taken[anchor]}" if taken[anchor] else anchor


def plain(markdown: str) -> str:
    """One line of text without its marks: links are their words, code is itself."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    return " ".join(re.sub(r"[`*]", "", text).split())

"""Pages and their sections, read from the Markdown that travels in the package (`gpuinfer/pages` is `docs/`), and the
order in which a newcomer wants them, which the headings and links of `docs/index.md` give.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable

FENCE = re.compile(r"^\s*(```+|~~~+)")
HEADING = re.compile(r"(#{1,6})\s+(.+?)\s*#*$")
HOME, FOLDER = "index", "README"  # the page that is met first; the page that stands for its folder


@dataclass(frozen=True, slots=True)
class ManualSection:
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
class ManualPage:
    """One Markdown file."""

    name: str  # its path without the suffix; a folder's own page has the folder's name
    title: str
    text: str
    sections: tuple[ManualSection, ...]


def pages() -> dict[str, ManualPage]:
    """Every page by its name, sorted by it."""
    root = resources.files("gpuinfer").joinpath("pages")
    found = (read_page(name, file.read_text(encoding="utf-8")) for name, file in _files(root, ""))
    return {page.name: page for page in sorted(found, key=lambda page: page.name)}


def _files(folder: Traversable, inside: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files(entry, f"{inside}{entry.name}/")
        elif entry.name.endswith(".md"):
            yield f"{inside}{entry.name.removesuffix('.md')}", entry


def read_page(path: str, text: str) -> ManualPage:
    """A page from its path (`decisions/http`, `decisions/README`) and its Markdown."""
    name = path.removesuffix(f"/{FOLDER}")
    sections = list(_sections(name, text))
    return ManualPage(name, sections[0].headings[0], text, tuple(sections))


def _sections(name: str, text: str) -> Iterator[ManualSection]:
    above: list[tuple[int, str]] = []  # level and words of the headings that this one stands below, and its own
    anchors: dict[str, int] = {}
    anchor, fence = "", ""
    lines: list[str] = []

    def section() -> ManualSection:
        headings = tuple(words for _, words in above) or (name,)
        return ManualSection(name, anchor, headings, "\n".join(lines).strip("\n"))

    for line in text.splitlines():
        if mark := FENCE.match(line):
            fence = "" if fence and mark[1].startswith(fence) else fence or mark[1]
        heading = None if fence else HEADING.match(line)
        if heading is None:
            lines.append(line)
            continue
        if above or any(lines):
            yield section()
        level, words = len(heading[1]), plain_text(heading[2])
        while above and above[-1][0] >= level:
            above.pop()
        above.append((level, words))
        anchor, lines = "", []
        if len(above) > 1:  # as Python-Markdown makes it (and GitHub, but for signs between spaces)
            anchor = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", words).strip().lower())
            anchors[anchor] = anchors.get(anchor, -1) + 1
            anchor += f"_{anchors[anchor]}" if anchors[anchor] else ""
    yield section()


def plain_text(markdown: str) -> str:
    """One line of text without its marks: links are their words, code is itself."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    return " ".join(re.sub(r"[`*]", "", text).split())


GUIDES = "Guides"  # the group of a page that neither the home page nor a folder lists
LINK = re.compile(r"\]\(([^)#\s]+)\.md(?:#[^)]*)?\)")
ENTRY = re.compile(r"^- \[[^\]]*\]\(([^)#\s]+)\.md\): (.+(?:\n  .+)*)", re.M)  # of a list: a page, and what it is about


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Pages of one kind, in their order."""

    title: str
    pages: list[ManualPage] = field(default_factory=list)


def groups(pages: Mapping[str, ManualPage]) -> list[PageGroup]:
    """Every page once, but for the home page. A folder's pages follow the page that stands for it."""
    home = pages[HOME]
    found, placed = [], {HOME}
    for section in home.sections[1:]:
        group = PageGroup(section.headings[-1])
        for name in linked(section.text, pages):
            group.pages.extend(_with_its_folder(pages[name], pages, placed))
        found.append(group)
    for page in pages.values():
        if page.name not in placed:
            placed.add(page.name)
            _place_of(page, found).pages.append(page)
    return [group for group in found if group.pages]


def page_topics(pages: Mapping[str, ManualPage]) -> dict[str, str]:
    """What each page is about in a few words: as the home page says it, or else the page's title."""
    said = {path.removesuffix(f"/{FOLDER}"): plain_text(words) for path, words in ENTRY.findall(pages[HOME].text)}
    return {name: said.get(name, page.title) for name, page in pages.items()}


def linked(markdown: str, pages: Mapping[str, ManualPage], folder: str = "") -> list[str]:
    """The pages that it links to, by name, in their order; `folder`: that the links begin in."""
    paths = (posixpath.normpath(posixpath.join(folder, path)) for path in LINK.findall(markdown))
    names = (path.removesuffix(f"/{FOLDER}") for path in paths)
    return list(dict.fromkeys(name for name in names if name in pages))


def _with_its_folder(page: ManualPage, pages: Mapping[str, ManualPage], placed: set[str]) -> Iterable[ManualPage]:
    if page.name in placed:
        return
    placed.add(page.name)
    yield page
    inside = [name for name in pages if name.startswith(f"{page.name}/")]
    if inside:
        first = linked(page.text, pages, page.name)
        for name in sorted(inside, key=lambda name: first.index(name) if name in first else len(first)):
            placed.add(name)
            yield pages[name]


def _place_of(page: ManualPage, found: list[PageGroup]) -> PageGroup:
    folder, _, _ = page.name.rpartition("/")
    for group in found:
        if folder and any(other.name.startswith(f"{folder}/") for other in group.pages):
            return group
    guides = next((group for group in found if group.title == GUIDES), None)
    if guides is None:
        found.append(guides := PageGroup(GUIDES))
    return guides

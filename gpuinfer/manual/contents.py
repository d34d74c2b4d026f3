"""The order in which a newcomer wants the pages: `docs/index.md` has it, in its headings and links.

A page that it does not name yet stands behind those of its folder, or of the guides.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpuinfer.manual.pages import FOLDER, HOME, Page, plain

GUIDES = "Guides"  # where a page of no folder goes that nobody has given a place
LINK = re.compile(r"\]\(([^)#\s]+)\.md(?:#[^)]*)?\)")
ENTRY = re.compile(r"^- \[[^\]]*\]\(([^)#\s]+)\.md\): (.+(?:\n  .+)*)", re.M)  # of a list: a page, and what it is about


@dataclass(frozen=True, slots=True)
class Group:
    """Pages of one kind, in their order."""

    title: str
    pages: list[Page] = field(default_factory=list)


def groups(pages: Mapping[str, Page]) -> list[Group]:
    """Every page once, but for the home page. A folder's pages follow the page that stands for it."""
    home = pages[HOME]
    found, placed = [], {HOME}
    for section in home.sections[1:]:
        group = Group(section.headings[-1])
        for name in linked(section.text, pages):
            group.pages.extend(_with_its_folder(pages[name], pages, placed))
        found.append(group)
    for page in pages.values():
        if page.name not in placed:
            placed.add(page.name)
            _place_of(page, found).pages.append(page)
    return [group for group in found if group.pages]


def described(pages: Mapping[str, Page]) -> dict[str, str]:
    """What each page is about in a few words: as the home page says it, or else the page's title."""
    said = {path.removesuffix(f"/{FOLDER}"): plain(words) for path, words in ENTRY.findall(pages[HOME].text)}
    return {name: said.get(name, page.title) for name, page in pages.items()}


def linked(markdown: str, pages: Mapping[str, Page], folder: str = "") -> list[str]:
    """The pages that it links to, by name, in their order; `folder`: that the links begin in."""
    paths = (posixpath.normpath(posixpath.join(folder, path)) for path in LINK.findall(markdown))
    names = (path.removesuffix(f"/{FOLDER}") for path in paths)
    return list(dict.fromkeys(name for name in names if name in pages))


def _with_its_folder(page: Page, pages: Mapping[str, Page], placed: set[str]) -> Iterable[Page]:
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


def _place_of(page: Page, found: list[Group]) -> Group:
    folder, _, _ = page.name.rpartition("/")
    for group in found:
        if folder and any(other.name.startswith(f"{folder}/") for other in group.pages):
            return group
    guides = next((group for group in found if group.title == GUIDES), None)
    if guides is None:
        found.append(guides := Group(GUIDES))
    return guides

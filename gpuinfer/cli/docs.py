"""Find a page of the documentation, here in the terminal."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from gpuinfer.cli.manual import manual_pages
from gpuinfer.cli.manual.manual_pages import ManualPage, ManualSection, pages
from gpuinfer.cli.manual.manual_search import passage, search
from gpuinfer.config import foreign_names
from gpuinfer.errors import UsageError

COLOURS = "-R"  # for less, which shows the signs of a colour unless it is told to heed them
OTHERS = 8  # sections that are named below the best one
WORDS = "What you look for: words, an option, a command, a page or a page#heading."

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


def _names(incomplete: str) -> list[str]:
    return [name for name in pages() if name.startswith(incomplete)]


@app.command("docs", context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]})
def docs(
    words: Annotated[list[str] | None, typer.Argument(metavar="[WORD]...", help=WORDS, autocompletion=_names)] = None,
) -> None:
    """Find a page of the documentation: the passage that answers a few words, and where else they stand.

    Without a word it lists the pages. The name of a page shows it whole: `gpuinfer docs serve`. An option is a word
    too: `gpuinfer docs --temperature`. A word that is misspelled is taken for the nearest one.
    """
    known = pages()
    query = " ".join(words or ())
    parts = list(_listing(known) if not query.strip() else _answer(known, query))
    from gpuinfer.cli.screen.terminal_markdown import draw_text

    terminal = sys.stdout.isatty()
    size = shutil.get_terminal_size()
    flags = os.environ.setdefault("LESS", COLOURS)
    text = draw_text(parts, columns=size.columns, colour=terminal and "r" in flags.lower())
    if terminal and text.count("\n") >= size.lines:
        import pydoc

        pydoc.pager(text)
    else:
        typer.echo(text, nl=False)


def _listing(known: Mapping[str, ManualPage]) -> Iterator[Any]:
    from gpuinfer.cli.screen.terminal_markdown import address_list

    about = manual_pages.page_topics(known)
    for group in manual_pages.groups(known):
        listing = [page for page in group.pages if page.name.rpartition("/")[0] not in known]
        yield address_list(group.title, [(page.name, about[page.name]) for page in listing])
    yield "`gpuinfer docs PAGE` shows one, `gpuinfer docs WORD…` finds a passage."


def _answer(known: Mapping[str, ManualPage], query: str) -> Iterator[Any]:
    from gpuinfer.cli.screen.terminal_markdown import markdown

    found = search(known.values(), query)
    if page := _page(known, query):
        yield markdown(page.text)
        yield from _others([section for section in found.sections if section.page != page.name][:OTHERS])
    elif (section := _named(known, query)) is not None:
        yield _passage(section, section.text)
    elif found.sections:
        for word, near in found.instead.items():
            yield f"No page says '{word}'. This is of '{near}':"
        for word, several in found.unknown.items():
            yield f"No page says '{word}'{_or_else(several)}.{_called_here(word)}"
        if found.instead or found.unknown:
            yield ""
        yield _passage(found.sections[0], passage(found.sections[0], found.words))
        yield from _others(found.sections[1 : OTHERS + 1])
    else:
        nearest = [one for words in found.unknown.values() for one in words]
        here = "".join(map(_called_here, found.unknown)) or " Either it is not there, or it has another name here."
        raise UsageError(
            f"no page says '{query}'{_or_else(nearest)}.{here} "
            "`gpuinfer docs questions` has what newcomers ask, `gpuinfer docs` lists the pages."
        )


def _page(known: Mapping[str, ManualPage], name: str) -> ManualPage | None:
    return known.get(name.lower().removeprefix("docs/").removesuffix(".md"))


def _named(known: Mapping[str, ManualPage], address: str) -> ManualSection | None:
    """The section of a `page#heading`."""
    name, mark, anchor = address.partition("#")
    page = _page(known, name) if mark else None
    if page is None:
        return None
    for section in page.sections:
        if section.anchor == anchor:
            return section
    anchors = ", ".join(section.anchor for section in page.sections if section.anchor)
    raise UsageError(f"page '{page.name}' has no heading '{anchor}'. Headings: {anchors or 'none'}.")


def _passage(section: ManualSection, text: str) -> Any:
    from gpuinfer.cli.screen import terminal_markdown

    return terminal_markdown.shown_passage(" › ".join(section.headings), section.address, text)


def _others(sections: Sequence[ManualSection]) -> Iterator[Any]:
    from gpuinfer.cli.screen.terminal_markdown import address_list

    if sections:
        yield address_list("Also", [(one.address, " › ".join(one.headings)) for one in sections])


def _called_here(word: str) -> str:
    """What a flag of another program is called, as a sentence to follow; "" for any other word."""
    if not (ours := foreign_names.FLAGS.get(word.lstrip("-").replace("_", "-"))):
        return ""
    return f" {ours[0]}" if ours[0].endswith(".") else f" Here it is '{ours[0]}'."


def _or_else(near: Sequence[str]) -> str:
    return f"; there are {', '.join(near)}" if near else ""

"""Pages, their sections and their order, as `gpuinfer docs` and the site have them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpuinfer.cli.manual import manual_pages
from gpuinfer.cli.manual.manual_pages import pages, read_page

ROOT = Path(__file__).parent.parent.parent

TEXT = """# Serving a `model`

One model, many *askers*. And more.

## Limits

They are there.

```
# no heading: a comment
## neither
```

### Of a [request](generate.md)

Few.

## Limits

Again.
"""


@pytest.fixture(scope="module")
def known():
    return pages()


def test_a_page_is_cut_at_its_headings_but_not_inside_code():
    page = read_page("serve", TEXT)
    assert page.title == "Serving a model"
    assert [(one.anchor, one.headings[1:]) for one in page.sections] == [
        ("", ()),
        ("limits", ("Limits",)),
        ("of-a-request", ("Limits", "Of a request")),
        ("limits_1", ("Limits",)),
    ]
    assert "## neither" in page.sections[1].text


def test_a_page_is_described_by_the_home_page_or_by_its_title():
    home = read_page(
        "index", "# Home\n\n## Guides\n\n- [Serving](serve.md): requests, *limits*,\n  keys\n- [Odd](odd.md)\n"
    )
    known = {page.name: page for page in (home, read_page("serve", TEXT), read_page("odd", "# An odd page\n"))}
    assert manual_pages.page_topics(known)["serve"] == "requests, limits, keys"
    assert manual_pages.page_topics(known)["odd"] == "An odd page"


@pytest.mark.parametrize("text", ["", "words alone", "## Below\n", "```\nnever closed\n# x"])
def test_a_page_of_any_form_has_a_section_and_a_folders_own_page_the_folders_name(text):
    page = read_page("decisions/README", text)
    assert (page.name, bool(page.sections)) == ("decisions", True)


def test_all_pages_of_the_repository_travel(known):
    """And those that git does not know yet, but will."""
    words = ["git", "ls-files", "-co", "--exclude-standard", "docs/*.md"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if listed.returncode:
        pytest.skip("no git repository here")
    there = {path.removeprefix("docs/").removesuffix(".md").removesuffix("/README") for path in listed.stdout.split()}
    assert set(known) == there


def test_every_page_has_one_place_in_the_contents_tutorials_first_and_decisions_last(known):
    groups = manual_pages.groups(known)
    named = [page.name for group in groups for page in group.pages]
    assert sorted(named) == sorted(set(known) - {"index"})
    assert [group.title for group in groups] == ["Tutorials", "Guides", "Reference", "How it is made"]
    assert groups[-1].pages[0].name == "architecture"
    assert named[-1].startswith("decisions/")
    added = {"unlisted": read_page("unlisted", "# Unlisted\n"), "tutorials/zoo": read_page("tutorials/zoo", "# Zoo\n")}
    tutorials, guides = manual_pages.groups({**known, **added})[:2]  # behind their like
    assert (tutorials.pages[-1].name, guides.pages[-1].name) == ("tutorials/zoo", "unlisted")


def test_the_home_page_links_to_every_page_of_its_own_folders(known):
    """So that nobody who writes a page forgets the newcomer: a decision is listed by its folder's page."""
    home = {*manual_pages.linked(known["index"].text, known)}
    home |= {*manual_pages.linked(known["decisions"].text, known, "decisions")}
    listed = ("decisions/", "tutorials/", "reference/")
    assert [name for name in known if name.startswith(listed) and name not in home] == []

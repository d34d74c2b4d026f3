"""The site that `make docs` has built: whole, of one host, and searched in a real browser."""

from __future__ import annotations

import functools
import http.server
import posixpath
import re
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from system.pages import DESKTOP, PHONE

from gpuinfer.cli.manual.manual_pages import groups, pages

pytestmark = pytest.mark.docs
ROOT = Path(__file__).parent.parent.parent
SITE = ROOT / "build" / "site"
FETCHED = ("src", "srcset", "poster", "data", "action", "formaction", "background")  # what a browser asks for by itself
OUTSIDE = re.compile(r"(?:https?:)?//", re.I)
STYLE = re.compile(r"url\(\s*['\"]?\s*(?:https?:)?//|@import\s+['\"](?:https?:)?//", re.I)


class Read(HTMLParser):
    """What one page fetches, links to, and can be linked at."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.fetches: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.fetches += [given[name] for name in FETCHED if name in given]
        if tag == "link":
            self.fetches.append(given.get("href", ""))
        elif tag == "a" and "href" in given:
            self.links.append(given["href"])


@pytest.fixture(scope="module")
def site() -> dict[str, Read]:
    found = {str(file.relative_to(SITE)): Read(file) for file in SITE.rglob("*.html")}
    assert found, f"there is no site in {SITE}: run `make docs`"
    return found


def test_no_page_style_or_script_fetches_anything_of_another_host(site):
    assert [(name, one) for name, page in site.items() for one in page.fetches if OUTSIDE.match(one)] == []
    files = [file for file in SITE.rglob("*") if file.suffix in (".html", ".css", ".svg")]
    assert [str(file) for file in files if STYLE.search(file.read_text(encoding="utf-8"))] == []


def test_links_lead_to_pages_and_headings_that_are_there(site):
    dead = []
    for name, page in site.items():
        for link in (*page.links, *page.fetches):
            target = urlsplit(link)
            if target.scheme or target.netloc or link.startswith("data:") or name == "404.html":
                continue
            path = name
            if target.path:
                path = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(target.path)))
            anchors = site[path].anchors if path in site else {unquote(target.fragment)}
            if not (SITE / path).is_file() or unquote(target.fragment or "") not in {"", *anchors}:
                dead.append(f"{name} → {link}")
    assert dead == []


def test_every_page_can_be_reached_from_the_home_page(site):
    known = pages()
    links = {posixpath.normpath(urlsplit(link).path) for link in site["index.html"].links}
    for group in groups(known):
        for page in group.pages:
            folder = any(name.startswith(f"{page.name}/") for name in known)
            assert f"{page.name}/index.html" in links if folder else f"{page.name}.html" in links


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The site on a port of its own."""
    handler = functools.partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Says nothing of each file."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("viewport", [pytest.param(DESKTOP, id="desktop"), pytest.param(PHONE, id="phone")])
def test_a_word_typed_into_the_search_finds_its_page(watched, address, viewport):
    tab = watched(viewport=viewport)
    tab.page.goto(address + "/index.html")
    tab.page.wait_for_load_state("networkidle")
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("determinization")
    found = tab.page.locator("a", has_text="Determinization").or_(tab.page.locator("a[href*='determinization']"))
    found.filter(visible=True).first.click()
    tab.page.wait_for_url("**/*determinization*")
    assert "exactly uniform" in tab.text("article")
    assert {urlsplit(url).netloc for url in tab.asked} == {urlsplit(address).netloc}
    assert tab.said == []


def test_no_page_is_wider_than_a_phone(watched, site, address):
    tab = watched(viewport=PHONE)
    wide = []
    for name in ("index.html", "generate.html", "tutorials/selfplay.html", "reference/commands.html"):
        tab.page.goto(f"{address}/{name}")
        if tab.too_wide:
            wide.append(name)
    assert wide == []

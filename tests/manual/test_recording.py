"""A recording is what the command shows on a terminal."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def shown(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))  # for tools/, which is no part of the package
    from tools.record import shown

    return lambda code, when=None: shown([sys.executable, "-c", code], 40, 8, when and re.compile(when))


def test_each_picture_is_there_and_a_page_shows_it(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from tools.record import PICTURES

    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    for target, *_ in PICTURES.values():
        assert (ROOT / target).is_file()
        assert Path(target).name in pages


def test_the_last_screen_with_its_colours(shown):
    text = shown(r"print('gone\x1b[2J\x1b[H\x1b[1;32mgreen\x1b[0m plain')")
    assert text.plain == "green plain"
    styles = [str(span.style) for span in text.spans]
    assert styles[0] == "bold green"


def test_the_first_screen_that_shows_what_is_waited_for(shown):
    code = "import time\nfor n in range(100): print(f'\\r{n} %', end='', flush=True); time.sleep(0.01)\ntime.sleep(600)"
    assert re.match(r"5\d %", shown(code, r"5\d %").plain)


def test_it_is_a_terminal_of_that_size(shown):
    code = "import os, sys; print(sys.stdout.isatty(), *os.get_terminal_size())"
    assert shown(code).plain == "True 40 8"

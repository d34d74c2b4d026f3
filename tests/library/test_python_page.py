"""The Python of the pages on programs runs as it stands there, from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {
    "python.md": ("1 prompt 1: the prompt has 13000 tokens and the context 2048", "of 64 slots", "[3.0, 10.0, 66.0]"),
    "tutorials/program.md": ("too late: ", "the queue is full: 256 of 256 rows", "bottleneck", "\n1.0\n"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("page", PAGES)
def test_a_page_on_programs_runs_from_top_to_bottom(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.M | re.S)
    exec(compile("\n".join(blocks), page, "exec"), {"__name__": "python_page"})  # noqa: S102
    said = capsys.readouterr().out
    assert [words for words in PAGES[page] if words not in said] == []


def test_the_tutorial_quotes_the_service_as_it_is():
    page = (ROOT / "docs" / "tutorials" / "program.md").read_text()
    [quoted] = re.findall(r"^```python fastapi_service.py\n(.*?)^```", page, re.M | re.S)
    service = (ROOT / "examples" / "fastapi_service.py").read_text()
    assert without_margins(quoted) in without_margins(service)


def without_margins(text):
    """Its lines without blank ones and without indentation, which depends on what is around them."""
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())

"""The Python of the page on programs runs as it stands there, from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


@pytest.mark.thorough
def test_the_page_on_programs_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    exec(compile("\n".join(blocks), PAGE.name, "exec"), {"__name__": "python_page"})  # noqa: S102
    said = capsys.readouterr().out
    assert "1 prompt 1: the prompt has 13000 tokens and the context 2048" in said
    assert "of 64 slots" in said

"""The page about a strategy of one's own: what it says is what happens."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "own-strategy.md"


def test_the_code_on_the_page_runs_in_its_order(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert len(blocks) == 4
    names: dict[str, object] = {"__name__": "punctual"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102 (our own page)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [name for name, *_ in lines] == ["Punctual", "Dynamic"]
    assert all(float(p95) < 0.1 for _, p95, _ in lines)
    assert float(lines[0][2]) > float(lines[1][2])

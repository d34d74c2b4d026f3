"""`gpuinfer docs` as people meet it. What it finds: test_manual_search.py."""

from __future__ import annotations

import pytest

from gpuinfer.cli.manual.manual_pages import pages


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("", [name for name in pages() if name != "index" and not name.startswith("decisions/")]),
        ("roofline", ["Also", "  reference/contract", "gpuinfer docs "]),
        ("traces", [one.headings[-1] for one in pages()["traces"].sections]),
        ("serve#headers", ["X-Gpuinfer-Priority"]),
        ("--goodput", ["--goodput"]),
        ("roofine", ["No page says 'roofine'", "roofline"]),
    ],
)
def test_a_query_is_answered(gpuinfer, monkeypatch, words, shown):
    monkeypatch.setenv("COLUMNS", "100")
    code, out, err = gpuinfer("docs", *words.split())
    assert (code, err) == (0, "")
    assert [text for text in shown if text not in out] == []

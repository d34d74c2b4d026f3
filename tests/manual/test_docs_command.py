"""`gpuinfer docs` as people meet it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpuinfer.cli.manual.manual_pages import pages


@pytest.fixture(autouse=True)
def columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def test_without_a_word_every_page_is_listed(gpuinfer):
    code, out, _ = gpuinfer("docs")
    assert code == 0
    shown = {name for name in pages() if name != "index" and not name.startswith("decisions/")}
    assert [name for name in shown if f"  {name} " not in out] == []
    assert "  decisions " in out


def test_a_word_shows_its_passage_and_where_else_it_stands(gpuinfer):
    code, out, err = gpuinfer("docs", "roofline")
    assert (code, err) == (0, "")
    assert "gpuinfer docs " in out.splitlines()[0]
    assert "Also" in out
    assert "  reference/contract" in out


@pytest.mark.parametrize(
    ("words", "code", "shown", "error"),
    [
        pytest.param("traces", 0, [one.headings[-1] for one in pages()["traces"].sections], "", id="a page, whole"),
        pytest.param("serve#headers", 0, ["X-Gpuinfer-Priority"], "", id="a section, by its address"),
        pytest.param("--goodput", 0, ["--goodput"], "", id="a flag"),
        pytest.param("roofine", 0, ["No page says 'roofine'", "roofline"], "", id="a misspelled word"),
        pytest.param("serve#nothing", 2, [], "headers", id="no such heading: those that there are"),
        pytest.param("zzyzxqq", 2, [], "`gpuinfer docs` lists the pages.", id="nothing: the list of pages"),
        pytest.param("--n_ctx", 2, [], "Here it is '--context'.", id="a flag of another program: ours"),
    ],
)
def test_a_query_is_answered(gpuinfer, words, code, shown, error):
    found, out, err = gpuinfer("docs", words)
    assert found == code
    assert [text for text in shown if text not in out] == []
    assert error in err


def test_it_imports_nothing_heavy():
    code = """if True:
        import sys
        from gpuinfer.cli.app import run
        run(["docs", "batching"])
        print("LOADED", *(name for name in ("torch", "numba", "numpy", "gpuinfer.api") if name in sys.modules))
    """
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert child.stdout.splitlines()[-1].split() == ["LOADED"]

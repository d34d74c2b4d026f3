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


def test_a_page_is_shown_whole(gpuinfer):
    _, out, _ = gpuinfer("docs", "traces")
    for section in pages()["traces"].sections:
        assert section.headings[-1] in out


def test_an_address_from_the_list_shows_that_section(gpuinfer):
    code, out, _ = gpuinfer("docs", "serve#headers")
    assert code == 0
    assert "X-Gpuinfer-Priority" in out
    assert "Networks of rows" not in out


def test_a_heading_that_a_page_has_not_is_told_with_those_that_it_has(gpuinfer):
    code, _, err = gpuinfer("docs", "serve#nothing")
    assert code == 2
    assert "headers" in err


def test_a_flag_is_a_word(gpuinfer):
    code, out, _ = gpuinfer("docs", "--goodput")
    assert code == 0
    assert "--goodput" in out


def test_the_misspelled_are_told_what_they_are_shown(gpuinfer):
    code, out, _ = gpuinfer("docs", "roofine")
    assert code == 0
    assert "No page says 'roofine'" in out
    assert "roofline" in out


def test_a_word_that_finds_nothing_ends_with_the_cure(gpuinfer):
    code, out, err = gpuinfer("docs", "zzyzxqq")
    assert (code, out) == (2, "")
    assert "Either it is not there, or it has another name here." in err
    assert err.strip().endswith("`gpuinfer docs` lists the pages.")


def test_a_flag_of_another_program_that_no_page_names_is_told_by_ours(gpuinfer):
    code, out, err = gpuinfer("docs", "--n_ctx")
    assert (code, out) == (2, "")
    assert "no page says '--n_ctx'. Here it is '--context'." in err


def test_it_imports_nothing_heavy():
    code = """if True:
        import sys
        from gpuinfer.cli.app import run
        run(["docs", "batching"])
        print("LOADED", *(name for name in ("torch", "numba", "numpy", "gpuinfer.api") if name in sys.modules))
    """
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert child.stdout.splitlines()[-1].split() == ["LOADED"]

"""A package of each kind, as `plugins new` writes it: installed, checked, run, and its own tests and lint pass."""

from __future__ import annotations

import shlex
import sys

import pytest
from scratch import ROOT, Scratch

from gpuinfer.config import registry
from gpuinfer.packages import writing

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

KINDS = list(registry.KINDS.values())
FEWER = {"--games": "4", "--rows": "500", "--groups": "1"}  # counts that only cost time


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """All six packages in one environment, installed by the command."""
    folder = tmp_path_factory.mktemp("new")
    scratch = Scratch(folder / "environment")
    for kind in KINDS:
        writing.write(new(kind), folder)
    paths = [str(folder / new(kind).package) for kind in KINDS]
    done = scratch.gpuinfer("plugins", "install", *paths, "--yes", "--no-index", within=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in KINDS:
        assert f"adds      {kind} try-{kind}" in done.stdout
    return scratch


def new(kind: str) -> writing.NewPackage:
    return writing.NewPackage(kind, f"try-{kind}")


def source(scratch: Scratch, kind: str):
    return scratch.folder.parent / new(kind).package


def test_their_own_tests_pass(scratch):
    """Among them the conformance kit; that of the game compiles for half a minute: see below."""
    folders = [str(source(scratch, kind)) for kind in KINDS]
    words = ["pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "--rootdir", str(scratch.folder.parent)]
    game = f"{new('game').package}/tests/test_{new('game').module}.py::test_the_installed_package_keeps_the_contract"
    done = scratch.run(*words, "--deselect", game, *folders, within=scratch.folder.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 deselected" in done.stdout


@pytest.mark.soak
def test_the_game_keeps_the_contract(scratch):
    done = scratch.gpuinfer("plugins", "check", new("game").package)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_what_its_readme_shows_runs(kind, scratch, tmp_path):
    for line in new(kind).commands:
        words = shlex.split(line)[1:]
        if words[:2] == ["plugins", "check"]:
            continue  # its own tests have done it
        words = [FEWER.get(before, word) for before, word in zip(["", *words], words, strict=False)]
        if words[0] != "plugins" and "--help" not in words:
            words.append("--no-roofline")
        done = scratch.gpuinfer(*words, within=tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


def test_they_are_formatted_and_without_lint(scratch):
    folders = [str(source(scratch, kind)) for kind in KINDS]
    for words in (["format", "--check"], ["check"]):
        done = scratch.run("ruff", *words, "--no-cache", *folders)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_their_types_hold(kind, scratch, tmp_path, monkeypatch):
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    words = ["--follow-imports", "silent", "--python-executable", sys.executable, "--cache-dir", str(tmp_path)]
    done = scratch.run("mypy", *words, within=source(scratch, kind))
    assert done.returncode == 0, done.stdout + done.stderr

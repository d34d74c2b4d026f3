"""A package of each kind, as `plugins new` writes it: installed, checked, run, and its own tests and lint pass."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import forking
import pytest

from gpuinfer.config import registry
from gpuinfer.config.packages import template

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
KINDS = list(registry.KINDS.values())
FEWER = {"--games": "4", "--rows": "500", "--groups": "1"}  # counts that only cost time


def new(kind: str) -> template.NewPackage:
    return template.NewPackage(kind, f"try-{kind}")


PACKAGES = [new(kind).package for kind in KINDS]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """All six packages, installed by the command into a folder of plugins."""
    place = tmp_path_factory.mktemp("new")
    for kind in KINDS:
        template.write_package(new(kind), place)
    paths = [package + os.sep for package in PACKAGES]
    done = gpuinfer("plugins", "install", *paths, "--yes", "--no-index", "--into", "folder", place=place)
    for kind in KINDS:
        assert f"adds      {kind} try-{kind}" in done
    return place


def environment(place: Path) -> dict[str, str]:
    """Of commands that see what is installed; and of plain pytest, which does not look into the folder by itself."""
    path = os.pathsep.join([str(ROOT), str(place / "folder")])
    return forking.own_environment(PYTHONPATH=path, GPUINFER_PLUGINS=str(place / "folder"))


def gpuinfer(*words: str, place: Path, within: Path | None = None) -> str:
    """What a command says that ends well."""
    done = forking.run(["gpuinfer", *words], within or place, environment(place), 300.0, workers=True)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def module(*words: str, within: Path, env: dict[str, str] | None = None) -> str:
    """What `python -m WORDS` says, which ends well."""
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, env=env, cwd=within, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_their_own_tests_pass(place):
    """Among them the conformance kit; that of the game compiles for half a minute: see below."""
    game = f"{new('game').package}/tests/test_{new('game').module}.py::test_the_installed_package_keeps_the_contract"
    words = ["pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "--rootdir", str(place), "--deselect", game]
    assert "1 deselected" in module(*words, *PACKAGES, within=place, env=environment(place))


@pytest.mark.soak
def test_the_game_keeps_the_contract(place):
    assert "8 of 8 checks hold" in gpuinfer("plugins", "check", new("game").package, place=place)


@pytest.mark.parametrize("kind", KINDS)
def test_what_its_readme_shows_runs(kind, place, tmp_path):
    for line in new(kind).commands:
        words = shlex.split(line)[1:]
        if words[:2] == ["plugins", "check"]:
            continue  # its own tests have done it
        words = [FEWER.get(before, word) for before, word in zip(["", *words], words, strict=False)]
        if words[0] not in ("plugins", "simulate") and "--help" not in words:
            words += ["--no-roofline", *(["--workers", "1"] if words[0] == "selfplay" else [])]
        gpuinfer(*words, place=place, within=tmp_path)


def test_they_are_formatted_and_without_lint(place):
    for words in (["format", "--check"], ["check"]):
        module("ruff", *words, "--no-cache", *PACKAGES, within=place)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_their_types_hold(kind, place, tmp_path):
    words = ["--follow-imports", "silent", "--python-executable", sys.executable, "--cache-dir", str(tmp_path)]
    module("mypy", *words, within=place / new(kind).package, env={**os.environ, "MYPYPATH": str(ROOT)})

"""Compiled kernels are cached by all that they are made from, where nobody else can write, and never stale."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

from gpuinfer.errors import UsageError
from gpuinfer.models import kernel_cache
from gpuinfer.workloads.selfplay import kernels

EXAMPLES = Path(__file__).parents[2] / "examples"
HELPER = "from gpuinfer.workloads.selfplay.bits import compiled\n\n\n@compiled\ndef bonus():\n    return {}\n"


@pytest.fixture
def rules(tmp_path, monkeypatch):
    """A copy of the example in a module of its own, and a function that edits and imports it again."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copy(EXAMPLES / "nim.py", tmp_path / "copied_nim.py")
    (tmp_path / "nim_helper.py").write_text("BONUS = 1\n")

    def load(*changes):
        path = tmp_path / "copied_nim.py"
        text = path.read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path.write_text(text)
        for name in ("copied_nim", "nim_helper"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        return importlib.import_module("copied_nim")

    yield load
    for name in ("copied_nim", "nim_helper"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("imported", "used", "helper"),
    [("from nim_helper import BONUS", "BONUS", "BONUS = {}\n"), ("import nim_helper", "nim_helper.bonus()", HELPER)],
    ids=["a constant of another module", "a function reached through a module"],
)
def test_what_rules_reach_elsewhere_has_another_folder_when_it_changes(rules, tmp_path, imported, used, helper):
    folders = []
    changes = [("import numpy as np", f"import numpy as np\n{imported}"), ("LAST]] = 1.0", f"LAST]] = {used}")]
    for value in (1, 2):
        (tmp_path / "nim_helper.py").write_text(helper.format(value))
        folders.append(kernels.search_cache_folder(rules(*(changes if value == 1 else ()))))
    assert folders[0] != folders[1]


def test_rules_that_lack_a_function_are_refused(rules):
    rules(("@compiled\ndef observe", "def observe"))
    with pytest.raises(UsageError, match="has no compiled function 'observe'"):
        kernels.load_search("copied_nim")


@pytest.mark.parametrize("depth", [0, 1, 2], ids=["the folder", "the folder above", "the root"])
def test_a_folder_that_others_may_write_is_not_used(rules, depth, tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_cache.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = kernels.search_cache_folder(module := rules())
    (folder, *folder.parents)[depth].chmod(0o777)
    elsewhere = kernels.search_cache_folder(module)
    assert elsewhere != folder
    assert elsewhere.is_relative_to(tmp_path / f"gpuinfer-{os.getuid()}")


def test_without_any_folder_the_cure_is_named(rules, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("in the way")
    monkeypatch.setattr(kernel_cache.tempfile, "gettempdir", lambda: str(tmp_path / "cache"))
    with pytest.raises(UsageError, match="Set XDG_CACHE_HOME"):
        kernels.search_cache_folder(rules())


HALVED = """
from pathlib import Path
from gpuinfer.models.kernel_cache import compiler

@compiler([Path(__file__)])
def halved(value):
    return value / 2
"""


@pytest.mark.parametrize(
    ("carried", "calls"),
    [(None, (1, 0)), ("this", (1, 0)), ("another", (0, 1))],
    ids=["cached", "carried by the one file for this processor", "carried for another"],
)
def test_the_same_source_elsewhere_and_of_another_date_is_not_compiled_again(carried, calls, tmp_path, monkeypatch):
    def hits_and_misses(name):
        path = tmp_path / name / "same" / "halved.py"
        path.parent.mkdir(parents=True)
        path.write_text(HALVED)
        os.utime(path, (len(name), len(name)))
        spec = importlib.util.spec_from_file_location("halved", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "halved", module)
        spec.loader.exec_module(module)
        assert module.halved(3.0) == 1.5
        return sum(module.halved.stats.cache_hits.values()), sum(module.halved.stats.cache_misses.values())

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert hits_and_misses("first") == (0, 1)
    if carried:
        folder = (tmp_path / "cache/gpuinfer/kernels").rename(tmp_path / "carried")
        (folder / kernel_cache.PROCESSOR).write_text(kernel_cache.processor() if carried == "this" else carried)
        monkeypatch.setattr(kernel_cache, "carried_kernels", lambda: folder)
    assert hits_and_misses("elsewhere") == calls
    if carried:
        names = [path.name for path in (tmp_path / "cache/gpuinfer/kernels").iterdir()]
        assert names == [path.name for path in folder.iterdir() if path.is_dir()]  # and nothing torn

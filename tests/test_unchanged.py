"""What a test file depends on, and when it has to run again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from tools import unchanged


def test_a_test_of_one_part_depends_on_what_it_imports_and_no_more():
    found = unchanged.closure("tests/selfplay/test_search.py")
    assert {"gpuinfer/workloads/selfplay/search.py", "gpuinfer/api.py"} <= found
    assert not any(path.startswith(("gpuinfer/fleet/", "gpuinfer/serving/")) for path in found)


def test_a_test_that_uses_a_name_of_the_package_depends_on_where_that_is():
    found = unchanged.closure("tests/library/test_batcher_on_gpu.py")
    assert {"gpuinfer/library/batcher.py", "gpuinfer/models/forward_leaves.py"} <= found
    assert "gpuinfer/library/llm.py" not in found


@pytest.mark.parametrize("name", ["test_cli.py", "test_layers.py"])
def test_a_test_that_starts_commands_or_reads_sources_depends_on_everything(name):
    package = {path for path in unchanged.files() if path.startswith(("gpuinfer/", "plugins/"))}
    assert package <= unchanged.closure(f"tests/{name}")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A small repository whose two test files import a module each; returns what has to run."""
    written = {
        "gpuinfer/__init__.py": "",
        "gpuinfer/one.py": "from gpuinfer import deep",
        "gpuinfer/deep.py": "",
        "gpuinfer/two.py": "",
        "tests/a/test_one.py": "def test_it():\n    from gpuinfer.one import deep\npytest.mark.thorough",
        "tests/b/test_two.py": "import helper\npytest.mark.thorough",
        "tests/helper.py": "CHILD = 'gpuinfer.two'",
        **dict.fromkeys(unchanged.COMMON, "x"),
    }
    for path, content in written.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    monkeypatch.setattr(unchanged, "ROOT", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(unchanged, "machine", lambda: "this one")
    monkeypatch.setattr(unchanged, "files", lambda: tuple(sorted(written)))

    def has_to_run(capsys, stage="thorough"):
        for cached in (unchanged.text, unchanged.modules, unchanged.needs):
            cached.cache_clear()
        assert unchanged.main(["changed", stage]) == 0
        return capsys.readouterr().out.split()

    yield has_to_run
    for cached in (unchanged.text, unchanged.modules, unchanged.needs):
        cached.cache_clear()


BOTH = ["tests/a/test_one.py", "tests/b/test_two.py"]


@pytest.mark.parametrize(
    ("path", "again"),
    [
        ("gpuinfer/deep.py", BOTH[:1]),
        ("gpuinfer/two.py", BOTH[1:]),
        ("tests/helper.py", BOTH[1:]),
        ("tests/a/test_one.py", BOTH[:1]),
        ("constraints.txt", BOTH),
        ("Makefile", BOTH),
        ("gpuinfer/__init__.py", BOTH),
    ],
)
def test_what_depends_on_a_changed_file_runs_again(repository, capsys, path, again):
    assert repository(capsys) == BOTH
    assert unchanged.main(["passed", "thorough"]) == 0
    assert repository(capsys) == []
    changed = unchanged.ROOT / path
    changed.write_text(changed.read_text() + "\n# pytest.mark.thorough")
    assert repository(capsys) == again


def test_another_machine_and_another_stage_know_nothing_of_it(repository, capsys, monkeypatch):
    assert unchanged.main(["passed", "thorough"]) == 0
    assert repository(capsys, "vllm") == ["vllm"]
    monkeypatch.setattr(unchanged, "machine", lambda: "another one")
    assert repository(capsys) == BOTH

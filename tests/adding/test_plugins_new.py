"""`gpuinfer plugins new`: what is written, and what is refused. Whether it works: test_new_packages.py."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from gpuinfer import __version__
from gpuinfer.cli.problems import USAGE
from gpuinfer.config import registry
from gpuinfer.config.packages import template
from gpuinfer.errors import UsageError

KINDS = list(registry.KINDS.values())


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_plugin_can_be_begun(kind, tmp_path, gpuinfer):
    code, out, err = gpuinfer("plugins", "new", kind, "my-thing", "--path", str(tmp_path))
    assert (code, err) == (0, "")
    folder = tmp_path / "gpuinfer-my-thing"
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    [(name, target)] = project["project"]["entry-points"][f"gpuinfer.{registry.plural(kind)}"].items()
    module, _, class_name = target.partition(":")
    tree = ast.parse((folder / module.replace(".", "/")).with_suffix(".py").read_text())
    assert name == "my-thing"
    assert next(node.name for node in tree.body if isinstance(node, ast.ClassDef)) == class_name
    assert registry.wanted_versions(project["project"]["dependencies"]) == registry.contract_range()
    assert registry.fits_version(registry.wanted_versions(project["project"]["dependencies"]), __version__)
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {"README.md", ".gitignore", "gpuinfer_my_thing/py.typed", "tests/test_gpuinfer_my_thing.py"} <= written
    assert written == {line.strip() for line in out.splitlines() if line.strip() in written}
    for path in written:
        text = (folder / path).read_text()
        assert not {"{{", "{%", "MODULE"} & set(text.split())
        assert path == "gpuinfer_my_thing/py.typed" or text.endswith("\n")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("My Backend!", "such as my-backend"),
        ("mine_too", "such as mine-too"),
        ("2fast", "such as fast"),
        ("", "such as my-plugin"),
        ("--", "such as my-plugin"),
        ("../../etc", "such as etc"),
        ("x" * 29, f"such as {'x' * 28}"),
        ("naïve", "such as na-ve"),
    ],
)
def test_a_name_that_is_none_is_refused_with_a_better_one(name, hint):
    with pytest.raises(UsageError, match=f"is no name for a plugin.*{hint}"):
        template.new_package("backend", name)


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("strategy", "dynamic", "the strategy 'dynamic' is there already, from gpuinfer"),
        ("workload", "selfplay", "the workload 'selfplay' is there already"),
        ("workload", "bench", "which is a command or a setting of gpuinfer"),
        ("workload", "give-up", "which is a command or a setting of gpuinfer"),
        ("backend", "echo", "from gpuinfer-echo"),
        ("game", "echo", "a package gpuinfer-echo 0.1.0 is installed already"),
    ],
)
def test_a_name_that_is_taken_is_refused_with_the_cure(kind, name, said, gpuinfer, tmp_path):
    code, _, err = gpuinfer("plugins", "new", kind, name, "--path", str(tmp_path))
    assert code == USAGE
    assert said in err
    assert err.rstrip().endswith(f"Take another name, such as my-{name}.")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", ["file", "folder", "link"])
def test_nothing_is_overwritten(there, tmp_path, gpuinfer):
    folder = tmp_path / "gpuinfer-mine"
    if there == "file":
        folder.write_text("dear")
    elif there == "folder":
        folder.mkdir()
    else:
        folder.symlink_to(tmp_path / "nowhere")
    code, _, err = gpuinfer("plugins", "new", "game", "mine", "--path", str(tmp_path))
    assert code == USAGE
    assert "nothing is overwritten. Take another name, or another place: --path DIR." in err
    assert [path.name for path in tmp_path.iterdir()] == ["gpuinfer-mine"]


def test_what_is_torn_off_in_the_middle_leaves_nothing(tmp_path, monkeypatch):
    def torn(self, text, **said):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", torn)
    with pytest.raises(KeyboardInterrupt):
        template.write_package(template.new_package("game", "mine"), tmp_path)
    assert list(tmp_path.iterdir()) == []

"""What is in the distributions of dist/, and what is not."""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
from installing import DIST, ROOT, said, uv, wheels

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
RECORD = "RECORD"  # what else is in it, with hashes


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as opened:
        return {name: opened.read(name) for name in opened.namelist() if not name.endswith(RECORD)}


def ours() -> Path:
    return next(path for path in wheels() if path.name.startswith("gpuinfer-"))


def test_each_package_has_both_forms():
    names = {path.parent.name.replace("-", "_") for path in ROOT.glob("plugins/*/pyproject.toml")} | {"gpuinfer"}
    assert {path.name.partition("-")[0] for path in wheels()} == names
    assert {path.name.partition("-")[0] for path in DIST.glob("*.tar.gz")} == names


def test_indexes_take_them():
    uv("tool", "run", "--quiet", "twine==6.2.0", "check", "--strict", *wheels(), *DIST.glob("*.tar.gz"))


def test_the_source_makes_the_wheel_that_the_checkout_makes(tmp_path):
    shutil.rmtree(
        ROOT / "build/lib", ignore_errors=True
    )  # of an earlier build: modules that are gone since would go in
    uv("build", "--quiet", "--wheel", "--out-dir", tmp_path, ROOT)
    assert content(next(tmp_path.glob("*.whl"))) == content(ours())


def test_every_module_schema_page_and_template_is_in_it():
    within = set(content(ours()))
    tracked = said("git", "ls-files", "gpuinfer", "docs", folder=ROOT).stdout.splitlines()
    wanted = {name for name in tracked if name.startswith("gpuinfer/") and name != "gpuinfer/pages"}
    pages = {f"gpuinfer/pages/{name.removeprefix('docs/')}" for name in tracked if name.endswith(".md")}
    assert wanted
    assert wanted | pages - {name for name in pages if name.startswith("gpuinfer/pages/gpuinfer/")} <= within


def test_nothing_else_is_in_it():
    for wheel in wheels():
        package = wheel.name.partition("-")[0]
        tops = {name.partition("/")[0] for name in content(wheel)}
        assert {top for top in tops if not top.startswith(f"{package}-")} == {package}


def test_no_path_of_the_building_machine_is_in_them():
    for wheel in wheels():
        assert not [name for name, data in content(wheel).items() if str(ROOT).encode() in data]
    for source in DIST.glob("*.tar.gz"):
        with tarfile.open(source) as opened:
            files = [member for member in opened if member.isfile()]
            assert not [file.name for file in files if str(ROOT).encode() in opened.extractfile(file).read()]

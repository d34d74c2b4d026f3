"""Plugins installed, upgraded and removed by pip for real, without a network: wheels lie in a folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from packages import NEVER, make_wheel, plugin_wheel
from scratch import Scratch

pytestmark = pytest.mark.thorough


@pytest.fixture
def links(tmp_path):
    """Where all packages of these tests lie. None of them can be imported, and none is."""
    folder = tmp_path / "links"
    never = {"modules": {"gpuinfer_rose": NEVER}}
    plugin_wheel(folder, "gpuinfer-rose", "1.0", backend="rose", requires=["gpuinfer>=0.1", "tests-leaf"], **never)
    make_wheel(folder, "tests-leaf", "3.0", modules={"tests_leaf": ""}, requires=["numpy", "tests-bud"])
    make_wheel(folder, "tests-bud", "4.0", modules={"tests_bud": ""})
    plugin_wheel(folder, "gpuinfer-lily", "1.0", backend="lily")
    plugin_wheel(folder, "gpuinfer-lily", "2.0", backend="lily", requires=["gpuinfer>=0.1,<1"])
    plugin_wheel(folder, "gpuinfer-lily", "3.0", backend="lily", requires=["gpuinfer>=9"], modules={"x": NEVER})
    plugin_wheel(folder, "gpuinfer-weed", backend="weed", requires=["tests-root"])
    make_wheel(folder, "tests-root", requires=["numpy<1"])
    make_wheel(folder, "gpuinfer-stone", points={"console_scripts": {"stone": "stone:main"}})
    return folder


def printed(done: subprocess.CompletedProcess[str], code: int = 0) -> str:
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"__pycache__"}


def test_a_plugin_and_what_it_needs_go_into_the_folder_and_the_plugin_out_again(tmp_path, links):
    scratch = Scratch(tmp_path / "environment")
    where = ("--into", "folder", "--find-links", str(links), "--no-index", "--yes")
    out = printed(scratch.gpuinfer("plugins", "install", "rose", *where))
    adds = (
        "adds      backend rose|for       gpuinfer >=0.1|tests-bud 4.0|tests-leaf 3.0|runs with your rights|Installed "
    )
    assert [words for words in adds.split("|") if words not in out] == []
    assert f"goes to   your folder {scratch.folder / 'plugins'}" in out
    folder = scratch.folder / "plugins"
    assert folder.stat().st_mode & 0o777 == 0o700
    leaf = {"tests_leaf.py", "tests_leaf-3.0.dist-info", "tests_bud.py", "tests_bud-4.0.dist-info"}
    assert names_in(folder) == {*leaf, "gpuinfer_rose.py", "gpuinfer_rose-1.0.dist-info"}
    check = " ".join(printed(scratch.gpuinfer("plugins", "check", "rose"), 4).split())
    assert "pip install" not in check  # which would install it into the environment, or nowhere
    assert "gpuinfer plugins uninstall gpuinfer-rose" in check
    printed(scratch.gpuinfer("plugins", "uninstall", "rose", "--yes"))
    assert names_in(folder) == leaf


def test_a_plugin_is_upgraded_in_the_environment_as_far_as_this_gpuinfer_goes(tmp_path, links):
    scratch = Scratch(tmp_path / "environment")
    looked = ("--find-links", str(links), "--no-index", "--yes")
    printed(scratch.gpuinfer("plugins", "install", "gpuinfer-lily==1.0", *looked))
    assert (scratch.site / "gpuinfer_lily-1.0.dist-info").is_dir()
    assert "replaces  gpuinfer-lily 1.0" in printed(scratch.gpuinfer("plugins", "upgrade", "lily", *looked))
    assert [path.name for path in scratch.site.glob("gpuinfer_lily-*")] == ["gpuinfer_lily-2.0.dist-info"]
    assert "is the newest that is to be had" in printed(scratch.gpuinfer("plugins", "upgrade", "lily", *looked))
    printed(scratch.gpuinfer("plugins", "uninstall", "lily", "--yes"))
    assert [path.name for path in scratch.site.glob("gpuinfer_lily*")] == []


def test_one_that_cannot_be_upgraded_keeps_no_other_from_it(tmp_path):
    """It comes first, and what it needs in its new version is at odds with what is here."""
    scratch, links = Scratch(tmp_path / "environment"), tmp_path / "links"
    looked = ("--into", "folder", "--find-links", str(links), "--no-index", "--yes")
    for name in ("aster", "lily"):
        plugin_wheel(links, f"gpuinfer-{name}", "1.0", backend=name)
    printed(scratch.gpuinfer("plugins", "install", "aster", "lily", *looked))
    (links / "gpuinfer_aster-1.0-py3-none-any.whl").unlink()
    (scratch.folder / "plugins" / "gpuinfer_aster-1.0.dist-info" / "direct_url.json").write_text('{"url": "git+x://y"}')
    plugin_wheel(links, "gpuinfer-lily", "2.0", backend="lily")
    out = printed(scratch.gpuinfer("plugins", "upgrade", "aster", "lily", *looked[2:]), 1)
    assert "gpuinfer-aster 1.0 stays as it is: gpuinfer-aster 1.0 came from git+x://y" in out
    assert "Installed gpuinfer-lily 2.0." in out
    assert re.search(r"1 of 2 packages stay as they are: gpuinfer-aster 1\.0\.", out), out
    assert {path.name for path in (scratch.folder / "plugins").glob("*.dist-info")} == {
        "gpuinfer_aster-1.0.dist-info",
        "gpuinfer_lily-2.0.dist-info",
    }


@pytest.mark.parametrize("into", ["environment", "folder"])
def test_what_came_from_a_folder_is_renewed_from_there(tmp_path, into):
    scratch, source = Scratch(tmp_path / "environment"), tmp_path / "a source" / "gpuinfer-fern"
    site = scratch.site if into == "environment" else scratch.folder / "plugins"
    printed(scratch.gpuinfer("plugins", "new", "strategy", "fern", "--path", str(source.parent)))
    printed(scratch.gpuinfer("plugins", "install", str(source), "--into", into, "--no-index", "--yes"))
    project = source / "pyproject.toml"
    project.write_text(project.read_text().replace('version = "0.1.0"', 'version = "0.0.9"'))
    out = printed(scratch.gpuinfer("plugins", "upgrade", "fern", "--no-index", "--yes"))
    assert "replaces  gpuinfer-fern 0.1.0" in out
    assert [path.name for path in site.glob("gpuinfer_fern-*")] == ["gpuinfer_fern-0.0.9.dist-info"]
    source.rename(tmp_path / "gone")
    out = printed(scratch.gpuinfer("plugins", "upgrade", "fern", "--no-index", "--yes"), 2)
    assert f"came from {source}, and that is no package any more. Say where it is now" in out


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("gpuinfer-lily==3.0", 1, "gpuinfer-lily 3.0 depends on gpuinfer>=9"),
        ("weed", 1, "tests-root 1.0 depends on numpy<1"),
        ("stone", 2, "adds no plugin of gpuinfer: it has entry points of console_scripts"),
        ("nettle", 1, "No matching distribution found for gpuinfer-nettle"),
        ("FERN", 1, "No matching distribution found for tests-nowhere"),
    ],
)
def test_what_cannot_be_used_is_named_in_pips_words_and_nothing_changes(what, code, words, tmp_path, links):
    scratch = Scratch(tmp_path / "environment")
    fern = plugin_wheel(tmp_path, "gpuinfer-fern", backend="fern", requires=["tests-nowhere"])
    before = sorted(scratch.site.iterdir())
    what = what.replace("FERN", str(fern))
    done = scratch.gpuinfer("plugins", "install", what, "--find-links", str(links), "--no-index", "--yes")
    assert words in printed(done, code)
    assert sorted(scratch.site.iterdir()) == before


def test_what_takes_too_long_is_ended(tmp_path):
    wheel = plugin_wheel(tmp_path, "gpuinfer-lily", backend="lily")
    done = Scratch(tmp_path / "environment").gpuinfer("plugins", "install", str(wheel), "--yes", "--limit", "0.01s")
    assert "did not end within 0.01 s" in printed(done, 1)
    assert "--limit 30min" in done.stderr


def test_ctrl_c_leaves_nothing(tmp_path):
    """In the middle of a build that never ends."""
    source = tmp_path / "source"
    source.mkdir()
    backend = "import time\ndef build_wheel(*given, **named):\n    open('begun', 'w').close()\n    time.sleep(600)\n"
    (source / "endless.py").write_text(backend)
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "endless"\nbackend-path = ["."]\n'
        '[project]\nname = "gpuinfer-endless"\nversion = "1"\n'
    )
    folder = tmp_path / "plugins"
    command = [sys.executable, "-m", "gpuinfer", "plugins", "install", str(source), "--yes", "--into", "folder"]
    process = subprocess.Popen(
        command, env={**os.environ, "GPUINFER_PLUGINS": str(folder), "TMPDIR": str(tmp_path)}, stdin=subprocess.DEVNULL
    )
    until = time.monotonic() + 60
    while not (source / "begun").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 3
    assert not folder.exists()
    assert [path.name for path in tmp_path.glob("gpuinfer-plugin-*")] == []

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
from made_wheels import NEVER, make_wheel, plugin_wheel
from scratch import Scratch

pytestmark = pytest.mark.thorough


@pytest.fixture
def links(tmp_path):
    """Where all packages of these tests lie. None of them can be imported, and none is."""
    folder = tmp_path / "links"
    never = {"modules": {"gpuinfer_rose": NEVER}}
    plugin_wheel(folder, "gpuinfer-rose", "1.0", backend="rose", requires=["gpuinfer>=0.1", "tests-leaf"], **never)
    make_wheel(folder, "tests-leaf", "3.0", modules={"tests_leaf": ""})
    plugin_wheel(folder, "gpuinfer-lily", "1.0", backend="lily")
    plugin_wheel(folder, "gpuinfer-lily", "2.0", backend="lily", requires=["gpuinfer>=0.1,<1"])
    plugin_wheel(folder, "gpuinfer-lily", "3.0", backend="lily", requires=["gpuinfer>=9"], modules={"x": NEVER})
    plugin_wheel(folder, "gpuinfer-thorn", backend="thorn", requires=["numpy<1"])
    plugin_wheel(folder, "gpuinfer-weed", backend="weed", requires=["tests-root"])
    make_wheel(folder, "tests-root", requires=["numpy<1"])
    make_wheel(folder, "gpuinfer-stone", points={"console_scripts": {"stone": "stone:main"}})
    return folder


def told(done: subprocess.CompletedProcess[str], code: int = 0) -> str:
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_plugin_and_what_it_needs_go_into_the_folder_and_out_again(tmp_path, links):
    scratch = Scratch(tmp_path / "environment")
    where = ("--into", "folder", "--find-links", str(links), "--no-index", "--yes")
    said = told(scratch.gpuinfer("plugins", "install", "rose", *where))
    for words in (
        "Taking gpuinfer-rose.",
        "adds      backend rose",
        "for       gpuinfer >=0.1",
        "needs     tests-leaf 3.0, which will be installed with it",
        f"goes to   your folder {scratch.folder / 'plugins'}",
        "runs with your rights",
        "Installed gpuinfer-rose 1.0.",
    ):
        assert words in said
    folder = scratch.folder / "plugins"
    assert folder.stat().st_mode & 0o777 == 0o700
    names = {path.name for path in folder.iterdir()} - {".lock"}
    assert names == {"gpuinfer_rose.py", "gpuinfer_rose-1.0.dist-info", "tests_leaf.py", "tests_leaf-3.0.dist-info"}
    assert "gpuinfer-rose 1.0" in told(scratch.gpuinfer("plugins", "list"))
    said = told(scratch.gpuinfer("plugins", "uninstall", "rose", "--yes"))
    assert "With it goes what nothing else there needs: tests-leaf 3.0." in said
    assert {path.name for path in folder.iterdir()} <= {".lock"}


def test_a_plugin_is_upgraded_in_the_environment_as_far_as_this_gpuinfer_goes(tmp_path, links):
    scratch = Scratch(tmp_path / "environment")
    looked = ("--find-links", str(links), "--no-index", "--yes")
    told(scratch.gpuinfer("plugins", "install", "gpuinfer-lily==1.0", *looked))
    assert (scratch.site / "gpuinfer_lily-1.0.dist-info").is_dir()
    said = told(scratch.gpuinfer("plugins", "upgrade", "lily", *looked))
    assert "gpuinfer-lily 3.0 is for gpuinfer >=9" in said
    assert "taking gpuinfer-lily==2.0, which is for this one" in said
    assert "replaces  gpuinfer-lily 1.0" in said
    assert [path.name for path in scratch.site.glob("gpuinfer_lily-*")] == ["gpuinfer_lily-2.0.dist-info"]
    assert not (scratch.site / "gpuinfer_lily-2.0.dist-info" / "direct_url.json").exists()
    assert "is the newest that is to be had" in told(scratch.gpuinfer("plugins", "upgrade", "lily", *looked))
    told(scratch.gpuinfer("plugins", "uninstall", "lily", "--yes"))
    assert [path.name for path in scratch.site.glob("gpuinfer_lily*")] == []


def test_one_that_cannot_be_upgraded_keeps_no_other_from_it(tmp_path):
    """It comes first, and what it needs in its new version is at odds with what is here."""
    scratch, links = Scratch(tmp_path / "environment"), tmp_path / "links"
    looked = ("--into", "folder", "--find-links", str(links), "--no-index", "--yes")
    for name, requires in {"aster": ["numpy<1"], "lily": []}.items():
        plugin_wheel(links, f"gpuinfer-{name}", "1.0", backend=name)
        told(scratch.gpuinfer("plugins", "install", name, *looked))
        plugin_wheel(links, f"gpuinfer-{name}", "2.0", backend=name, requires=requires)
    said = told(scratch.gpuinfer("plugins", "upgrade", "--all", *looked[2:]), 1)
    assert "gpuinfer-aster 1.0 stays as it is: gpuinfer-aster 2.0 cannot be used beside what is here" in said
    assert "Installed gpuinfer-lily 2.0." in said
    assert re.search(r"1 of \d+ packages stay as they are: gpuinfer-aster 1\.0\.", said), said
    assert {path.name for path in (scratch.folder / "plugins").glob("*.dist-info")} == {
        "gpuinfer_aster-1.0.dist-info",
        "gpuinfer_lily-2.0.dist-info",
    }


def test_what_cannot_be_imported_in_the_folder_is_cured_where_it_lies(tmp_path):
    """pip would put it into the environment, or nowhere."""
    scratch, links = Scratch(tmp_path / "environment"), tmp_path / "links"
    plugin_wheel(links, "gpuinfer-rose", "1.0", backend="rose", modules={"gpuinfer_rose": NEVER})
    told(
        scratch.gpuinfer(
            "plugins", "install", "rose", "--into", "folder", "--find-links", str(links), "--no-index", "--yes"
        )
    )
    said = " ".join(told(scratch.gpuinfer("plugins", "check", "rose"), 4).split())
    assert "pip install" not in said
    assert "gpuinfer plugins uninstall gpuinfer-rose" in said
    assert 'disabled_plugins = ["backends.rose"]' in said


@pytest.mark.parametrize("into", ["environment", "folder"])
def test_what_came_from_a_folder_is_renewed_from_there(tmp_path, into):
    scratch, source = Scratch(tmp_path / "environment"), tmp_path / "a source" / "gpuinfer-fern"
    site = scratch.site if into == "environment" else scratch.folder / "plugins"
    told(scratch.gpuinfer("plugins", "new", "strategy", "fern", "--path", str(source.parent)))
    told(scratch.gpuinfer("plugins", "install", str(source), "--into", into, "--no-index", "--yes"))
    project = source / "pyproject.toml"
    project.write_text(project.read_text().replace('version = "0.1.0"', 'version = "0.0.9"'))
    said = told(scratch.gpuinfer("plugins", "upgrade", "fern", "--no-index", "--yes"))
    assert "replaces  gpuinfer-fern 0.1.0" in said
    assert [path.name for path in site.glob("gpuinfer_fern-*")] == ["gpuinfer_fern-0.0.9.dist-info"]
    source.rename(tmp_path / "gone")
    said = told(scratch.gpuinfer("plugins", "upgrade", "fern", "--no-index", "--yes"), 2)
    assert f"came from {source}, and that is no package any more. Say where it is now" in said
    assert "gpuinfer-fern 0.0.9 came from" in told(scratch.gpuinfer("plugins", "upgrade", "--all", "--yes"))


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        pytest.param("gpuinfer-lily==3.0", 2, "gpuinfer-lily 3.0 is for gpuinfer >=9", id="another contract"),
        pytest.param("thorn", 2, "it needs numpy <1, and here is", id="at odds with what is here"),
        pytest.param("weed", 2, "tests-root 1.0 depends on numpy<1", id="what it needs is at odds"),
        pytest.param("stone", 2, "adds no plugin of gpuinfer: it has entry points of console_scripts", id="no plugin"),
        pytest.param("nettle", 1, "no wheel of gpuinfer-nettle or nettle is to be had", id="not there"),
        pytest.param(
            "WHEEL", 1, "needs tests-nowhere, and not all of that is to be had", id="what it needs is not there"
        ),
    ],
)
def test_what_cannot_be_used_is_named_and_nothing_changes(what, code, said, tmp_path, links):
    scratch = Scratch(tmp_path / "environment")
    if what == "WHEEL":
        what = str(plugin_wheel(tmp_path, "gpuinfer-fern", backend="fern", requires=["tests-nowhere"]))
    before = sorted(scratch.site.iterdir())
    done = scratch.gpuinfer("plugins", "install", what, "--find-links", str(links), "--no-index", "--yes")
    assert said in told(done, code)
    assert sorted(scratch.site.iterdir()) == before


def test_without_a_network_that_is_said(tmp_path):
    scratch = Scratch(
        tmp_path / "environment", {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull}
    )
    done = scratch.gpuinfer("plugins", "install", "gpuinfer-rose", "--yes")
    assert "no package index can be reached from here. Give the folder or the wheel" in told(done, 1)


def test_what_takes_too_long_is_ended(tmp_path):
    wheel = plugin_wheel(tmp_path, "gpuinfer-lily", backend="lily")
    done = Scratch(tmp_path / "environment").gpuinfer("plugins", "install", str(wheel), "--yes", "--limit", "0.01s")
    assert "did not end within 0.01 s" in told(done, 1)
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
    while not list(tmp_path.glob("gpuinfer-plugin-*/**/begun")):
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 3
    assert not folder.exists()
    assert sorted(path.name for path in source.iterdir()) == ["endless.py", "pyproject.toml"]
    assert [path.name for path in Path(tmp_path).glob("gpuinfer-plugin-*")] == []

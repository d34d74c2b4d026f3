"""What the process that runs from the one file knows of it, and which other versions of it go."""

from __future__ import annotations

import fcntl
import os
import sys
import time

import pytest

from gpuinfer.config import settings
from gpuinfer.host import installation
from gpuinfer.launchers.slurm import SlurmLauncher

OLD_S = installation.KEPT_S + 60


@pytest.fixture
def inside(tmp_path, monkeypatch):
    """The folder that this process seems to run from."""
    folder = made(tmp_path / "one-file", "2-b")
    (folder / installation.ONE_FILE_MARK).write_text("{}")
    monkeypatch.setattr(sys, "base_prefix", str(folder))
    monkeypatch.setenv(installation.ONE_FILE_VARIABLE, "/opt/gpuinfer")
    return folder


def made(above, name, unused_s=0.0, end=""):
    folder = above / (name + end)
    (folder / "lib").mkdir(parents=True)
    (folder / "lib/file").write_text("x")
    lock = above / f"{name}.lock"
    lock.touch()
    when = time.time() - unused_s
    os.utime(lock, (when, when))
    os.utime(folder, (when, when))
    return folder


def names(folder):
    return {path.name for path in folder.parent.iterdir()}


def test_one_file_is_known_where_it_runs(inside):
    assert str(installation.one_file()) == "/opt/gpuinfer"


def test_a_python_that_inherits_the_variable_is_not_inside_and_the_variable_is_no_setting(monkeypatch):
    monkeypatch.setenv(installation.ONE_FILE_VARIABLE, "/opt/gpuinfer")
    assert (installation.one_file(), settings.load().common.backend) == (None, "inprocess")


@pytest.mark.parametrize(
    ("there", "stay"),
    [
        pytest.param([("1-a", OLD_S, "")], set(), id="a version that nobody has used for a day"),
        pytest.param(
            [("3-c", installation.KEPT_S / 2, "")], {"3-c", "3-c.lock"}, id="one that somebody has used since"
        ),
        pytest.param([("1-a", OLD_S, ".part")], set(), id="what was left half unpacked"),
        pytest.param([("0-z", OLD_S, ".00c0ffee.part")], set(), id="what was left half removed"),
        pytest.param([("3-c", 0.0, ".00c0ffee.part")], {"3-c.00c0ffee.part", "3-c.lock"}, id="what is being unpacked"),
    ],
)
def test_other_versions_go_when_they_are_old_and_ours_stays_however_old(inside, there, stay):
    os.utime(inside.parent / "2-b.lock", (0, 0))
    for name, unused_s, end in there:
        made(inside.parent, name, unused_s, end)
    installation.remove_old_versions()
    assert names(inside) == {"2-b", "2-b.lock"} | stay


def test_a_version_that_a_process_uses_stays(inside):
    made(inside.parent, "1-a", OLD_S)
    with (inside.parent / "1-a.lock").open() as used:
        fcntl.flock(used, fcntl.LOCK_SH)
        installation.remove_old_versions()
        assert {"1-a", "1-a.lock"} <= names(inside)
    installation.remove_old_versions()
    assert names(inside) == {"2-b", "2-b.lock"}


def test_elsewhere_nothing_is_removed(inside, monkeypatch):
    made(inside.parent, "1-a", OLD_S)
    monkeypatch.delenv(installation.ONE_FILE_VARIABLE)
    installation.remove_old_versions()
    assert "1-a" in names(inside)


@pytest.mark.parametrize(
    ("options", "program"),
    [
        pytest.param({}, ("/opt/gpuinfer",), id="which unpacks itself on the node"),
        pytest.param({"python": "/opt/python"}, ("/opt/python", "-m", "gpuinfer"), id="unless a Python is named"),
        pytest.param({"container": "image"}, ("python3", "-m", "gpuinfer"), id="or a container has one"),
    ],
)
def test_a_cluster_is_told_to_run_the_one_file(inside, options, program):
    assert SlurmLauncher(SlurmLauncher.Options(**options)).command == program

"""The user's folder of plugins: seen last, and only where nobody else can put code into it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packages import install

from gpuinfer.config import registry
from gpuinfer.host import installation

BACKEND = """
    from gpuinfer.api import Backend, Limits
    class Good(Backend):
        '''Answers each row with itself.'''
        limits = Limits(1)
        async def infer(self, batch):
            return [request.payload for request in batch]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    place = tmp_path / "plugins"
    place.mkdir(mode=0o700)
    monkeypatch.setenv(installation.PLUGIN_FOLDER_VARIABLE, str(place))
    monkeypatch.setattr(sys, "path", list(sys.path))
    registry.search_again()
    return place


def test_it_comes_last_so_that_it_hides_nothing(folder):
    assert installation.add_plugin_folder() is None
    assert sys.path[-1] == str(folder)
    installation.add_plugin_folder()
    assert sys.path.count(str(folder)) == 1


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_not_used_and_said_to_be_so(folder, mode):
    folder.chmod(mode)
    problem = installation.add_plugin_folder()
    assert problem is not None
    assert f"mode {mode:04o}" in problem
    assert problem.endswith(f"chmod go-w {folder}.")
    assert str(folder) not in sys.path


def test_a_folder_above_it_that_anyone_may_write_to_is_as_bad(folder):
    folder.parent.chmod(0o777)
    assert f"others may write to {folder.parent} " in str(installation.add_plugin_folder())
    folder.parent.chmod(0o1777)  # as of /tmp: nobody can exchange what is another's
    assert installation.add_plugin_folder() is None


def test_a_folder_of_another_users_is_not_used(folder, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    if folder.stat().st_uid:
        assert "belongs to another user" in str(installation.add_plugin_folder())
    else:  # root's folders are anyone's to use
        os.chown(folder, 4712, -1)
        assert "belongs to another user" in str(installation.add_plugin_folder())


def test_a_link_is_judged_by_where_it_leads(folder, tmp_path, monkeypatch):
    folder.chmod(0o777)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.setenv(installation.PLUGIN_FOLDER_VARIABLE, str(tmp_path / "link"))
    assert "mode 0777" in str(installation.add_plugin_folder())


def gpuinfer(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpuinfer", *words],
        env={**os.environ, installation.PLUGIN_FOLDER_VARIABLE: str(folder), "COLUMNS": "150"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_command_sees_what_lies_there(folder):
    install(folder, "acme", {"backends": {"good": "acme_folder:Good"}}, {"acme_folder": BACKEND})
    done = gpuinfer("plugins", "list", folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Answers each row with itself." in done.stdout
    assert any(line.split()[:3] == ["acme", "1.0", "folder"] for line in done.stdout.splitlines()), done.stdout


def test_the_command_says_why_it_does_not_look_there(folder):
    install(folder, "acme", {"backends": {"good": "acme_folder:Good"}}, {"acme_folder": BACKEND})
    folder.chmod(0o777)
    done = gpuinfer("plugins", "list", folder=folder)
    assert done.returncode == 0
    assert "acme" not in done.stdout
    assert done.stderr.startswith(f"gpuinfer: the plugins in {folder} are not used: others may write")

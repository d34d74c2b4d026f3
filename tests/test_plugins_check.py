"""`gpuinfer plugins check` on a package that is broken in many ways: each fault is named, and the rest goes on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import forking
import pytest
from packages import install

from gpuinfer.config import registry
from gpuinfer.errors import UsageError
from gpuinfer.testing import check_package

HERE = Path(__file__).parent
POINTS = {
    "backends": {"crashing": "broken_plugins:Crashing", "hanging": "broken_plugins:Hanging"},
    "strategies": {"late": "broken_plugins:Late"},
    "workloads": {"needy": "broken_plugins:Needy"},
    "games": {"small": "small_nim:Nim"},
}


def install_broken(folder: Path, points=POINTS) -> None:
    install(folder, "broken", points, {"broken_plugins": (HERE / "broken_plugins.py").read_text()})
    nim = (HERE.parent / "examples" / "nim.py").read_text()
    (folder / "small_nim.py").write_text(nim.replace("self.words = LAST + 1", "self.words = LAST"))


def check(what: str, folder: Path, columns: int) -> subprocess.CompletedProcess[str]:
    """The command, with what is installed in the folder."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    own = forking.own_environment(PYTHONPATH=path, COLUMNS=str(columns))
    words = [sys.executable, "-m", "gpuinfer", "plugins", "check", what, "--each", "1s"]
    return subprocess.run(words, env=own, cwd=folder, capture_output=True, text=True, timeout=300)


FAULTS = {
    "backend hanging": [
        "✗ answers each request with its own rows did not end within 1 s.",
        "– answers in order not tried: 'answers each request with its own rows' did not end",
        "✓ closes",
    ],
    "backend crashing": ["✗ starts its process ended: a last word (exit code 3)."],
    "strategy late": [
        "✗ cuts in the end with a lone request: it never cuts",
        "– serves every request of a random load not tried",
    ],
    "workload needy": ["needs place, which has no default. Check it with --set place=VALUE."],
    "game small": [
        "✗ plays within its sizes, in plain Python with bounds checked `deal` (small_nim.py, line",
        "Declare words = 5 or more.",
        "– plays the same when compiled not tried: compiled, it would write where it may not",
    ],
}


@pytest.mark.thorough
def test_each_fault_of_a_package_is_named_beside_its_plugin_and_they_are_counted(tmp_path):
    install_broken(tmp_path)
    done = check("broken", tmp_path, columns=80)
    assert done.returncode == 4, done.stdout + done.stderr
    assert re.search(r"^\d+ of \d+ checks hold, 5 do not, \d+ were not tried$", done.stdout, re.M), done.stdout
    for plugin, faults in FAULTS.items():
        part = re.search(rf"^{plugin}\n((?:  .*\n)+)", done.stdout, re.M)
        assert part is not None, done.stdout
        assert [fault for fault in faults if fault not in re.sub(r"\n    ", " ", part[1])] == []


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setenv(registry.DISABLED, "")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.thorough
def test_options_can_be_given_and_a_workload_runs_with_worker_processes(site):
    install_broken(site, {"workloads": {"needy": "broken_plugins:Needy"}})
    told = []
    findings = check_package(
        "broken",
        given={"place": "here", "needy.names": "a,b", "nmae": "c"},
        tell=lambda plugin, check, finding: told.append((plugin, check, finding)),
    )
    broken = {finding.name: finding.detail for finding in findings if not finding.ok}
    assert broken == {"--set nmae: is an option": "no plugin of this package has it. See gpuinfer plugins show."}
    assert ("workload needy", "runs and tells how far it is", None) in told  # before it was tried


def test_the_time_for_a_package_has_an_end(site):
    install_broken(site, {kind: POINTS[kind] for kind in ("strategies", "workloads")})
    findings = check_package("broken", limit_s=0.01)
    assert [(finding.name, finding.ok) for finding in findings] == [
        ("strategy late: starts", False),
        ("workload needy: is checked", False),
    ]
    assert "the limit of 0.01 s for the package is over" in findings[0].detail
    with pytest.raises(UsageError, match="no installed package 'no-such-package'"):
        check_package("no-such-package")


@pytest.mark.soak
def test_a_game_in_order_passes_every_check(site, monkeypatch):
    """Among them the compiled search against the plain one: half a minute of compiling."""
    from gpuinfer.testing import assert_ok
    from gpuinfer.testing.games import check_game

    shutil.copy(HERE.parent / "examples" / "nim.py", site / "whole_nim.py")
    module = __import__("whole_nim")
    assert_ok(check_game(module.Nim, {"largest": 3}))


@pytest.mark.parametrize(
    ("path", "code", "said"),
    [
        ("small_nim:Nim", 4, "`deal` (small_nim.py, line"),
        ("broken_plugins:Late", 4, "strategy broken_plugins:Late"),
        ("small_nim:HEAPS", 2, "is no class of a game, backend, strategy"),
        ("small_nim:Nimm", 2, "has no attribute 'Nimm'"),
        ("no_such_module:Nim", 2, "no module named 'no_such_module'"),
    ],
)
def test_a_class_is_checked_by_its_path(site, gpuinfer, monkeypatch, path, code, said):
    install_broken(site)
    monkeypatch.chdir(site)
    for name in ("small_nim", "broken_plugins"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    each = "1s" if "Late" in path else "60s"
    ended, out, err = gpuinfer("plugins", "check", path, "--each", each)
    assert (ended, said in " ".join((out + err).split())) == (code, True), out + err

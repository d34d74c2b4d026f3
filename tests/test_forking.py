"""A forked command is one of its own: its folder, environment, output and exit code, its workers, and an end."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from forking import Forked, own_environment, run

SAYS = """
import os, sys
print(os.getcwd(), sys.argv[1:], repr(sys.stdin.read()), os.environ.get("MOOD"), os.getsid(0) == os.getpid())
sys.exit(3)
"""
SPAWNS = """
import multiprocessing

def twice(number):
    return 2 * number

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(twice, [4, 5]))
"""


@pytest.fixture
def folder(tmp_path):
    for name, text in {"says": SAYS, "spawns": SPAWNS, "fails": "raise ValueError('as it should')\n"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(1e6)\n")
    (tmp_path / "elsewhere").mkdir()
    return tmp_path


@pytest.mark.thorough
def test_it_has_a_folder_an_environment_a_session_an_output_and_an_exit_code_of_its_own(folder):
    done = run(["says", "--now"], folder, own_environment(MOOD="good"))
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout == f"{folder} ['--now'] '' good True\n"
    failed = run(["fails"], folder)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "ValueError: as it should" in failed.stderr
    there = own_environment(PYTHONPATH=os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    assert run([folder / "says.py"], folder / "elsewhere").stdout.startswith(f"{folder}/elsewhere [] ")
    assert [run(["says"], folder / "elsewhere", one).returncode for one in (None, there)] == [1, 3]
    for program in ("spawns", "spawns.py"):  # its worker processes find their main module
        assert run([program], folder).stdout == "[8, 10]\n"


@pytest.mark.thorough
def test_it_reads_what_it_is_given_and_a_signal_ends_it(folder):
    with Forked(["says"], folder, text=True) as process:
        out, _ = process.communicate("a line\n")
    assert "'a line\\n'" in out
    with Forked(["hangs"], folder) as process:
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM
    with pytest.raises(subprocess.TimeoutExpired):
        run(["hangs"], folder, timeout=0.5)
    assert run(["gpuinfer", "--version"], folder).stdout.startswith("gpuinfer ")

"""A forked command is one of its own: its folder, its output, its exit code, and an end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_commands import ForkedCommands

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def commands() -> Iterator[ForkedCommands]:
    made = ForkedCommands({**os.environ, "PYTHONPATH": str(ROOT)})
    yield made
    made.close()


@pytest.mark.thorough
def test_it_has_a_folder_an_output_and_an_exit_code_of_its_own(commands, tmp_path):
    (tmp_path / "shown.py").write_text(
        "import os, sys\nprint(os.getcwd(), sys.argv, sys.stdin.read() == '')\nsys.exit(3)\n"
    )
    (tmp_path / "fails.py").write_text("raise ValueError('as it should')\n")
    done = commands.run(["shown", "--now"], tmp_path, 60)
    assert done.returncode == 3
    assert done.stdout.split()[0] == str(tmp_path)
    assert done.stdout.endswith("True\n")
    assert done.stderr == ""
    failed = commands.run(["fails"], tmp_path, 60)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "ValueError: as it should" in failed.stderr


@pytest.mark.thorough
def test_one_that_does_not_end_is_ended_and_the_next_one_runs(commands, tmp_path):
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(1e6)\n")
    with pytest.raises(subprocess.TimeoutExpired):
        commands.run(["hangs"], tmp_path, 0.5)
    assert commands.run(["gpuinfer", "--version"], tmp_path, 60).stdout.startswith("gpuinfer ")

"""Where the JSON report goes, and what must not be harmed there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest

from gpuinfer.cli.output import Destination
from gpuinfer.errors import UsageError, WorkError

REPORT = {"schema": "gpuinfer.report/1"}


def test_a_file_is_replaced_as_a_whole(tmp_path):
    target = tmp_path / "r.json"
    target.write_text("old")
    Destination(str(target)).write(REPORT)
    assert json.loads(target.read_text()) == REPORT
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_a_link_stays_one_and_what_it_leads_to_is_written(tmp_path):
    target, link = tmp_path / "r.json", tmp_path / "link.json"
    link.symlink_to(target)
    Destination(str(link)).write(REPORT)
    assert link.is_symlink()
    assert json.loads(target.read_text()) == REPORT


def test_a_pipe_stays_one_and_its_reader_gets_the_report(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    heard = []
    reader = threading.Thread(target=lambda: heard.append(pipe.read_text()), daemon=True)
    reader.start()
    Destination(str(pipe)).write(REPORT)
    reader.join(30)
    assert pipe.is_fifo()
    assert json.loads(heard[0]) == REPORT


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_device_is_left_in_place_and_told_of():
    with pytest.raises(WorkError, match="Make room"):
        Destination("/dev/full").write(REPORT)
    assert not os.path.isfile("/dev/full")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_standard_output_is_told_of():
    code = "from gpuinfer.cli.output import Destination; Destination('-').write({'schema': 'x'})"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, timeout=200)
    assert "WorkError: the report could not be written to standard output" in done.stderr


def test_a_folder_that_is_not_there_is_refused_before_the_work(tmp_path):
    with pytest.raises(UsageError, match="mkdir -p"):
        Destination(str(tmp_path / "none" / "r.json"))

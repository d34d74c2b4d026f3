"""A replica's last words are its own: attempts share a log."""

from __future__ import annotations

import sys

import pytest
from plans import SECONDS, plan

from gpuinfer.errors import WorkError
from gpuinfer.fleet.launchers.base import last_log_lines
from gpuinfer.fleet.launchers.local import LocalLauncher


async def test_one_that_says_nothing_is_not_given_the_words_of_the_one_before(tmp_path):
    says = "import os, sys; sys.argv[1].endswith('one') and print('out of memory', flush=True); os.kill(os.getpid(), 9)"
    local = LocalLauncher(command=(sys.executable, "-c", says))
    first = await local.launch(plan(tmp_path, "one"))
    with pytest.raises(WorkError, match=r'Its last words: "out of memory"'):
        await first.ready(SECONDS)
    await first.kill()
    second = await local.launch(plan(tmp_path, "two", attempt=1))
    with pytest.raises(WorkError, match=r"ended before it served \(SIGKILL\)\. It said nothing\."):
        await second.ready(SECONDS)
    assert second.last_words() == ""
    await second.kill()


def test_a_log_that_was_cut_shorter_holds_later_words_alone(tmp_path):
    log = tmp_path / "replica-0.log"
    log.write_text("long ago\n" * 100)
    begins = log.stat().st_size
    log.write_text("out of memory\n")
    assert last_log_lines(log, begins) == "out of memory"

"""Whose the cores are, told from what the system counts: planted systems, and this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuinfer.host.cpu_contention import CoreTime, core_time

TICK = 1 / os.sysconf("SC_CLK_TCK")


def process(proc: Path, number: int, parent: int, *times: int, name: str = "python") -> None:
    """A process that has run so many ticks: in user and system mode, and its children that have ended, likewise."""
    (proc / str(number)).mkdir()
    unread = " ".join(["0"] * 9)
    told = f"{number} ({name}) S {parent} {unread} {' '.join(map(str, times))} 20 0 1"
    (proc / str(number) / "stat").write_text(told)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """Two cores; this process, a child, a grandchild, and a stranger with children of its own."""
    (tmp_path / "stat").write_text(
        "cpu  300 20 40 500 9 3 2 15 7 0\n"
        "cpu0 200 10 30 100 4 1 1 10 7 0\n"
        "cpu1 100 10 10 400 5 2 1 5 0 0\n"
        "intr 12345 0 0\n"
    )
    (tmp_path / "self").mkdir()
    process(tmp_path, os.getpid(), 1, 50, 10, 4, 2)
    process(tmp_path, 900_001, os.getpid(), 20, 0, 0, 0, name="a (child) of ours")
    process(tmp_path, 900_002, 900_001, 30, 1, 0, 0)
    process(tmp_path, 900_003, 1, 99, 0, 0, 0)
    process(tmp_path, 900_004, 900_003, 7, 0, 0, 0)
    return tmp_path


def test_what_this_program_ran_is_its_own_and_all_that_it_started(proc: Path) -> None:
    time = core_time(proc, cores=2)
    assert time is not None
    assert time.ours == pytest.approx((66 + 20 + 31) * TICK)
    assert time.busy == pytest.approx((300 + 20 + 40 + 3 + 2) * TICK)
    assert time.stolen == pytest.approx(15 * TICK)
    assert time.others == pytest.approx((365 - 117) * TICK)


def test_a_quota_of_fewer_cores_than_are_counted_tells_nothing(proc: Path) -> None:
    assert core_time(proc, cores=1) is None


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param("cpu0 1 2\ncpu1 1 2\n", id="too few counters"),
        pytest.param("cpu0 a b c\ncpu1 a b c\n", id="no numbers"),
        pytest.param("", id="empty"),
    ],
)
def test_counters_that_cannot_be_read_tell_nothing(damage: str, proc: Path) -> None:
    (proc / "stat").write_text(damage)
    assert core_time(proc, cores=2) is None


def test_a_machine_that_counts_less_than_we_ran_is_not_believed() -> None:
    assert CoreTime(ours=9.0, busy=20.1).since(CoreTime(ours=4.0, busy=20.0)) is None


def test_here_what_this_process_runs_is_counted_as_ours() -> None:
    before = core_time()
    if before is None:
        pytest.skip("this system does not tell")
    spent = sum(os.times()[:2])
    while sum(os.times()[:2]) < spent + 5 * TICK:
        pass
    after = core_time()
    assert after is not None
    assert after.ours >= before.ours + 4 * TICK


THREADS = """
import os, threading, zlib
from gpuinfer.host.machine import cpu_times

os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
data = os.urandom(1 << 20)
told = [cpu_times()[1]]
threads = [threading.Thread(target=lambda: [zlib.compress(data) for _ in range(8)]) for _ in range(3)]
for thread in threads:
    thread.start()
while any(thread.is_alive() for thread in threads):
    told.append(cpu_times()[1])
    threads[0].join(0.02)
for thread in threads:
    thread.join()
told.append(cpu_times()[1])
assert told == sorted(told), told
assert told[-1] - told[0] > 0.1, told  # three took turns on one core
if (child := os.fork()) == 0:
    os._exit(cpu_times()[1] >= told[-1])  # which are not its own
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="a system that does not tell")
def test_what_threads_waited_for_a_core_is_kept_once_they_have_ended() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

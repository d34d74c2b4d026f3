"""Of several processes that need a kernel at once one compiles it; one that is killed or never ends stops nobody."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from gpuinfer.host import compile_status
from gpuinfer.models import kernel_cache
from gpuinfer.stats import Lane

PROGRAM = '''
import sys
import time
from pathlib import Path

import numpy as np
from numba.core import event

from gpuinfer.models.kernel_cache import compiler

here, name = Path(sys.argv[1]), sys.argv[2]


class Compiling(event.Listener):
    """Says so, and goes on when it is told."""

    def on_start(self, it):
        (here / f"{name}.compiles").touch()
        while not (here / "go").exists():
            time.sleep(0.01)

    def on_end(self, it):
        pass


event.register("numba:compile", Compiling())


@compiler([Path(__file__)])
def doubled(values):
    return values * 2.0


assert doubled(np.ones(3)).tolist() == [2.0, 2.0, 2.0]
print(sum(doubled.stats.cache_hits.values()), sum(doubled.stats.cache_misses.values()))
'''


def until(holds):
    ends = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.02)


def has_open(process, suffix):
    for path in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since they were listed
            if str(path.readlink()).endswith(suffix):
                return True
    return False


@pytest.mark.thorough
@pytest.mark.parametrize("killed", [False, True], ids=["one compiles, one loads", "the one that compiles is killed"])
def test_one_process_compiles_what_two_need(tmp_path, killed):
    (tmp_path / "program.py").write_text(PROGRAM)

    def start(name):
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path), name]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    with start("first") as first:
        try:
            until((tmp_path / "first.compiles").exists)
            with start("second") as second:
                try:
                    until(lambda: has_open(second, ".lock"))  # it waits
                    assert not (tmp_path / "second.compiles").exists()
                    if killed:
                        first.kill()
                    (tmp_path / "go").touch()
                    found = [one.communicate(timeout=120)[0].split() for one in (first, second)]
                finally:
                    second.kill()
        finally:
            first.kill()
    assert found == ([[], ["0", "1"]] if killed else [["0", "1"], ["1", "0"]])


def twice(value):
    return value * 2.0


def test_whoever_waited_long_enough_compiles_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_cache, "LOOKS", 3)
    doubled = kernel_cache.compiler([Path(__file__)])(twice)
    name = f"{__name__}.twice-{twice.__code__.co_firstlineno}.lock"
    with (kernel_cache.folder_for([Path(__file__)]) / name).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert doubled(np.float64(4.0)) == 8.0
    assert sum(doubled.stats.cache_misses.values()) == 1


@pytest.mark.parametrize("way", ["compiled", "refused by the compiler"])
def test_the_lock_is_free_afterwards(tmp_path, monkeypatch, way):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    doubled = kernel_cache.compiler([Path(__file__)])(twice)
    if way == "compiled":
        doubled(np.float64(4.0))
    else:
        with pytest.raises(Exception, match="Failed in nopython mode"):
            doubled({"a": 1})
    (lock,) = tmp_path.rglob("*.lock")
    with lock.open("w") as free:
        fcntl.flock(free, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not compile_status.is_compiling()


def test_what_a_thread_compiles_is_a_station_of_its_lane():
    lane = Lane("forward 0")
    lane.enter("sample")
    with_kernel = kernel_cache.compiler([Path(__file__)])(lambda x: x + 1)

    def first_call():
        compile_status.set_lane(lambda: lane)
        with_kernel(np.float64(1))
        with_kernel(np.float64(2))

    thread = threading.Thread(target=first_call)
    thread.start()
    thread.join(60)
    assert lane.station == "sample"
    assert lane.visits()["compile"] == 1
    assert lane.stations()["compile"] > 0

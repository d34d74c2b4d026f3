"""Of several processes that need a kernel at once one compiles it; one that is killed or never ends stops nobody."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
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


class Companions:
    """Processes that run the program, on a cache that is empty at first."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.program, self.all = folder, folder / "program.py", []
        self.program.write_text(PROGRAM)

    def start(self, name: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(self.folder / "cache")}
        command = [sys.executable, str(self.program), str(self.folder), name]
        self.all.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        return self.all[-1]

    def compiles(self, name: str) -> bool:
        return (self.folder / f"{name}.compiles").exists()

    def waits(self, one: subprocess.Popen[str]) -> bool:
        """Whether it has the lock's file open."""
        for path in Path(f"/proc/{one.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since they were listed
                if str(path.readlink()).endswith(".lock"):
                    return True
        return False

    def go(self) -> None:
        (self.folder / "go").touch()


@pytest.fixture
def companions(tmp_path: Path) -> Iterator[Companions]:
    made = Companions(tmp_path)
    yield made
    for one in made.all:
        one.kill()
        one.communicate()


def until(holds: Callable[[], bool], limit_s: float = 120.0) -> None:
    ends = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.02)


def one_compiles_and_one_waits(companions):
    first = companions.start("first")
    until(lambda: companions.compiles("first"))
    second = companions.start("second")
    until(lambda: companions.waits(second))
    return first, second


@pytest.mark.thorough
def test_one_process_compiles_what_two_need_and_the_other_loads_it(companions):
    first, second = one_compiles_and_one_waits(companions)
    companions.go()
    found = [one.communicate(timeout=120)[0].split() for one in (first, second)]
    assert found == [["0", "1"], ["1", "0"]]
    assert not companions.compiles("second")


@pytest.mark.thorough
def test_when_the_one_that_compiles_is_killed_the_other_compiles(companions):
    first, second = one_compiles_and_one_waits(companions)
    assert not companions.compiles("second")
    first.send_signal(signal.SIGKILL)
    companions.go()
    assert second.communicate(timeout=120)[0].split() == ["0", "1"]


def test_whoever_waited_long_enough_compiles_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_cache, "LOOKS", 3)
    doubled = kernel_cache.compiler([Path(__file__)])(twice)
    code = twice.__code__
    lock = kernel_cache.folder_for([Path(__file__)]) / f"{__name__}.twice-{code.co_firstlineno}.lock"
    with lock.open("w") as held:
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


def twice(value):
    return value * 2.0


def test_what_a_thread_compiles_is_a_station_of_its_lane(tmp_path):
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

"""Which kernels this process compiles now, or waits for another process to have compiled, and the time that takes in
the ledger. Compiled code is kept on disk, so whether one must be compiled is known only to whoever has looked for it
there (`gpuinfer/models/kernel_cache.py`), and is noted here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

NOTE = "compiling kernels: once on this machine, a minute or two"  # for people

_under_way: set[Hashable] = set()


def begin(what: Hashable) -> None:
    """It was not on the disk. Ends with `end`; from any thread."""
    _under_way.add(what)


def end(what: Hashable) -> None:
    """It is there, or could not be compiled. May be called for what was never begun."""
    _under_way.discard(what)


STATION = "compile"  # of the ledger: kernels are loaded from the disk, or compiled

_own = threading.local()


def set_lane(lane: Callable[[], Any]) -> None:
    """From now on what the calling thread loads and compiles is a station of its own, in the lane that this names."""
    _own.lane = lane


@contextlib.contextmanager
def in_compile_station() -> Iterator[None]:
    """Around loading or compiling a kernel, and those that it calls."""
    lane: Any = getattr(_own, "lane", lambda: None)()
    station = getattr(lane, "station", STATION)
    if lane is None or station == STATION:  # within another, or nobody keeps a ledger
        yield
        return
    lane.enter(STATION)
    try:
        yield
    finally:
        lane.enter(station)


def is_compiling() -> bool:
    return bool(_under_way)

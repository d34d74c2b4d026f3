"""On which station of which lane a thread has spent its time on a core, by the thread's own clock.

A lane says where it is, not whether it had a core: ten lanes that take turns on one core are each busy a tenth of the
time. What a thread ran between two stations that it entered belongs to the first of them. A lane's station may be
entered by one thread and left by another, and a thread may enter the stations of many lanes; so each thread keeps its
own account, and no second of it is given out twice.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

READ_S = 0.0005  # between two readings of the thread's clock, which takes a call of the system
NOWHERE = "idle"  # a lane that waits: whatever its thread runs then is not for it


class Spender(Protocol):
    """A lane, as far as this file knows it."""

    stays: int  # how many stations it has entered so far
    ran: dict[str, float]  # station → seconds on a core


Stay = tuple[Spender, str, int, float]
"""The lane, the station, which of the lane's stays it is, and since when."""


class _Account:
    """A thread's."""

    __slots__ = ("ended", "open", "ran", "read_at")

    def __init__(self) -> None:
        self.read_at, self.ran = time.monotonic(), time.thread_time()
        self.open: Stay | None = None
        self.ended: list[tuple[Spender, str, float]] = []  # since the last reading: lane, station, seconds in it


class _Own(threading.local):
    def __init__(self) -> None:
        self.account = _Account()


_own = _Own()


def entered(lane: Spender, station: str) -> None:
    """The calling thread has just taken this lane into this station."""
    account, now = _own.account, time.monotonic()
    if account.open is not None:
        last, place, number, since = account.open
        # one that another thread has ended meanwhile is nobody's: how long it lasted is not known here
        if place != NOWHERE and last.stays == number + (last is lane):
            account.ended.append((last, place, now - since))
    account.open = (lane, station, lane.stays, now)
    if now - account.read_at >= READ_S:
        _share_out(account, now)


def _share_out(account: _Account, now: float) -> None:
    """Give what the thread ran since the last reading to the stations that it was in, each by its length."""
    ran = time.thread_time()
    lasted = sum(seconds for _, _, seconds in account.ended)
    share = min(1.0, (ran - account.ran) / lasted) if lasted > 0 else 0.0
    for lane, station, seconds in account.ended:
        lane.ran[station] = lane.ran.get(station, 0.0) + seconds * share
    account.ended.clear()
    account.read_at, account.ran = now, ran

"""Memory that goes back to the system, and the thread that looks when it should."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from gpuinfer.host.process_memory import consecutive_runs, give_back, resident_bytes
from gpuinfer.models import memory_watch
from gpuinfer.models.memory_watch import MemoryWatch

WAIT_S = 60.0


@pytest.mark.parametrize(
    ("numbers", "runs"),
    [([], []), ([3], [(3, 4)]), ([0, 1, 2], [(0, 3)]), ([7, 2, 1, 5, 1, 6], [(1, 3), (5, 8)])],
)
def test_numbers_become_runs_without_gaps(numbers, runs):
    assert list(consecutive_runs(numbers)) == runs


def test_memory_that_goes_back_is_no_longer_resident_and_zero_and_its_neighbours_stay():
    held = np.ones(64 << 20, np.uint8)
    before = resident_bytes()
    give_back(held.ctypes.data + 100, (48 << 20) - 100)
    assert before - resident_bytes() > 32 << 20
    assert held[:100].all()
    assert held[48 << 20 :].all()
    assert not held[8192 : 40 << 20].any()
    held[8192] = 5
    assert held[8192] == 5


def test_a_watch_fits_what_is_due_goes_on_after_a_failure_and_ends_when_it_is_stopped(monkeypatch):
    monkeypatch.setattr(memory_watch, "LOOK_S", 0.001)
    monkeypatch.setattr(memory_watch, "MOST_LOOKS", 2)
    looked, fitted, due = [], threading.Event(), iter([True, False, True, True])

    def is_due():
        looked.append(None)
        if len(looked) == 2:
            raise OSError("not now")
        return next(due, False)

    def fit():
        if len(looked) >= 4:
            fitted.set()
        return False

    watch = MemoryWatch(is_due, fit)
    assert fitted.wait(WAIT_S)
    watch.stop()
    (thread,) = [one for one in threading.enumerate() if one.name == "gpuinfer-memory"] or [None]
    if thread is not None:
        thread.join(WAIT_S)
        assert not thread.is_alive()

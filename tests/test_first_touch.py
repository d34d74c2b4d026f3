"""What the first touch of memory costs, told from the other time that a thread spends in the system."""

import mmap

import pytest

from gpuinfer.host.process_memory import FaultUsage, FirstTouchCost, fault_usage


@pytest.mark.parametrize(
    ("turns", "system_s", "faults", "low", "high"),
    [
        (50, lambda turn: 0.008, lambda turn: 0, 0.0, 0.0),
        (100, lambda turn: 0.001 + 0.01 * (turn % 2), lambda turn: 1000 * (turn % 2), 0.475, 0.525),
        (300, lambda turn: 0.01, lambda turn: turn % 3, 0.0, 0.3),  # waiting is not taken for faults
        (80, lambda turn: 0.007 * (turn % 4), lambda turn: turn % 4, 0.798, 0.882),  # dear huge pages
        (20, lambda turn: 0.05 * (turn % 2), lambda turn: 10 * (turn % 2), 0.0, 0.6),  # no more than its own time
    ],
)
def test_faults_are_booked(turns, system_s, faults, low, high):
    now, booked = FaultUsage(0.0, 0.0, 0), []
    counted = FirstTouchCost(lambda: now)
    for turn in range(turns):
        counted.begin()
        now = FaultUsage(*(one + more for one, more in zip(now, (0.03, system_s(turn), faults(turn)), strict=True)))
        booked.append(counted.end())
    assert low <= sum(booked) <= high
    assert max(booked) <= 0.03 + 1e-12
    assert counted.faults == sum(map(faults, range(turns)))


def test_this_machine_counts_its_faults():
    before = fault_usage()
    with mmap.mmap(-1, 4 << 20) as fresh:
        for place in range(0, len(fresh), mmap.PAGESIZE):
            fresh[place] = 1
    assert fault_usage().faults > before.faults

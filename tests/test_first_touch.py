"""What the first touch of memory costs, told from the other time that a thread spends in the system."""

import mmap

import pytest

from gpuinfer.host.process_memory import FaultUsage, FirstTouchCost, fault_usage


class Machine:
    """A clock that goes as far as it is told."""

    def __init__(self):
        self.now = FaultUsage(0.0, 0.0, 0)
        self.counted = FirstTouchCost(lambda: self.now)

    def work(self, seconds, system_s=0.0, faults=0):
        self.counted.begin()
        self.now = FaultUsage(
            *(known + more for known, more in zip(self.now, (seconds, system_s, faults), strict=True))
        )
        return self.counted.end()


@pytest.mark.parametrize(
    ("turns", "system_s", "faults", "low", "high"),
    [
        pytest.param(50, lambda turn: 0.008, lambda turn: 0, 0.0, 0.0, id="no faults"),
        pytest.param(
            100,
            lambda turn: 0.001 + 0.01 * (turn % 2),
            lambda turn: 1000 * (turn % 2),
            0.475,
            0.525,
            id="added time",
        ),
        pytest.param(300, lambda turn: 0.01, lambda turn: turn % 3, 0.0, 0.3, id="waiting is not taken for faults"),
        pytest.param(80, lambda turn: 0.007 * (turn % 4), lambda turn: turn % 4, 0.798, 0.882, id="dear huge pages"),
        pytest.param(
            20, lambda turn: 0.05 * (turn % 2), lambda turn: 10 * (turn % 2), 0.0, 0.6, id="no more than its own time"
        ),
    ],
)
def test_faults_are_booked(turns, system_s, faults, low, high):
    machine = Machine()
    booked = [machine.work(0.03, system_s=system_s(turn), faults=faults(turn)) for turn in range(turns)]
    assert low <= sum(booked) <= high
    assert max(booked) <= 0.03 + 1e-12
    assert machine.counted.faults == sum(map(faults, range(turns)))


def test_this_machine_counts_its_faults():
    before = fault_usage()
    with mmap.mmap(-1, 4 << 20) as fresh:
        for place in range(0, len(fresh), mmap.PAGESIZE):
            fresh[place] = 1
    assert fault_usage().faults > before.faults

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


def test_where_nothing_faults_nothing_is_booked():
    machine = Machine()
    assert sum(machine.work(0.01, system_s=0.008) for _ in range(50)) == 0.0


def test_faults_take_the_time_that_they_add():
    machine = Machine()
    booked = 0.0
    for turn in range(100):
        faults = 1000 * (turn % 2)
        booked += machine.work(0.02, system_s=0.001 + 1e-5 * faults, faults=faults)
    assert booked == pytest.approx(50 * 0.01, rel=0.05)
    assert machine.counted.faults == 50_000


def test_waiting_in_the_system_is_not_taken_for_faults():
    machine = Machine()
    booked = sum(machine.work(0.02, system_s=0.01, faults=turn % 3) for turn in range(300))
    assert booked < 0.1 * 300 * 0.01


def test_dear_pages_are_seen_as_dear():
    """A huge page that the machine below must find first: one fault, 7 ms."""
    machine = Machine()
    booked = sum(machine.work(0.03, system_s=0.007 * (turn % 4), faults=turn % 4) for turn in range(80))
    assert booked == pytest.approx(0.007 * 120, rel=0.05)


def test_no_stretch_has_more_than_its_own_time():
    machine = Machine()
    for turn in range(20):
        assert machine.work(0.01, system_s=0.05 * (turn % 2), faults=10 * (turn % 2)) <= 0.01 + 1e-12


def test_this_machine_counts_its_faults():
    before = fault_usage()
    with mmap.mmap(-1, 4 << 20) as fresh:
        for place in range(0, len(fresh), mmap.PAGESIZE):
            fresh[place] = 1
    assert fault_usage().faults > before.faults

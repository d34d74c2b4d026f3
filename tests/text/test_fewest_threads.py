"""Steps that wait for memory take as many threads as make them faster, and no more."""

from __future__ import annotations

import pytest

from gpuinfer.text.decoder.cpu_plan import AGAIN, SETTLE, TURNS, FewestThreads


def steps(choice, count, seconds, rows=1, most=8):
    """How many threads each of these steps had, where a step of `n` threads takes `seconds(n)`."""
    found = []
    for _ in range(count):
        threads = choice.threads_for(rows, most)
        choice.took(rows, threads, seconds(threads))
        found.append(threads)
    return found


def memory_of(threads_enough):
    """Seconds of a step where so many threads read as fast as memory gives."""
    return lambda threads: 1.0 / min(threads, threads_enough)


@pytest.mark.parametrize("enough", [1, 2, 4, 8])
def test_the_fewest_threads_that_reach_the_memory_compute(enough):
    choice = FewestThreads()
    steps(choice, SETTLE + 8 * TURNS, memory_of(enough))
    assert set(steps(choice, 100, memory_of(enough))) == {enough}


def test_a_number_that_is_far_slower_is_tried_once():
    found = steps(FewestThreads(), SETTLE + 100, memory_of(8))
    assert found.count(4) == 1
    assert set(found) == {4, 8}


def test_it_is_looked_at_again():
    choice = FewestThreads()
    steps(choice, SETTLE + 8 * TURNS, memory_of(2))
    steps(choice, AGAIN, memory_of(8))  # whoever else read memory is gone
    steps(choice, 8 * TURNS, memory_of(8))
    assert set(steps(choice, 100, memory_of(8))) == {8}


def test_another_number_of_threads_begins_anew():
    choice = FewestThreads()
    steps(choice, SETTLE + 8 * TURNS, memory_of(1))
    assert steps(choice, 2, memory_of(1), most=4) == [4, 4]
    assert steps(choice, 2, memory_of(1), most=1) == [1, 1]

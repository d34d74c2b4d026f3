"""How much of the copies is hidden behind compute: from marks of batches, from events, on a device of fake tensors."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from streamed import found
from test_leaves_on_fake_cuda import Reader, forward_of, rows_of, single
from test_leaves_on_fake_cuda import opened as opened_leaves
from test_rows_on_fake_cuda import block, opened, spec_of

from gpuinfer.models import copy_overlap
from gpuinfer.models.copy_overlap import UNTIMED, CopyOverlap, hidden_copies
from gpuinfer.models.device import merged_readings
from gpuinfer.models.model_object import LocalModel


@pytest.mark.parametrize(
    ("batches", "copied", "hidden"),
    [
        pytest.param([(0, 1, 4, 5), (5, 6, 9, 10)], 4, 0, id="one lane, whose batches follow one another"),
        pytest.param([(0, 1, 4, 5), (1, 2, 8, 9)], 4, 2, id="its copies in and the other's copies out"),
        pytest.param([(0, 1, 9, 9), (2, 4, 5, 8)], 6, 5, id="all of a batch beside another one's compute"),
        pytest.param([(0, 2, 6, 6), (1, 3, 7, 7)], 4, 1, id="half of a copy"),
        pytest.param([(0, 0, 3, 3), (3, 3, 6, 6)], 0, 0, id="no copies"),
        pytest.param([], 0, 0, id="no batches"),
    ],
)
def test_a_copy_is_hidden_while_another_batch_is_computed(batches, copied, hidden):
    assert hidden_copies(batches) == (copied, hidden)


def test_copies_of_the_first_and_last_batches_do_not_count():
    batches = [(10 * n, 10 * n + 1, 10 * n + 8, 10 * n + 9) for n in range(5)]
    assert hidden_copies(batches, 1) == (6, 0)


@given(st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4).map(sorted), max_size=12), st.integers(0, 3))
def test_never_more_is_hidden_than_is_copied(batches, edge):
    copied, hidden = hidden_copies(batches, edge)
    assert 0 <= hidden <= copied
    reference = 0  # instant by instant
    for marks in sorted(batches, key=lambda one: one[0])[edge : len(batches) - edge]:
        for begin, end in ((marks[0], marks[1]), (marks[2], marks[3])):
            reference += sum(any(one[1] <= now < one[2] for one in batches) for now in range(begin, end))
    assert hidden == min(reference, copied)


class Event:
    """An event at a planted time, in milliseconds."""

    at: float

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: float) -> None:
        self.at = stream

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(copy_overlap, "EVERY", 8)
    monkeypatch.setattr(copy_overlap, "WINDOW", 4)


def timed(overlap: CopyOverlap, *marks: float) -> None:
    batch = overlap.batch()
    for one in marks:
        batch.mark(one)
    batch.over()


def test_windows_of_batches_are_timed_and_others_are_not(small, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    overlap = CopyOverlap(lanes=1)
    for number in range(4):
        assert overlap.read() == {}, "before a window is whole there is no figure"
        timed(overlap, 10 * number, 10 * number + 2, 10 * number + 11, 10 * number + 13)
    # of the two in the middle, each copy of 2 ms is hidden for 1 ms behind the batch before or after it
    assert overlap.read() == {
        "transfers": {"copied_s": pytest.approx(0.008), "hidden_s": pytest.approx(0.004), "batches": 4}
    }
    for _ in range(4):
        assert overlap.batch() is UNTIMED
    failed = overlap.batch()
    failed.mark(0.0)
    failed.over(whole=False)
    failed.over(whole=False)
    for _ in range(3):
        timed(overlap, 0, 1, 2, 3)
    assert overlap.read()["transfers"]["batches"] == 4, "a window in which a batch failed does not count"


def test_threads_may_end_their_batches_in_any_order(small, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    overlap = CopyOverlap(lanes=1)
    made = [overlap.batch() for _ in range(4)]

    def end(number: int) -> None:
        for one in (10, 12, 18, 20):
            made[number].mark(number + one)
        made[number].over()

    threads = [threading.Thread(target=end, args=(number,)) for number in (3, 0, 2, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlap.read()["transfers"]["batches"] == 4


def test_forwards_on_a_device_mark_their_batches(cuda, small):
    flat = opened(spec_of())
    for _ in range(4):
        flat.forward([block(spec_of(), 5)])
    told = flat.device()["transfers"]
    assert told["batches"] == 4
    assert merged_readings([flat.device()] * 2)["transfers"]["batches"] == 8


def test_rows_of_any_shape_mark_theirs(cuda, small):
    leaves = opened_leaves(LocalModel(Reader()))
    for _ in range(8):
        leaves.forward([single(row) for row in rows_of(3)])
    assert leaves.device()["transfers"]["batches"] >= 4


def test_no_time_is_read_of_an_event_that_may_not_be_over(recorded, small):
    forward = forward_of(Reader())
    for _ in range(8):
        forward([single(row) for row in rows_of(3)])
    assert forward._copies.read()["transfers"]["batches"] == 4
    assert found(recorded) == []

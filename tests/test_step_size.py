"""How many rows go through at once when memory runs out, with several threads at it."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from gpuinfer.errors import BackendError
from gpuinfer.models.forward_cpu import CpuForward
from gpuinfer.models.out_of_memory import StepSize

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")


@pytest.mark.parametrize(
    ("failed", "left"),
    [
        pytest.param([64], 32, id="half of what failed"),
        pytest.param([64, 64, 64], 32, id="threads that fail together at one size count once"),
        pytest.param([64, 32], 16, id="and again"),
        pytest.param([5], 32, id="a rest that is smaller than a step: another thread's step is in the way"),
        pytest.param([1, 1], 16, id="a single row, while there are larger steps"),
    ],
)
def test_the_step_after_failures(failed, left):
    step = StepSize(64)
    for rows in failed:
        step.make_room(rows, FULL)
    assert step.rows == left


def test_a_single_row_is_given_up_once_no_step_is_larger():
    step = StepSize(2, "cuda:1")
    step.make_room(1, FULL)
    with pytest.raises(
        BackendError, match=r"a single row on cuda:1: CUDA out of memory\. Tried.*model, dtype bfloat16"
    ):
        step.make_room(1, FULL)


def test_a_step_that_was_begun_with_more_rows_is_waited_for():
    step = StepSize(64)
    with ThreadPoolExecutor(1) as other:
        with step.under_way(64):
            step.make_room(64, FULL)
            waits = other.submit(step.make_room, 32, FULL)
            until(lambda: step.waiting == 1)
        waits.result(60)
    assert step.rows == 32


def test_a_step_that_hangs_is_waited_for_once():
    step = StepSize(64, wait_s=0.0)
    with step.under_way(64):
        for _ in range(3):
            step.make_room(step.rows, FULL)
    assert step.rows == 8


def until(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_device_is_named_where_there_may_be_several(caplog):
    with caplog.at_level(logging.WARNING, "gpuinfer"):
        step = StepSize(64, "cuda:1")
        step.make_room(64, FULL)
        step.made(32)
    assert caplog.messages == [
        "out of memory at 64 rows on cuda:1: going on with at most 32 at a time. "
        "Set chunk_rows=32 (on the command line -B chunk_rows=32) to start there."
    ]


def test_nothing_is_advised_before_it_is_known_how_many_rows_fit(caplog):
    step = StepSize(1024)
    with caplog.at_level(logging.WARNING, "gpuinfer"):
        for rows in (64, 64, 64, 64, 64, 32):
            step.make_room(rows, FULL)
        step.made(5)  # a rest, of which nobody learns whether more would have fitted
        assert caplog.messages == []
        step.made(16)
        step.made(16)
    assert [one[: one.index("(")] for one in caplog.messages] == [
        "out of memory at 64 rows: going on with at most 16 at a time. Set chunk_rows=16 "
    ]


class Shared(nn.Module):
    """Threads that are in here at the same time have room for so many rows between them.

    Two of them with room for 24 never come to a single row: 16 and 8 fit, whoever is held up inside.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self._held, self._lock = room, 0, threading.Lock()

    def forward(self, rows):
        with self._lock:
            if self._held + len(rows) > self.room:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            self._held += len(rows)
        try:
            return rows.sum(1, keepdim=True)
        finally:
            with self._lock:
                self._held -= len(rows)


@pytest.mark.parametrize("fixed_shape", [False, True], ids=["any shape", "one shape"])
def test_lanes_that_share_a_model_go_on_with_smaller_steps_and_say_so_once(fixed_shape, caplog):
    forward = CpuForward(Shared(24), torch.float32, 64, fixed_shape)
    blocks = [np.random.default_rng(seed).random((100 + seed, 3), np.float32) for seed in range(12)]
    with caplog.at_level(logging.WARNING, "gpuinfer"), ThreadPoolExecutor(2) as lanes:
        answers = list(lanes.map(lambda block: forward([block])[0], blocks))
    for block, answer in zip(blocks, answers, strict=True):
        np.testing.assert_allclose(answer, block.sum(1, keepdims=True), rtol=1e-6)
    assert 4 <= forward.step.rows <= 24
    assert len([one for one in caplog.messages if "out of memory" in one]) == 1


class Held(Shared):
    """Its first step does not end before `released`."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.first, self.held, self.released = threading.Lock(), threading.Event(), threading.Event()

    def forward(self, rows):
        first = self.first.acquire(blocking=False)
        with self._lock:
            if self._held + len(rows) > self.room:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            self._held += len(rows)
        if first:
            self.held.set()
            assert self.released.wait(60)
        with self._lock:
            self._held -= len(rows)
        return rows.sum(1, keepdim=True)


@pytest.mark.parametrize("fixed_shape", [False, True], ids=["any shape", "one shape"])
def test_lanes_do_not_fail_beside_one_that_is_held_up_with_all_of_the_memory(fixed_shape):
    module = Held(64)
    forward = CpuForward(module, torch.float32, 64, fixed_shape)
    block = np.ones((100, 3), np.float32)
    with ThreadPoolExecutor(4) as lanes:
        one = lanes.submit(forward, [block])
        assert module.held.wait(60)
        others = [lanes.submit(forward, [block]) for _ in range(3)]
        try:
            until(lambda: forward.step.waiting == 3 or any(other.done() for other in others))
        finally:
            module.released.set()
        for lane in (one, *others):
            assert (lane.result(60)[0] == 3).all()
    assert forward.step.rows >= 8

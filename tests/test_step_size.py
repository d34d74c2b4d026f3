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
        ([64], 32),
        ([64, 64, 64], 32),  # threads that fail together at one size count once
        ([64, 32], 16),
        ([5], 32),  # a rest that is smaller than a step: another thread's step is in the way
        ([1, 1], 16),  # a single row, while there are larger steps
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
    with pytest.raises(BackendError, match=r"a single row on cuda:1: CUDA out of memory\..*model, dtype bfloat16"):
        step.make_room(1, FULL)


def test_a_larger_step_under_way_is_waited_for_and_one_that_hangs_once():
    step = StepSize(64)
    with ThreadPoolExecutor(1) as other:
        with step.under_way(64):
            step.make_room(64, FULL)
            waits = other.submit(step.make_room, 32, FULL)
            until(lambda: step.waiting == 1)
        waits.result(60)
    assert step.rows == 32
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


@pytest.mark.parametrize(
    ("device", "first", "failed", "made", "said"),
    [
        ("cuda:1", 64, [64], [32], "64 rows on cuda:1: going on with at most 32 at a time. Set chunk_rows=32 "),
        # of a rest of 5 nobody learns whether more would have fitted
        ("", 1024, [64] * 5 + [32], [5, 16, 16], "64 rows: going on with at most 16 at a time. Set chunk_rows=16 "),
    ],
)
def test_the_size_is_advised_once_and_only_when_it_is_known(caplog, device, first, failed, made, said):
    step = StepSize(first, device)
    with caplog.at_level(logging.WARNING, "gpuinfer"):
        for rows in failed:
            step.make_room(rows, FULL)
        assert caplog.messages == []
        for rows in made:
            step.made(rows)
    assert [one[: one.index("(")] for one in caplog.messages] == [f"out of memory at {said}"]


class Shared(nn.Module):
    """Threads that are in here at the same time have room for so many rows between them. The first step that `hold`
    says does not end before `released`.

    Two of them with room for 24 never come to a single row: 16 and 8 fit, whoever is held up inside.
    """

    def __init__(self, room: int, hold: bool = False) -> None:
        super().__init__()
        self.room, self.inside, self.lock = room, 0, threading.Lock()
        self.hold, self.held, self.released = hold, threading.Event(), threading.Event()

    def forward(self, rows):
        with self.lock:
            first, self.hold = self.hold, False
            if self.inside + len(rows) > self.room:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            self.inside += len(rows)
        try:
            if first:
                self.held.set()
                assert self.released.wait(60)
            return rows.sum(1, keepdim=True)
        finally:
            with self.lock:
                self.inside -= len(rows)


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


@pytest.mark.parametrize("fixed_shape", [False, True], ids=["any shape", "one shape"])
def test_lanes_do_not_fail_beside_one_that_is_held_up_with_all_of_the_memory(fixed_shape):
    module, block = Shared(64, hold=True), np.ones((100, 3), np.float32)
    forward = CpuForward(module, torch.float32, 64, fixed_shape)
    with ThreadPoolExecutor(4) as lanes:
        running = [lanes.submit(forward, [block])]
        assert module.held.wait(60)
        running += [lanes.submit(forward, [block]) for _ in range(3)]
        try:
            until(lambda: forward.step.waiting == 3 or any(other.done() for other in running[1:]))
        finally:
            module.released.set()
        for lane in running:
            assert (lane.result(60)[0] == 3).all()
    assert forward.step.rows >= 8

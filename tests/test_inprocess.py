"""The backend that runs the model in this process."""

import asyncio
import re
import shutil
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from one_batch import answered

from gpuinfer import api
from gpuinfer.api import BackendContext, ModelSpec, Request, Roofline, Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.errors import BackendDied, BackendError, UnknownName, UsageError
from gpuinfer.host.machine import cores
from gpuinfer.testing import assert_ok, check_backend

FEATURES, ACTIONS, SEATS = 32, 9, 4
MODEL = ModelSpec("blobnet-small", None, FEATURES, "uint8", {"actions": ACTIONS, "seats": SEATS})
BITS = replace(MODEL, input_dtype="bits")


def setup(**changes):
    return Setup(**{"model": MODEL, "devices": ("cpu",), "processes": cores(), **changes})


def request(rows, seed=0):
    block = np.random.default_rng(seed).integers(0, 2, (rows, FEATURES), dtype=np.uint8)
    return Request(block, rows)


async def answers(batch, a_setup=None, **options):
    return await answered(InProcess(a_setup or setup(), **options), batch)


async def started(a_setup=None, roofline=None, **options):
    backend = InProcess(a_setup or setup(), **options)
    await backend.start(BackendContext(roofline=roofline))
    return backend


def assert_alike(found, expected, tolerance=0.0):
    for ours, theirs in zip(found, expected, strict=True):
        for output, wanted in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(output, wanted, atol=tolerance, rtol=0)


async def test_each_request_gets_policy_and_values():
    batch = [request(3, 1), request(1, 2), request(7, 3)]
    for (policy, values), asked in zip(await answers(batch), batch, strict=True):
        assert (policy.shape, policy.dtype) == ((asked.rows, ACTIONS), np.float32)
        assert (values.shape, values.dtype) == ((asked.rows, SEATS), np.float32)
        legal = asked.payload[:, :ACTIONS]
        np.testing.assert_array_equal(np.isneginf(policy), (legal == 0) & legal.any(axis=1, keepdims=True))


@pytest.mark.parametrize("chunk_rows", [None, 5])
async def test_batched_answers_are_those_of_rows_asked_one_at_a_time(chunk_rows):
    block = request(40).payload
    backend = await started(chunk_rows=chunk_rows)
    batched = await backend.infer([Request(block, 40)])
    singly = [(await backend.infer([Request(block[row : row + 1], 1)]))[0] for row in range(40)]
    await backend.close()
    assert_alike(batched, [[np.concatenate(part) for part in zip(*singly, strict=True)]], 1e-5)


async def test_two_copies_with_one_seed_answer_alike():
    first, again, other = [await answers([request(6)], setup(seed=seed)) for seed in (4, 4, 5)]
    assert_alike(first, again)
    assert not np.array_equal(first[0][1], other[0][1])


@pytest.mark.parametrize(("dtype", "compute"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "bfloat16")])
async def test_when_deterministic_the_number_of_processes_changes_no_bit(dtype, compute):
    whole, parts = [request(300)], [Request(request(300).payload[at : at + 60], 60) for at in range(0, 300, 60)]
    alone, among_many = setup(dtype=dtype, deterministic=True, processes=1), setup(dtype=dtype, deterministic=True)
    expected, found = await answers(whole, alone, compute=compute), await answers(parts, among_many, compute=compute)
    assert_alike([[np.concatenate(part) for part in zip(*found, strict=True)]], expected)


class Lane:
    def __init__(self):
        self.seen = []

    def enter(self, station):
        self.seen.append((station, torch.get_num_threads(), threading.current_thread().name))


@pytest.mark.parametrize(
    ("a_setup", "options", "max_rows", "in_flight", "threads"),
    [
        ({}, {}, 4096, 1, 1),  # one process for each core
        ({"processes": 1}, {}, 4096, 1, cores()),
        ({"processes": 1, "deterministic": True}, {}, 4096, cores(), 1),
        ({}, {"max_rows": 9, "in_flight": 3, "threads": 2}, 9, 3, 2),
        ({"processes": 1}, {"in_flight": 5, "threads": 1}, 4096, 5, 1),
    ],
)
async def test_the_cores_are_shared_out_among_forwards_beside_the_event_loop(
    a_setup, options, max_rows, in_flight, threads
):
    backend, lane = await started(setup(**a_setup), **options), Lane()
    api.forward_lane.set(lane)
    await backend.infer([request(4)])
    await backend.close()
    torch.set_num_threads(1)
    assert (backend.limits.max_rows, backend.limits.in_flight) == (max_rows, in_flight)
    assert [station for station, *_ in lane.seen] == ["transfer", "forward", "transfer"]
    assert {count for _, count, _ in lane.seen} == {threads}  # torch keeps the number for each thread
    assert all(name.startswith("gpuinfer-forward") for *_, name in lane.seen)


@pytest.mark.parametrize(
    ("roofline", "max_rows", "enough"),
    [
        (None, None, 512),
        (Roofline(1e4, 256, "2 forwards × 1 thread"), None, 256),
        (Roofline(1e4, 2048, "1 forward × 2 threads"), 1000, 1000),  # no more than a batch may have
    ],
)
async def test_it_says_how_many_rows_are_enough(roofline, max_rows, enough):
    backend = await started(roofline=roofline, max_rows=max_rows)
    await backend.close()
    assert backend.limits.enough_rows == enough


MEETING = """
import threading
from torch import nn

class Meeting(nn.Module):
    def __init__(self):
        super().__init__()
        self.together = threading.Barrier(3)

    def forward(self, x):
        if len(x) > 3:  # not when the model is tried
            self.together.wait(30)
        return x
"""


async def test_as_many_forwards_run_at_once_as_may_be_in_flight(tmp_path, monkeypatch):
    """Each waits for the others, so that none is answered unless all run."""
    (tmp_path / "meeting.py").write_text(MEETING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    backend = await started(setup(model=ModelSpec("meeting:Meeting", None, 4)), in_flight=3, threads=1)
    blocks = [np.full((5, 4), number, np.float32) for number in range(3)]
    together = await asyncio.gather(*(backend.infer([Request(block, 5)]) for block in blocks))
    await backend.close()
    assert_alike(together, [[block] for block in blocks])


@pytest.mark.thorough  # ten seconds of a compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # torch's own, from inside torch.compile
@pytest.mark.parametrize("mode", [True, "max-autotune"])
async def test_a_compiled_model_answers_the_same(mode):
    small = setup(model=replace(MODEL, name="blobnet-small"))  # the larger one takes minutes where nothing is cached
    batch = [request(5, 1), request(20, 2)]
    assert_alike(await answers(batch, small, compile=mode), await answers(batch, small), 1e-5)


@pytest.mark.parametrize(
    ("model", "payload", "rows", "said"),
    [
        (MODEL, np.zeros((2, FEATURES), np.float64), 2, r"got float64.*Send rows\.astype\(np\.uint8\)"),
        (MODEL, np.zeros((2, FEATURES + 1), np.uint8), 2, r"got uint8 \[2, 33\]"),
        (MODEL, np.zeros(FEATURES, np.uint8), 1, r"got uint8 \[32\]\. .* send row\[None\]"),
        (MODEL, np.zeros((2, FEATURES), np.uint8), 3, r"uint8 \[3, 32\] for a request of 3"),
        (MODEL, np.zeros((0, FEATURES), np.uint8), 0, "request of 0 rows"),
        (MODEL, np.zeros((2, FEATURES), object), 2, "got object"),
        (MODEL, "a prompt", 1, "got str"),
        (BITS, np.zeros((2, FEATURES), np.uint8), 2, r"32 features packed as bits.*got uint8 \[2, 32\]"),
    ],
)
async def test_a_payload_that_does_not_fit_fails_alone(model, payload, rows, said):
    width = FEATURES if model is MODEL else FEATURES // 8
    own = [Request(np.zeros((count, width), np.uint8), count) for count in (2, 3)]
    first, misfit, last = await answers([own[0], Request(payload, rows), own[1]], setup(model=model))
    assert isinstance(misfit, BackendError)
    assert re.search(said, str(misfit))
    assert (len(first[0]), len(last[0])) == (2, 3)


@pytest.mark.parametrize("deterministic", [False, True])
async def test_rows_as_bits_are_answered_as_bytes_are(deterministic):
    blocks = [request(rows, rows).payload for rows in (1, 30, 300)]
    packed = [np.packbits(block, axis=1, bitorder="little") for block in blocks]
    expected, found = [
        await answers([Request(block, len(block)) for block in batch], setup(model=model, deterministic=deterministic))
        for batch, model in ((blocks, MODEL), (packed, BITS))
    ]
    assert_alike(found, expected)


def test_it_keeps_a_backends_promises_with_rows_as_bits():
    assert_ok(check_backend(lambda: InProcess(setup(model=BITS), max_rows=64)))


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"model": None}, UsageError, "names none"),
        ({"devices": ("tpu",)}, UnknownName, "no device named 'tpu'"),
        ({"dtype": "float8"}, UnknownName, "no number format"),
        ({"model": ModelSpec("blobnet", input_dtype="int64")}, UnknownName, "int64"),
    ],
)
async def test_a_setup_that_cannot_work_says_so_at_the_start(changes, error, said):
    backend = InProcess(setup(**changes))
    with pytest.raises(error, match=said):
        await backend.start(BackendContext())
    await backend.close()


async def test_it_can_be_closed_at_any_time_and_answers_nothing_afterwards():
    backend = InProcess(setup())
    await backend.close()
    await backend.start(BackendContext())
    await backend.close()
    with pytest.raises(BackendDied, match="start"):
        await backend.infer([request(1)])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gpuinfer-forward")]

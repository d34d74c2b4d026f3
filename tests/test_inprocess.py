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


def setup(**changes):
    model = ModelSpec("blobnet-small", None, FEATURES, "uint8", {"actions": ACTIONS, "seats": SEATS})
    return Setup(**{"model": model, "devices": ("cpu",), "processes": cores(), **changes})


def request(rows, seed=0):
    block = np.random.default_rng(seed).integers(0, 2, (rows, FEATURES), dtype=np.uint8)
    return Request(block, rows)


async def answers(batch, a_setup=None, **options):
    return await answered(InProcess(a_setup or setup(), **options), batch)


async def test_each_request_gets_policy_and_values():
    batch = [request(3, 1), request(1, 2), request(7, 3)]
    for (policy, values), asked in zip(await answers(batch), batch, strict=True):
        assert (policy.shape, policy.dtype) == ((asked.rows, ACTIONS), np.float32)
        assert (values.shape, values.dtype) == ((asked.rows, SEATS), np.float32)
        np.testing.assert_array_equal(np.isneginf(policy), (asked.payload[:, :ACTIONS] == 0) & has_legal(asked))


def has_legal(asked):
    return asked.payload[:, :ACTIONS].any(axis=1, keepdims=True)


@pytest.mark.parametrize("chunk_rows", [pytest.param(None, id="one chunk"), pytest.param(5, id="several chunks")])
async def test_batched_answers_are_those_of_rows_asked_one_at_a_time(chunk_rows):
    block = request(40).payload
    backend = InProcess(setup(), chunk_rows=chunk_rows)
    await backend.start(BackendContext())
    (batched,) = await backend.infer([Request(block, 40)])
    singly = [(await backend.infer([Request(block[row : row + 1], 1)]))[0] for row in range(40)]
    await backend.close()
    for output in (0, 1):
        np.testing.assert_allclose(batched[output], np.concatenate([one[output] for one in singly]), atol=1e-5)


async def test_two_copies_with_one_seed_answer_alike():
    batch = [request(6)]
    first, again, other = [await answers(batch, setup(seed=seed)) for seed in (4, 4, 5)]
    np.testing.assert_array_equal(first[0][1], again[0][1])
    assert not np.array_equal(first[0][1], other[0][1])


@pytest.mark.parametrize(("dtype", "compute"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "bfloat16")])
async def test_when_deterministic_the_number_of_processes_changes_no_bit(dtype, compute):
    whole, parts = [request(300)], [Request(request(300).payload[at : at + 60], 60) for at in range(0, 300, 60)]
    alone, among_many = setup(dtype=dtype, deterministic=True, processes=1), setup(dtype=dtype, deterministic=True)
    (expected,) = await answers(whole, alone, compute=compute)
    found = await answers(parts, among_many, compute=compute)
    for output in (0, 1):
        np.testing.assert_array_equal(expected[output], np.concatenate([part[output] for part in found]))


@pytest.mark.parametrize(
    ("a_setup", "options", "max_rows", "in_flight", "threads"),
    [
        pytest.param({}, {}, 4096, 1, 1, id="one process for each core"),
        pytest.param({"processes": 1}, {}, 4096, 1, cores(), id="a process that has the machine for itself"),
        pytest.param({"processes": 1, "deterministic": True}, {}, 4096, cores(), 1, id="deterministic"),
        pytest.param({}, {"max_rows": 9, "in_flight": 3, "threads": 2}, 9, 3, 2, id="as the user wants it"),
        pytest.param({"processes": 1}, {"in_flight": 5, "threads": 1}, 4096, 5, 1, id="single-threaded forwards"),
    ],
)
async def test_the_cores_are_shared_out(a_setup, options, max_rows, in_flight, threads):
    backend = InProcess(setup(**a_setup), **options)
    await backend.start(BackendContext())
    seen = []

    class Lane:
        def enter(self, station):
            seen.append(torch.get_num_threads())  # torch keeps the number for each thread

    api.forward_lane.set(Lane())
    await backend.infer([request(4)])
    await backend.close()
    torch.set_num_threads(1)
    assert (backend.limits.max_rows, backend.limits.in_flight) == (max_rows, in_flight)
    assert set(seen) == {threads}


@pytest.mark.parametrize(
    ("roofline", "max_rows", "enough"),
    [
        pytest.param(None, None, 512, id="nothing was measured"),
        pytest.param(Roofline(1e4, 256, "2 forwards × 1 thread"), None, 256, id="as the bare model was measured"),
        pytest.param(Roofline(1e4, 2048, "1 forward × 2 threads"), 1000, 1000, id="no more than a batch may have"),
    ],
)
async def test_it_says_how_many_rows_are_enough(roofline, max_rows, enough):
    backend = InProcess(setup(), max_rows=max_rows)
    await backend.start(BackendContext(roofline=roofline))
    await backend.close()
    assert backend.limits.enough_rows == enough


async def test_as_many_forwards_run_at_once_as_may_be_in_flight(tmp_path, monkeypatch):
    """Each waits for the others, so that none is answered unless all run."""
    (tmp_path / "meeting.py").write_text(MEETING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    backend = InProcess(setup(model=ModelSpec("meeting:Meeting", None, 4)), in_flight=3, threads=1)
    await backend.start(BackendContext())
    blocks = [np.full((5, 4), number, np.float32) for number in range(3)]
    together = await asyncio.gather(*(backend.infer([Request(block, 5)]) for block in blocks))
    await backend.close()
    for (found,), block in zip(together, blocks, strict=True):
        np.testing.assert_array_equal(found, block)


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


async def test_the_event_loop_runs_on_while_the_model_does():
    backend = InProcess(setup())
    await backend.start(BackendContext())
    names = []

    class Lane:
        def enter(self, station):
            names.append((station, threading.current_thread().name))

    api.forward_lane.set(Lane())
    await backend.infer([request(4)])
    await backend.close()
    assert [station for station, _ in names] == ["transfer", "forward", "transfer"]
    assert all(thread.startswith("gpuinfer-forward") for _, thread in names)


@pytest.mark.thorough  # ten seconds of a compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # torch's own, from inside torch.compile
async def test_a_compiled_model_answers_the_same():
    batch = [request(5, 1), request(20, 2)]
    plain, compiled = await answers(batch), await answers(batch, compile=True)
    for ours, theirs in zip(compiled, plain, strict=True):
        np.testing.assert_allclose(ours[0], theirs[0], atol=1e-5)
        np.testing.assert_allclose(ours[1], theirs[1], atol=1e-5)


@pytest.mark.parametrize(
    ("payload", "rows", "said"),
    [
        pytest.param(
            np.zeros((2, FEATURES), np.float64), 2, r"got float64.*Send rows\.astype\(np\.uint8\)", id="another dtype"
        ),
        pytest.param(np.zeros((2, FEATURES + 1), np.uint8), 2, r"got uint8 \[2, 33\]", id="too many features"),
        pytest.param(np.zeros(FEATURES, np.uint8), 1, r"got uint8 \[32\]\. .* send row\[None\]", id="no row axis"),
        pytest.param(np.zeros((2, FEATURES), np.uint8), 3, r"uint8 \[3, 32\] for a request of 3", id="other rows"),
        pytest.param(np.zeros((0, FEATURES), np.uint8), 0, "request of 0 rows", id="no rows"),
        pytest.param(np.zeros((2, FEATURES), object), 2, "got object", id="objects"),
        pytest.param("a prompt", 1, "got str", id="text"),
    ],
)
async def test_a_payload_that_does_not_fit_fails_alone(payload, rows, said):
    first, misfit, last = await answers([request(2), Request(payload, rows), request(3)])
    assert isinstance(misfit, BackendError)
    assert re.search(said, str(misfit))
    assert (len(first[0]), len(last[0])) == (2, 3)


@pytest.mark.parametrize("deterministic", [False, True])
async def test_rows_as_bits_are_answered_as_bytes_are(deterministic):
    blocks = [request(rows, rows).payload for rows in (1, 30, 300)]
    packed = [np.packbits(block, axis=1, bitorder="little") for block in blocks]
    as_bits = replace(setup().model, input_dtype="bits")
    expected, found = [
        await answers([Request(block, len(block)) for block in batch], setup(model=model, deterministic=deterministic))
        for batch, model in ((blocks, setup().model), (packed, as_bits))
    ]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours[0], theirs[0])
        np.testing.assert_array_equal(ours[1], theirs[1])


def test_it_keeps_a_backends_promises_with_rows_as_bits():
    assert_ok(check_backend(lambda: InProcess(setup(model=replace(setup().model, input_dtype="bits")), max_rows=64)))


async def test_rows_of_bytes_do_not_pass_for_bits():
    first, misfit = await answers(
        [Request(np.zeros((2, FEATURES // 8), np.uint8), 2), request(2)],
        setup(model=replace(setup().model, input_dtype="bits")),
    )
    assert len(first[0]) == 2
    with pytest.raises(BackendError, match=r"32 features packed as bits.*got uint8 \[2, 32\]"):
        raise misfit


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        pytest.param({"model": None}, UsageError, "names none", id="no model"),
        pytest.param({"devices": ("tpu",)}, UnknownName, "no device named 'tpu'", id="no such device"),
        pytest.param({"dtype": "float8"}, UnknownName, "no number format", id="no such number format"),
        pytest.param({"model": ModelSpec("blobnet", input_dtype="int64")}, UnknownName, "int64", id="input dtype"),
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

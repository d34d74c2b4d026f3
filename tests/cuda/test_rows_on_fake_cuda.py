"""Networks of rows as a CUDA device would run them: opened, warmed up, captured, asked, measured."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import BackendError, BadResult
from gpuinfer.models import forward_cuda, pinned_memory, roofline_measurement
from gpuinfer.models.forward_cuda import CudaForward, buckets_up_to
from gpuinfer.models.open_model import open_model
from gpuinfer.models.row_format import BITS, row_dtype, row_shape

FEATURES, ACTIONS, SEATS, CHUNK = 44, 8, 3, 64
ANSWERED = "models/forward_cuda.py CudaForward._attempt"  # waits for the event behind its copies
DTYPES = ("float32", "bfloat16", "float16")


def spec_of(network="blobnet-small", input_dtype="uint8"):
    sizes = {"actions": ACTIONS, "seats": SEATS}
    return ModelSpec(network, inputs=FEATURES, arguments=sizes, input_dtype=input_dtype)


def opened(spec, dtype="bfloat16", deterministic=False, **options):
    tuning = {"max_rows": None, "in_flight": None, "chunk_rows": CHUNK, "threads": None, "graphs": True}
    setup = Setup(model=spec, devices=("cuda:0",), dtype=dtype, deterministic=deterministic)
    return open_model(spec, setup, SimpleNamespace(compile=False, compute="auto", **tuning | options))


def block(spec, rows):
    return np.ones((rows, *row_shape(spec)), row_dtype(spec))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("network", "dtype", "input_dtype"),
    [("blobnet-small", *one) for one in product(DTYPES, ("uint8", "int8", "float32", BITS))]
    + [("blobnet", dtype, input_dtype) for dtype, input_dtype in zip(DTYPES, ("float32", "uint8", BITS), strict=True)],
)
def test_a_batch_is_one_graph_and_one_wait(cuda, network, dtype, input_dtype):
    spec = spec_of(network, input_dtype)
    one = opened(spec, dtype)
    assert (one.limits.in_flight, cuda.captured) == (2, 2 * len(buckets_up_to(CHUNK)))
    assert one.device()["threads"] == 1  # that compute beside a lane, which are none
    with cuda.waiting_only_in(ANSWERED):
        answers = one.forward([block(spec, 5), block(spec, 30)])
    assert [(policy.shape, values.shape) for policy, values in answers] == [
        ((rows, ACTIONS), (rows, SEATS)) for rows in (5, 30)
    ]
    assert {part.dtype for answer in answers for part in answer} == {np.dtype(np.float32)}
    assert (cuda.replayed, cuda.waits[ANSWERED]) == (1, 1)


@pytest.mark.parametrize("options", [{"graphs": False}, {"deterministic": True}, {"in_flight": 1}], ids=str)
def test_larger_batches_than_a_step_wait_once_a_step(cuda, options):
    spec = spec_of()
    one = opened(spec, **options)
    with cuda.waiting_only_in(ANSWERED):
        one.forward([block(spec, 2 * CHUNK + 1)])
    assert cuda.waits[ANSWERED] == 3
    assert cuda.replayed == (3 if options.get("graphs", True) else 0)


def test_a_model_that_reads_a_value_back_is_launched_kernel_by_kernel(cuda, caplog):
    class Reads(nn.Module):
        def forward(self, features):
            return features + (1 if features.sum().item() > 0 else 2)

    given = {"device": cuda.device, "dtype": torch.float32, "chunk_rows": CHUNK}
    forward = CudaForward(Reads(), spec_of(), slots=1, **given)
    assert "cannot be captured in a CUDA graph" in caplog.text
    assert (forward.graphs, cuda.captured) == (False, 0)
    forward([block(spec_of(), 3)])
    assert cuda.replayed == 0


class Hungry(nn.Module):
    """Has no memory for more than so many rows at once."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def forward(self, features):
        if len(features) > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return features


def test_steps_that_do_not_fit_are_halved_before_and_during_traffic(cuda):
    module, spec = Hungry(40), spec_of()
    given = {"device": cuda.device, "dtype": torch.float32, "chunk_rows": CHUNK, "graphs": False}
    forward = CudaForward(module, spec, slots=1, **given)
    assert forward.step.rows == 32
    module.rows = 16
    (answer,) = forward([block(spec, 32)])
    assert (answer.shape, forward.step.rows) == ((32, FEATURES), 16)
    assert cuda.log.count("the cache is emptied") == 3
    module.rows = 0
    with pytest.raises(BackendError, match=r"single row of .* on cuda:0"):
        forward([block(spec, 1)])


def test_rows_in_pinned_blocks_go_straight_to_the_device(cuda, monkeypatch):
    spec = spec_of()
    one = opened(spec, chunk_rows=4096)
    rows = block(spec, 2048)
    held = one.pin(rows)
    assert held.pinned
    monkeypatch.setattr(pinned_memory, "staged_rows", lambda pieces, room: pytest.fail("was staged"))
    with cuda.waiting_only_in(ANSWERED):
        one.forward([rows])
    held.close()
    assert cuda.registered == []


def places_for(rows):
    return [np.zeros((rows, *shape), np.float32) for shape in ((ACTIONS,), (SEATS,))]


def test_answers_to_large_pinned_blocks_are_written_there_and_all_others_staged_together(cuda, monkeypatch):
    one = opened(spec_of(), chunk_rows=4096)
    sizes = (3000, 5, 7)
    places = [places_for(rows) for rows in sizes]
    held = [one.pin(part) for parts in places for part in parts]
    staged, unstage = [], pinned_memory.unstage
    monkeypatch.setattr(forward_cuda, "unstage", lambda later: staged.extend(later) or unstage(later))
    monkeypatch.setattr(forward_cuda, "room_for", lambda *given: pytest.fail("takes pinned memory for each batch"))
    for _ in range(2):
        with cuda.waiting_only_in(ANSWERED):
            sound = one.write([block(spec_of(), rows) for rows in sizes], places)
        assert cuda.waits[ANSWERED] == cuda.replayed
    assert sound == [False] * 3  # what the device says is made up: nothing is true
    assert all((part == cuda.read).all() for parts in places for part in parts)
    policies, values = 5 + 7, sum(sizes)  # the values of 3,000 rows are too few bytes for a copy of their own
    assert [sum(map(len, targets)) for targets, _ in staged] == [policies, values] * 2
    for registration in held:
        registration.close()
    assert cuda.registered == []


def test_a_batch_that_fails_is_over_on_the_device_before_it_is_told(cuda, monkeypatch):
    one = opened(spec_of())
    monkeypatch.setattr(CudaForward, "_launch", lambda *given: [].pop())
    with cuda.waiting_only_in(ANSWERED), pytest.raises(IndexError):
        one.write([block(spec_of(), 3)], [places_for(3)])
    assert cuda.waits[ANSWERED] == 1


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(lambda policy, values: (policy[:, :1], values), id="of another width"),
        pytest.param(lambda policy, values: (policy[:1], values), id="one row for all"),
        pytest.param(lambda policy, values: (policy,), id="too few parts"),
    ],
)
def test_answers_of_other_shapes_are_refused_and_not_repeated_to_fill_the_room(cuda, monkeypatch, odd):
    one, launch = opened(spec_of(), graphs=False), CudaForward._launch

    def launched(*given):
        answers, sound = launch(*given)
        return odd(*answers), sound

    monkeypatch.setattr(CudaForward, "_launch", launched)
    with pytest.raises(BadResult, match=r"where \[\(8,\), \(3,\)\] a row were agreed"):
        one.write([block(spec_of(), 3)], [places_for(3)])


@pytest.mark.parametrize("network", ["blobnet", "blobnet-small"])
def test_the_roofline_waits_for_the_device_around_what_it_times(cuda, monkeypatch, network):
    monkeypatch.setattr(roofline_measurement, "CUDA_SIZES", (256, 512))
    monkeypatch.setattr(roofline_measurement, "MOST_LAUNCHES", 4)
    given = {"devices": ("cuda:0",), "dtype": "bfloat16", "seed": 0, "cores": 2, "budget_s": 0.001}
    building = {"models/networks.py Affine.best", "models/roofline_measurement.py measured_on"}
    building |= {"models/networks.py BlobNet.freeze.norm"} if network == "blobnet" else set()
    with cuda.waiting_only_in(
        "models/roofline_measurement.py timed", "models/roofline_measurement.py launcher", *building
    ):
        found = roofline_measurement.measure(spec_of(network), **given)
    assert found.arrangement in ("1 stream, CUDA graph", "2 streams, CUDA graph")
    again = roofline_measurement.measure(spec_of(network), **given, only=found)
    assert (again.arrangement, again.at_rows) == (found.arrangement, found.at_rows)
    assert cuda.captured
    assert cuda.replayed

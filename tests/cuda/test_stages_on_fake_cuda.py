"""Networks of rows in stages on CUDA devices: rows to the first, streams between them, answers from the last."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.models.pipeline import open_pipeline
from gpuinfer.models.row_format import BITS, row_dtype, row_shape

FEATURES, ACTIONS, SEATS, ROWS = 44, 8, 3, 32
STAGE = "models/pipeline/stage.py CudaStage."
WAITS = (STAGE + "at_work", STAGE + "_wait")


pytestmark = pytest.mark.usefixtures("stages_inline")


def staged(network="blobnet-small", input_dtype="uint8", devices=("cuda:0",), dtype="bfloat16", **options):
    sizes = {"actions": ACTIONS, "seats": SEATS}
    spec = ModelSpec(network, inputs=FEATURES, arguments=sizes, input_dtype=input_dtype)
    tuning = dict.fromkeys(("split_points", "layers", "in_flight", "chunk_rows", "threads", "max_rows"))
    tuning |= {"parallel": "pipeline", "stages": 2, "micro_batch_rows": ROWS, "compute": "auto", "compile": False}
    setup = Setup(model=spec, devices=devices, dtype=dtype, deterministic=options.pop("deterministic", False))
    return spec, open_pipeline.open_staged(spec, setup, SimpleNamespace(**tuning | options))


def block(spec, rows):
    return np.ones((rows, *row_shape(spec)), row_dtype(spec))


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("network", "dtype", "input_dtype"),
    [("blobnet-small", *one) for one in product(("float32", "bfloat16", "float16"), ("uint8", "int8", "float32", BITS))]
    + [("blobnet", "bfloat16", "uint8"), ("blobnet", "float16", BITS)],
)
def test_rows_cross_the_stages_of_one_device(cuda, network, dtype, input_dtype):
    spec, one = staged(network, input_dtype, dtype=dtype)
    with cuda.waiting_only_in(*WAITS):
        answers = one.forward([block(spec, 5), block(spec, 2 * ROWS)])
    assert [(policy.shape, values.shape) for policy, values in answers] == [
        ((rows, ACTIONS), (rows, SEATS)) for rows in (5, 2 * ROWS)
    ]
    assert {part.dtype for answer in answers for part in answer} == {np.dtype(np.float32)}
    assert cuda.log.count("a stream waits for an event") == 3  # the second stage's, for each of the micro-batches


@pytest.mark.parametrize(
    "options",
    [{"deterministic": True}, {"parallel": "layers"}, {"stages": 3}, {"split_points": (1,), "stages": "auto"}],
    ids=str,
)
def test_rows_cross_the_stages_of_two_devices(cuda, options):
    cuda.devices = 2
    spec, one = staged(devices=("cuda:0", "cuda:1"), **options)
    assert {stage.device.index for stage in one.forward.pipeline.stages} == {0, 1}
    with cuda.waiting_only_in(*WAITS):
        (answer,) = one.forward([block(spec, ROWS + 1)])
    assert [part.shape for part in answer] == [(ROWS + 1, ACTIONS), (ROWS + 1, SEATS)]
    assert one.device()["allocated_mb"] == 0


def test_layers_are_timed_where_they_would_run_and_the_device_waited_for(cuda):
    cuda.devices = 2
    before = cuda.waits["models/pipeline/stage_plan.py segment_seconds.wait"]
    staged(devices=("cuda:0", "cuda:1"))
    assert cuda.waits["models/pipeline/stage_plan.py segment_seconds.wait"] > before

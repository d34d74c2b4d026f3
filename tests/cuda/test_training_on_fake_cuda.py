"""Gradients as a CUDA device would compute them, and what is read back on the way."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.gradients import TrainingBatch
from gpuinfer.models.gradients import open_gradients
from gpuinfer.models.layouts import BITS, row_dtype, row_shape
from gpuinfer.models.load import trainable

FEATURES, ACTIONS, SEATS, ROWS = 44, 8, 3, 16
HERE = "models/gradients.py GradientPass."
FORWARD = (HERE + "_forward", HERE + "_clock", HERE + "_number", "models/losses.py _numbers")
BACKWARD = (*FORWARD, HERE + "_gradients")


def training(network="blobnet-small", input_dtype="uint8", dtype="bfloat16", **options):
    sizes = {"actions": ACTIONS, "seats": SEATS}
    spec = ModelSpec(network, inputs=FEATURES, arguments=sizes, input_dtype=input_dtype)
    tuning = dict.fromkeys(("max_rows", "in_flight", "chunk_rows", "threads", "loss", "checkpoint_segments", "layers"))
    tuning |= {"compute": "auto", "compile": False, "graphs": True}
    setup = Setup(model=spec, devices=("cuda:0",), dtype=dtype)
    return spec, open_gradients(spec, setup, SimpleNamespace(**tuning | options))


def batch_of(spec, **named):
    targets = {
        "policy": np.full((ROWS, ACTIONS), 1 / ACTIONS, np.float32),
        "value": np.zeros((ROWS, SEATS), np.float32),
        "legal": np.ones((ROWS, ACTIONS), bool),
    }
    return TrainingBatch(np.ones((ROWS, *row_shape(spec)), row_dtype(spec)), targets, **named)


@pytest.mark.parametrize(
    ("network", "segments", "dtype", "input_dtype"),
    [("blobnet-small", None, *one) for one in product(("float32", "bfloat16"), ("uint8", "float32", BITS))]
    + [
        ("blobnet", None, "bfloat16", "uint8"),
        ("blobnet", 2, "bfloat16", BITS),
        ("blobnet", "auto", "float32", "uint8"),
    ],
)
def test_a_pass_reads_back_the_loss_and_the_gradients(cuda, network, dtype, input_dtype, segments):
    spec, one = training(network, input_dtype, dtype, checkpoint_segments=segments)
    wanted = {name: tuple(tensor.shape) for name, tensor in trainable(spec, 0).named_parameters()}
    with cuda.waiting_only_in(*BACKWARD):
        found = one.passed(batch_of(spec))
    assert {name: grad.shape for name, grad in found.by_name.items()} == wanted
    assert {grad.dtype for grad in found.by_name.values()} == {np.dtype(np.float32)}
    assert sorted(found.parts) == ["policy", "value"]
    assert found.activation_bytes > 0
    with cuda.waiting_only_in(*FORWARD):
        assert one.passed(batch_of(spec, backward=False)).by_name == {}


def test_weights_of_a_version_are_uploaded_once(cuda):
    spec, one = training()
    weights = {name: tensor.detach().numpy() for name, tensor in trainable(spec, 1).named_parameters()}
    with cuda.waiting_only_in(*BACKWARD, HERE + "_load"):
        one.passed(batch_of(spec, weights=weights, version=1))
    with cuda.waiting_only_in(*BACKWARD):
        one.passed(batch_of(spec, weights=weights, version=1))


def test_what_is_random_is_drawn_from_the_devices_generator_and_that_put_back(cuda):
    spec, one = training()
    own = torch.cuda.default_generators[0]
    own.manual_seed(5)
    before = own.get_state()
    one.passed(batch_of(spec))
    assert bool((own.get_state() == before).all())

"""Gradients as a CUDA device would compute them, and what is read back on the way."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import WorkError
from gpuinfer.gradients import TrainingBatch
from gpuinfer.models.gradients import open_gradients
from gpuinfer.models.load import trainable
from gpuinfer.models.row_format import BITS, row_dtype, row_shape
from gpuinfer.workloads.optimizer import Stepper

FEATURES, ACTIONS, SEATS, ROWS = 44, 8, 3, 16
HERE = "models/gradients.py GradientPass."
LOSS, ARRAYS, LOADED = "models/losses.py read_loss", HERE + "_gradients", HERE + "_use"
STEPPER = "workloads/optimizer.py Stepper."
NORM = STEPPER + "step"


class Normed(nn.Module):
    """With running means, which a pass changes beside the gradients."""

    def __init__(self, features, actions, seats):
        super().__init__()
        self.norm, self.heads, self.actions = nn.BatchNorm1d(features), nn.Linear(features, actions + seats), actions

    def forward(self, rows):
        answer = self.heads(self.norm(rows))
        return answer[:, : self.actions], answer[:, self.actions :]


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


@pytest.mark.sample(3)
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
    with cuda.waiting_only_in(LOSS, ARRAYS):
        found = one.passed(batch_of(spec))
    assert {name: grad.shape for name, grad in found.by_name.items()} == wanted
    assert {grad.dtype for grad in found.by_name.values()} == {np.dtype(np.float32)}
    assert sorted(found.parts) == ["policy", "value"]
    assert found.activation_bytes > 0
    with cuda.waiting_only_in(LOSS):
        assert one.passed(batch_of(spec, backward=False)).by_name == {}


def test_weights_of_a_version_are_uploaded_once(cuda):
    spec, one = training()
    weights = {name: tensor.detach().numpy() for name, tensor in trainable(spec, 1).named_parameters()}
    with cuda.waiting_only_in(LOSS, ARRAYS, LOADED):
        one.passed(batch_of(spec, weights=weights, version=1))
    with cuda.waiting_only_in(LOSS, ARRAYS):
        one.passed(batch_of(spec, weights=weights, version=1))


def test_what_is_random_is_drawn_from_the_devices_generator_and_that_put_back(cuda):
    spec, one = training()
    own = torch.cuda.default_generators[0]
    own.manual_seed(5)
    before = own.get_state()
    one.passed(batch_of(spec))
    assert bool((own.get_state() == before).all())


def on_device(spec, stepper, version):
    return batch_of(spec, weights=stepper.weights, version=version, keep_on_device=True)


@pytest.mark.parametrize("network", ["blobnet-small", "test_training_on_fake_cuda:Normed"])
def test_after_the_first_step_only_the_batch_the_loss_and_the_norm_cross_the_bus(cuda, network):
    spec, one = training(network)
    stepper, trained = Stepper(spec, 0, 0.01, 1.0), trainable(spec, 0)
    parameters, buffers = (dict(one).keys() for one in (trained.named_parameters(), trained.named_buffers()))
    with cuda.waiting_only_in(LOSS, LOADED):
        found = one.passed(on_device(spec, stepper, 0))
    with cuda.waiting_only_in(NORM, STEPPER + "_hold"):
        stepper.step(found, 1e-3)
    for version in (1, 2):
        sent, before = cuda.sent, cuda.waited
        with cuda.waiting_only_in(LOSS, NORM):
            batch = on_device(spec, stepper, version)
            found = one.passed(batch)
            stepper.step(found, 1e-3)
        assert cuda.waited - before == 2
        assert cuda.sent - sent == 1 + len(batch.targets)
        assert {type(one) for one in found.parts.values()} == {float}
        assert {tensor.device for tensor in (*found.by_name.values(), *found.buffers.values())} == {cuda.device}
        assert (found.by_name.keys(), found.buffers.keys()) == (parameters, buffers)
    with cuda.waiting_only_in(LOSS):
        one.passed(replace(on_device(spec, stepper, 3), backward=False))
    with cuda.waiting_only_in(STEPPER + "state"):
        state = stepper.state()
    assert {tensor.device.type for tensor in state.values()} == {"cpu"}


def test_a_device_without_memory_for_the_optimizer_is_named(cuda, monkeypatch):
    spec, one = training()
    stepper = Stepper(spec, 0, 0.01, 1.0)
    found = one.passed(on_device(spec, stepper, 0))

    def full(self):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(torch.optim.AdamW, "step", full)
    with pytest.raises(
        WorkError, match=r"in a step of the optimizer, which keeps two numbers .* on cuda:0: CUDA out of"
    ):
        stepper.step(found, 1e-3)

"""Steps of AdamW: those of torch, in memory that stays where it is, and nothing of gradients that are not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from train_models import ACTIONS, FEATURES, SEATS, Normed

from gpuinfer.api import ModelSpec
from gpuinfer.errors import WorkError
from gpuinfer.gradients import Gradients
from gpuinfer.models.load import trainable
from gpuinfer.workloads.optimizer import Stepper

DECAY, CLIP, RATE = 0.1, 0.5, 0.01


class Turned(Normed):
    """With a matrix whose columns lie one after the other in memory."""

    def __init__(self, features: int, actions: int, seats: int) -> None:
        super().__init__(features, actions, seats)
        self.heads.weight = nn.Parameter(self.heads.weight.detach().t().contiguous().t())


class Tied(nn.Module):
    """Two names for one matrix."""

    def __init__(self, features: int, actions: int, seats: int) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.other.weight = self.one.weight


def spec(name="train_models:Normed"):
    return ModelSpec(name, None, FEATURES, "uint8", {"actions": ACTIONS, "seats": SEATS}, kind="gradients")


def made_up(parameters, seed, scale=1.0, **more):
    """Gradients of these parameters, as a backend gives them."""
    dice = np.random.default_rng(seed)
    found = {name: scale * dice.standard_normal(tuple(one.shape), dtype=np.float32) for name, one in parameters}
    return Gradients(1.0, found, **more)


def copied(gradients):
    return {name: torch.tensor(one) for name, one in gradients.by_name.items()}


@pytest.mark.sample(2)
@pytest.mark.parametrize("scale", [pytest.param(1.0, id="clipped"), pytest.param(1e-5, id="as they are")])
@pytest.mark.parametrize("model", ["blobnet-small", "blobnet", "test_train_stepping:Turned"])
def test_steps_are_those_of_torch_bit_for_bit(model, scale):
    stepper, module = Stepper(spec(model), 3, DECAY, CLIP), trainable(spec(model), 3)
    parameters = {name: one.detach().contiguous() for name, one in module.named_parameters()}
    groups = [
        {"params": [one for one in parameters.values() if one.ndim > 1], "weight_decay": DECAY},
        {"params": [one for one in parameters.values() if one.ndim == 1], "weight_decay": 0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, fused=True)
    for number in range(4):
        gradients = made_up(parameters.items(), number, scale)
        for name, one in copied(gradients).items():
            parameters[name].grad = one
        expected = torch.nn.utils.clip_grad_norm_(parameters.values(), CLIP)
        assert bool(expected > CLIP) is (scale == 1.0)
        optimizer.step()
        assert stepper.step(gradients, RATE) == expected.item()
        for name, one in parameters.items():
            np.testing.assert_array_equal(stepper.weights[name], one.numpy(), err_msg=name)


def test_weights_change_where_they_are():
    stepper = Stepper(spec(), 0, DECAY, CLIP)
    held = dict(stepper.weights)
    before = {name: one.copy() for name, one in held.items()}
    means = {"norm.running_mean": np.full(FEATURES, 2.0, np.float32)}
    stepper.step(made_up(trainable(spec(), 0).named_parameters(), 0, buffers=means), RATE)
    assert all(stepper.weights[name] is one for name, one in held.items())
    changed = {name for name, one in held.items() if (one != before[name]).any()}
    assert changed == {"norm.weight", "norm.bias", "heads.weight", "heads.bias", "norm.running_mean"}


def test_names_of_one_matrix_go_on_to_share_it():
    stepper = Stepper(spec("test_train_stepping:Tied"), 0, DECAY, CLIP)
    before = stepper.weights["one.weight"].copy()
    stepper.step(Gradients(1.0, {"one.weight": np.ones((4, 4), np.float32)}), RATE)
    assert (stepper.weights["other.weight"] != before).all()
    assert np.shares_memory(stepper.weights["other.weight"], stepper.weights["one.weight"])


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_gradients_that_are_not_finite_change_nothing(value):
    stepper, parameters = Stepper(spec(), 0, DECAY, CLIP), list(trainable(spec(), 0).named_parameters())
    stepper.step(made_up(parameters, 0), RATE)
    before = {name: one.clone() for name, one in stepper.state().items()}
    gradients = made_up(parameters, 1, buffers={"norm.running_mean": np.ones(FEATURES, np.float32)})
    gradients.by_name["heads.bias"][2] = value
    with pytest.raises(
        WorkError, match=rf"norm is {abs(value)}: training has diverged. Lower --learning-rate or --clip"
    ):
        stepper.step(gradients, RATE)
    assert same(stepper.state(), before)

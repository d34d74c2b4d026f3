"""Answers are compared with the model's own, by the way that a worker's requests take."""

import math
from dataclasses import replace

import numpy as np
import pytest
from bench_plugins import CrookedBlocks, Liar, Swapper
from helpers import AtOnce, Counting

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.backends.central import Central
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.lab.bench.parity import BLOCKS, check_parity, difference
from gpuinfer.runtime.run import RunPlan
from gpuinfer.strategies.dynamic import Dynamic

pytestmark = pytest.mark.usefixtures("children_forked")

SPEC = ModelSpec("blobnet-small", inputs=40, input_dtype="uint8", arguments={"actions": 8, "seats": 2})


class Asks(Counting):
    """Says which model it would ask."""

    def model(self):
        return SPEC


def plan(backend, dtype="float32"):
    setup = Setup(model=SPEC, devices=("cpu",), dtype=dtype, seed=3)
    return RunPlan(Asks(), backend(setup, threads=1), AtOnce(), {})


def found(backend, **setup):
    return check_parity(plan(backend, **setup), lambda update: None)


def test_the_models_own_answers_hold():
    parity = found(InProcess)
    assert parity.holds
    assert (parity.rows, parity.tolerance) == (sum(BLOCKS), 1e-5)


@pytest.mark.thorough
def test_16_bits_are_given_more_room_and_said_so():
    parity = found(InProcess, dtype="bfloat16")
    assert parity.holds
    assert parity.tolerance == pytest.approx(0.03125)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "backend",
    [pytest.param(Liar, id="a little off"), pytest.param(Swapper, id="rows mixed up", marks=pytest.mark.thorough)],
)
def test_wrong_answers_do_not_hold(backend):
    parity = found(backend)
    assert not parity.holds
    assert parity.difference > 5e-4


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["int8", "float32", "bits"])
def test_rows_of_every_dtype_are_checked(dtype):
    spec = replace(SPEC, inputs=43, input_dtype=dtype)  # features that fill no last byte

    class Asked(Counting):
        def model(self):
            return spec

    made = RunPlan(Asked(), InProcess(Setup(model=spec, devices=("cpu",), seed=3), threads=1), AtOnce(), {})
    assert check_parity(made, lambda update: None).holds


@pytest.mark.thorough
def test_what_lies_in_the_backends_own_memory_is_checked_too():
    spec = replace(SPEC, input_dtype="float32")
    answers = {}

    class Asked(Counting):
        def model(self):
            return spec

    for backend in (Central, CrookedBlocks):
        setup = Setup(model=spec, devices=("cpu",), seed=3)
        answers[backend] = check_parity(
            RunPlan(Asked(), backend(setup, in_flight=1), Dynamic(), {}), lambda update: None
        )
    assert answers[Central].holds
    assert not answers[CrookedBlocks].holds


def test_masked_moves_are_equal_and_a_mask_in_another_place_is_not():
    mask = np.array([[1.0, -np.inf]], np.float32)
    assert difference([mask], [mask.copy()]) == 0
    assert difference([mask[:, ::-1]], [mask]) == math.inf


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        pytest.param([1.0], [1.5], 1 / 3, id="relative where the right answer is large"),
        pytest.param([0.0], [0.25], 0.25, id="absolute where it is small"),
        pytest.param([np.nan], [1.0], math.inf, id="no number"),
        pytest.param([], [], 0.0, id="nothing"),
        pytest.param([1.0], [1.0, 1.0], math.inf, id="another shape"),
    ],
)
def test_differences(one, other, apart):
    assert difference([np.array(one, np.float32)], [np.array(other, np.float32)]) == pytest.approx(apart)

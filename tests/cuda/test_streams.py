"""No work on streams leaves a race: `recording.py` finds those that `test_streams_planted.py` plants."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path += [str(Path(__file__).parents[1] / part) for part in (".", "text", "adapters")]

from random_models import MIXTURES, random_weights
from steps import seeing
from streamed import (
    FIRST,
    SECOND,
    SHAPE,
    SPECS,
    TOKENS,
    WAIT_S,
    Training,
    adapt,
    blocks_of,
    check,
    decoder_of,
    exchange,
    expected,
    forward_of_rows,
    found,
    generator_of,
    in_threads,
    split_decoder,
    stages,
    two_rows,
)
from text.unmasking import prompt_of

import gpuinfer
from gpuinfer.api import BackendContext, ModelSpec, Setup
from gpuinfer.errors import WorkError
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.models.cuda_graphs import own_stream, release_cached_memory, wait_for_device
from gpuinfer.models.device_arbiter import AT_ONCE, DeviceArbiter
from gpuinfer.models.pinned_memory import register
from gpuinfer.models.pipeline.schedule import Pipeline
from gpuinfer.models.pipeline.staged_forward import OnCuda, StagedForward
from gpuinfer.text.decoder.torch_decoder import TorchDecoder
from gpuinfer.text.generator import Driver, open_generator
from gpuinfer.text.text_options import TorchModelOptions
from gpuinfer.text.transformer import Masking

SOURCES = Path(gpuinfer.__file__).parent


@pytest.fixture
def cuda(recorded):
    return recorded


@pytest.mark.parametrize("options", [{}, {"graphs": False}, {"fixed_shape": True}], ids=["graphs", "eager", "fixed"])
@pytest.mark.parametrize("kind", SPECS)
def test_rows_of_several_threads_share_a_forward(cuda, kind, options):
    forward = forward_of_rows(kind, **options)

    def ask(number):
        blocks, rows = blocks_of(kind, [3 + number, 20, 40], number)
        check(forward(blocks), rows)

    in_threads(3, ask)
    assert found(cuda) == []
    assert bool(cuda.graphs) is options.get("graphs", True)


def test_rows_are_fetched_from_shared_memory_that_is_pinned(cuda, monkeypatch):
    monkeypatch.setattr("gpuinfer.models.pinned_memory.WORTH_A_COPY", 200)
    forward = forward_of_rows()
    (few, many), rows = blocks_of("bytes", [2, 30])
    shared = register(many, FIRST)
    assert shared.pinned
    for _ in range(2):
        check(forward([few, many, few]), np.concatenate([rows, rows[:2]]))
    shared.close()
    assert found(cuda) == []


PLACES = {"one device": (FIRST,) * 3, "two devices": (FIRST, SECOND, SECOND)}


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_micro_batches_follow_one_another_through_stages(cuda, places, kind):
    pipeline = Pipeline(stages(places, kind), BackendContext().lane)
    forward = StagedForward(pipeline, OnCuda(SPECS[kind]), 8, even=False, fixed_shape=False, alone=False)

    def ask(number):
        blocks, rows = blocks_of(kind, [30, 5], number)
        np.testing.assert_allclose(np.concatenate(forward(blocks)), expected(rows)["policy"], rtol=1e-4, atol=1e-5)

    in_threads(2, ask)
    pipeline.close()
    assert found(cuda) == []


SHAPES = {"plain": SHAPE, "experts": replace(SHAPE, **MIXTURES["experts of plain inner layers"])}


def logits_of(decoder):
    """Of those steps, which follow one another without a wait."""
    logits = [decoder.forward(step).clone() for step in two_rows()]
    return [one.cpu().numpy() for one in logits]


def close(logits, shape=SHAPE, seed=0):
    """Whether they are what a processor computes."""
    weights = random_weights(shape, seed=seed)
    for one, other in zip(
        logits, logits_of(decoder_of(shape, torch.device("cpu"), weights, graphs=False)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


WAYS = {"kernel by kernel": {"graphs": False}, "graphs": {}, "deterministic": {"deterministic": True}}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_steps_of_a_decoder_follow_one_another_without_a_wait(cuda, options):
    decoder = decoder_of(**options)
    with own_stream(FIRST):
        close(logits_of(decoder))
    assert found(cuda) == []
    assert bool(cuda.graphs) is (options != {"graphs": False})


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_canvases_of_a_diffusion_model_follow_one_another_without_a_wait(cuda, options):
    shape = replace(SHAPE, masking=Masking(0))
    steps = [seeing((0, 0, TOKENS[:6], [6] * 6), (2, 0, TOKENS[7:11], [4] * 4)) for _ in range(4)]

    def logits(decoder):
        return [one.cpu().numpy() for one in [decoder.forward(step).clone() for step in steps]]

    decoder = decoder_of(shape, **options)
    with own_stream(FIRST):
        answers = logits(decoder)
    for one, other in zip(answers, logits(decoder_of(shape, torch.device("cpu"), graphs=False)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    assert found(cuda) == []
    assert bool(cuda.graphs) is (options == {})


MAKERS = {
    "whole": decoder_of,
    "in stages": split_decoder,
    "in stages on two devices": lambda shape: split_decoder(shape, (FIRST, SECOND)),
}


@pytest.mark.sample
@pytest.mark.parametrize(
    ("make", "shape"),
    [("whole", "experts"), ("in stages", "plain"), ("in stages on two devices", "experts")],
    ids=str,
)
def test_weights_that_another_thread_packs_are_exchanged_between_two_steps(cuda, make, shape):
    shape = SHAPES[shape]
    decoder = MAKERS[make](shape)
    with own_stream(FIRST):
        decoder.forward(next(two_rows()))
        exchange(decoder, shape)
        close(logits_of(decoder), shape, 2)
    decoder.close()
    assert found(cuda) == []


@pytest.mark.sample
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_an_adapter_that_another_thread_packs_is_given_back_behind_a_step(cuda, make):
    decoder = make(SHAPE)
    with own_stream(FIRST):
        adapt(decoder, SHAPE)
    decoder.close()
    assert found(cuda) == []


def driver_of(place=None, **options):
    return Driver(generator_of(**options), place=place)


def submitted(driver, texts):
    futures = []
    sampling = Sampling(max_tokens=4, top_p=0.9, ignore_eos=True)
    for prepared in driver.generator.prepare([Prompt(text=text, key=text, sampling=sampling) for text in texts]):
        futures.append(future := Future())
        driver.submit(prepared, future.set_result)
    return futures


def tokens_of(futures):
    return [future.result(WAIT_S).completions[0].tokens for future in futures]


@pytest.mark.thorough
def test_models_of_text_and_of_rows_share_a_device(cuda):
    gate = DeviceArbiter(AT_ONCE, of_cores=False)
    drivers = [driver_of(gate.join()) for _ in range(2)]
    forward, place = forward_of_rows(), gate.join()

    def text(driver):
        """Some prompts, while weights are exchanged."""
        futures = submitted(driver, ["abc", "hello", "x y", "abcd"])
        driver.update("1", driver.generator.read_weights("1"), drain=False).result(WAIT_S)
        return tokens_of(futures + submitted(driver, ["abc"]))

    def rows():
        for seed in range(3):
            blocks, features = blocks_of("bytes", [50], seed)
            with place.turn(1, lambda station: None):
                check(forward(blocks), features)
            wait_for_device(FIRST)
            release_cached_memory()

    answers = in_threads(3, lambda number: text(drivers[number]) if number < 2 else rows())
    for driver in drivers:
        driver.close()
    assert found(cuda) == []
    assert [[len(tokens) for tokens in one] for one in answers[:2]] == [[4] * 5] * 2


@pytest.mark.sample
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_generator_goes_on_with_tokens_that_it_has_not_seen(cuda, monkeypatch, options):
    """But for a deterministic one; and its answers are those of a processor."""
    ahead, forward = [], TorchDecoder.forward

    def noted(decoder, step):
        ahead.append(step.drawn is not None)
        return forward(decoder, step)

    monkeypatch.setattr(TorchDecoder, "forward", noted)
    texts, answers = ["abc", "hello", "x y", "abcd", "what", "say"], []
    for device in (FIRST, torch.device("cpu")):
        driver = driver_of(device=device, **options)
        answers.append(tokens_of(submitted(driver, texts)))
        driver.close()
    assert found(cuda) == []
    assert answers[0] == answers[1]
    assert any(ahead) is (options != {"deterministic": True})


@pytest.mark.thorough
def test_a_diffusion_model_fills_masks_on_a_stream_of_its_own(cuda):
    tuning = TorchModelOptions(slots=2, context=64, threads=1, pages=6)
    generator = open_generator(
        ModelSpec("tiny-llada", kind="text"), Setup(devices=("cuda:0",), dtype="float32"), tuning
    )
    driver, futures = Driver(generator), list[Future]()
    for prepared in generator.prepare([prompt_of("what is", 8), prompt_of("so it", 8)]):
        futures.append(future := Future())
        driver.submit(prepared, future.set_result)
    assert [len(tokens) for tokens in tokens_of(futures)] == [8, 8]
    driver.close()
    assert found(cuda) == []


def test_nothing_but_capturing_gives_cached_memory_back():
    """It would do so while another thread captures."""
    places = [str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.py") if "empty_cache(" in path.read_text()]
    assert places == ["models/cuda_graphs.py"]


def assert_close(state, expected):
    assert state.keys() == expected.keys()
    for name, one in expected.items():
        np.testing.assert_allclose(state[name].numpy(), one.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("model", ["blobnet-small", "train_models:Normed"])
def test_steps_of_training_on_the_device_are_the_cpus(cuda, model):
    there, here = Training(model), Training(model, torch.device("cpu"))
    np.testing.assert_allclose(there.steps(3), here.steps(3), rtol=1e-4)
    assert {one.device for one in there.stepper.weights.values()} == {FIRST}
    assert_close(there.stepper.state(), here.stepper.state())
    assert found(cuda) == []


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_gradients_on_the_device_that_are_not_finite_change_nothing(cuda, value):
    training = Training()
    training.steps(2)
    before = {name: one.clone() for name, one in training.stepper.state().items()}
    gradients = training.passed()
    gradients.by_name["heads.weight"][0, 0] = value
    with pytest.raises(
        WorkError, match=f"the gradients' norm is {value}: training has diverged. Lower --learning-rate"
    ):
        training.stepper.step(gradients, 1e-2)
    after = training.stepper.state()
    assert all(torch.equal(after[name], one) for name, one in before.items())
    assert found(cuda) == []

"""Gradients of a loss: those of plain torch, with and without checkpoints, and clear words about what is no loss."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from one_batch import answered
from torch.nn import functional
from train_models import ACTIONS, FEATURES, SEATS, batch_of, positions

from gpuinfer.api import ModelSpec, Request, Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.errors import BackendError, UsageError
from gpuinfer.models.load import trainable
from gpuinfer.models.losses import policy_value


def spec(name="blobnet-small", **changes):
    sizes = {"actions": ACTIONS, "seats": SEATS}
    return ModelSpec(name, None, FEATURES, "uint8", sizes, **{"kind": "gradients", **changes})


async def answers(*batches, model=None, setup=None, **options):
    backend = InProcess(setup or Setup(model=model or spec(), devices=("cpu",)), threads=1, **options)
    return await answered(backend, [Request(one, len(one.features)) for one in batches])


async def gradients(*batches, **options):
    found = await answers(*batches, **options)
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found


def plain(model, batch, value_weight=1.0):
    """The same by hand: loss and gradients of the module in training."""
    module = trainable(model, 0).train()
    if batch.weights is not None:
        module.load_state_dict({name: torch.tensor(one) for name, one in batch.weights.items()})
    targets = {name: torch.tensor(one) for name, one in batch.targets.items()}
    logits, values = module(torch.tensor(batch.features).float())
    policy = functional.cross_entropy(torch.where(targets["legal"], logits, torch.tensor(-1e9)), targets["policy"])
    loss = policy + value_weight * ((values - targets["value"]) ** 2).mean()
    loss.backward()
    return float(loss.detach()), {name: one.grad.numpy() for name, one in module.named_parameters()}


def assert_same(found, expected, tolerance=1e-6):
    assert found.keys() == expected.keys()
    for name, one in found.items():
        assert one.dtype == np.float32
        np.testing.assert_allclose(one, expected[name], rtol=1e-4, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("name", ["blobnet-small", "blobnet"])
async def test_gradients_are_those_of_a_plain_torch_loop(name):
    batch = batch_of(40, settings={"value_weight": 0.5})
    [found] = await gradients(batch, model=spec(name))
    loss, expected = plain(spec(name), batch, 0.5)
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert found.parts["policy"] + 0.5 * found.parts["value"] == pytest.approx(loss, rel=1e-5)
    assert_same(found.by_name, expected)
    assert found.activation_bytes > 0


async def test_weights_of_the_batch_are_computed_with_and_taken_once_for_each_version():
    weights = {name: one.numpy() + 0.01 for name, one in trainable(spec(), 7).state_dict().items()}
    own, given_ones = batch_of(16), batch_of(16, weights=weights, version=3)
    first, second, again = await gradients(own, given_ones, own)
    assert_same(second.by_name, plain(spec(), given_ones)[1])
    assert_same(again.by_name, dict(first.by_name), 0)
    wide = {name: one.astype(np.float64) for name, one in weights.items()}
    other = {name: one * 2 for name, one in wide.items()}
    asked = [batch_of(8, weights=one, version=version) for one, version in ((wide, 1), (other, 1), (other, 2))]
    first, same, changed = await gradients(*asked)
    assert first.loss == same.loss != changed.loss


async def test_a_pass_goes_to_the_thread_of_whoever_asks_with_as_many_threads_as_the_backend_has():
    with ThreadPoolExecutor(1) as executor:
        executor.submit(torch.set_num_threads, 2).result()
        (found,) = await gradients(batch_of(8, executor=executor))
        assert executor.submit(torch.get_num_threads).result() == 1
    assert_same(found.by_name, (await gradients(batch_of(8)))[0].by_name, tolerance=0)


@pytest.mark.parametrize("segments", [1, 2, 4, "auto"])
@pytest.mark.parametrize("model", ["blobnet", "train_models:Deep"])
async def test_checkpointed_gradients_are_those_without(model, segments):
    [without] = await gradients(batch_of(12), model=spec(model))
    [found] = await gradients(batch_of(12), model=spec(model), checkpoint_segments=segments)
    assert found.loss == pytest.approx(without.loss, abs=1e-6)
    assert_same(found.by_name, dict(without.by_name))


async def test_four_segments_of_24_layers_hold_under_half_of_the_activations():
    batch = batch_of(512)
    [without] = await gradients(batch, model=spec("train_models:Deep"))
    [found] = await gradients(batch, model=spec("train_models:Deep"), checkpoint_segments=4)
    assert found.activation_bytes < 0.45 * without.activation_bytes


async def test_dropout_is_drawn_from_the_seed_and_the_version_and_running_means_come_back():
    weights = {name: one.numpy() for name, one in trainable(spec("train_models:Deep"), 0).state_dict().items()}
    asked = [batch_of(8, weights=weights, version=version) for version in (1, 1, 2)]
    first, same, other = await gradients(*asked, model=spec("train_models:Deep"))
    assert first.loss == same.loss != other.loss
    [found, again] = await gradients(batch_of(8), batch_of(8), model=spec("train_models:Normed"))
    assert set(found.buffers) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert found.buffers["norm.num_batches_tracked"] == again.buffers["norm.num_batches_tracked"] == 1


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("per_row", r"returned a tensor \[4\] of torch.float32, and not one number"),
        ("number", "returned a float, and not one number"),
        ("three", "returned a tuple of 3, and not one number"),
        ("unnamed", "returned, beside the scalar, what are no numbers by name"),
        ("many", "returned, beside the scalar, what are no numbers by name"),
        ("broken", r"raised KeyError: 'visits'.*given answers \[4, 7\] and \[4, 2\] and the targets policy"),
        ("nothing", "is nan. Lower the learning rate"),
        ("apart", "does not depend on the model's parameters"),
    ],
)
async def test_what_is_no_loss_is_refused(loss, said):
    [found] = await answers(batch_of(4), loss=f"train_models:{loss}")
    assert isinstance(found, BackendError)
    with pytest.raises(BackendError, match=said):
        raise found


async def test_a_loss_takes_the_settings_that_it_names():
    once, thrice = await gradients(
        batch_of(4, settings={"value_weight": 1.0, "other": 2.0}),
        batch_of(4, settings={"value_weight": 3.0}),
        loss="train_models:weighed",
    )
    assert thrice.loss == pytest.approx(3 * once.loss)
    assert once.loss_name == "train_models:weighed"


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("train_models:Deep", {"loss": "crossentropy"}, "Write -B loss=module:function"),
        ("train_models:Deep", {"loss": "train_models:los"}, "no loss in module 'train_models' named 'los'"),
        ("train_models:Deep", {"checkpoint_segments": 25}, "has 24 layers. Give no more"),
        ("train_models:Deep", {"in_flight": 2}, "one batch at a time"),
        ("train_models:Deep", {"compile": True}, "not for gradients"),
        ("train_models:Deep", {"checkpoint_segments": 2, "layers": "rows"}, "It has: layers"),
        (
            "train_models:Twice",
            {"checkpoint_segments": 2},
            r"layers, tower .* Name the attribute .* -B layers=",
        ),
        ("train_models:Skipping", {"checkpoint_segments": 2}, "in segments.* or leave -B checkpoint_segments out"),
        (
            "blobnet-small",
            {"checkpoint_segments": 2},
            "no ModuleList to name either: .* or leave -B checkpoint",
        ),
        ("blobnet-small", {"setup": Setup(model=spec(), devices=("cpu",), dtype="float16")}, "Use --dtype bfloat16"),
    ],
)
async def test_options_and_models_that_cannot_be_are_refused(model, options, said):
    with pytest.raises(UsageError, match=said):
        await answers(batch_of(4), model=spec(model), **options)


async def test_what_is_no_batch_of_training_is_refused():
    [found] = await answers(batch_of(3), setup=Setup(model=spec(kind="rows"), devices=("cpu",)), backward=True)
    assert found.by_name
    made = batch_of(3)
    short = replace(made, targets={**made.targets, "value": made.targets["value"][:2]})
    backend = InProcess(Setup(model=spec(), devices=("cpu",)))
    plain_rows, short = await answered(backend, [Request(made.features, 3), Request(short, 3)])
    assert "TrainingBatch, and this is ndarray" in str(plain_rows)
    assert "the target 'value' is [2, 2] for 3 rows" in str(short)


@given(st.integers(1, 6), st.integers(0, 1000), st.floats(0, 10))
@settings(max_examples=20)
def test_the_built_in_loss_is_finite_where_moves_are_forbidden(rows, seed, weight):
    made = positions(rows, seed)
    legal = torch.tensor(made["legal"])
    logits = torch.randn(rows, ACTIONS, requires_grad=True)
    values = torch.randn(rows, SEATS)
    masked = torch.where(legal, logits, torch.tensor(float("-inf")))
    targets = {name: torch.tensor(made[name]) for name in ("policy", "value")}
    loss, _ = policy_value((masked, values), targets, weight)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad is not None
    assert (logits.grad[~legal] == 0).all()
    again, _ = policy_value((logits, values), {**targets, "legal": legal}, weight)
    assert again.item() == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("segments", [None, 3])
async def test_gradients_on_cuda_are_the_cpus(segments):
    weights = {name: one.numpy() for name, one in trainable(spec("blobnet"), 7).state_dict().items()}
    batches = [batch_of(40), batch_of(40, weights=weights, version=1), batch_of(40)]
    on_cpu = await gradients(*batches, model=spec("blobnet"))
    setup = Setup(model=spec("blobnet"), devices=("cuda",))
    for found, expected in zip(
        await gradients(*batches, setup=setup, checkpoint_segments=segments), on_cpu, strict=True
    ):
        assert found.loss == pytest.approx(expected.loss, rel=1e-4)
        assert_same(found.by_name, dict(expected.by_name), 1e-4)
        assert found.activation_bytes > 0

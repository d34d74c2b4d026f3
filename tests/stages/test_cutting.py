"""A model as a list of layers."""

import pytest
import staged_models
import torch
from torch import nn

from gpuinfer.errors import UsageError
from gpuinfer.models.networks import BlobNet, BlobNetSmall
from gpuinfer.models.pipeline.layer_trace import segments_of


def through(segments, features):
    value = features
    for segment in segments:
        value = segment(value)
    return value


def parts(answer):
    return (
        list(answer.values()) if isinstance(answer, dict) else list(answer) if isinstance(answer, tuple) else [answer]
    )


@pytest.mark.parametrize(
    ("module", "attribute", "count"),
    [
        pytest.param(staged_models.line(), None, 6, id="a Sequential within one, a layer that comes twice"),
        pytest.param(staged_models.Named(), None, 5, id="segments()"),
        pytest.param(staged_models.Skipping(), "blocks", 4, id="an attribute, with values that skip layers"),
        pytest.param(staged_models.OneRow(), None, 4, id="the only row of alike layers"),
        pytest.param(nn.Sequential(staged_models.Skipping()), "0.blocks", 4, id="an attribute within another"),
        pytest.param(nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 2))), "1", 2, id="a member"),
    ],
)
def test_layers_one_after_the_other_answer_as_the_model(module, attribute, count):
    segments = segments_of(module.eval(), "a-model", attribute)
    assert len(segments) == count
    features = torch.randn(5, 6)
    with torch.inference_mode():
        expected, found = module(features.clone()), through(segments, features.clone())
    assert type(found) is type(expected)
    for ours, theirs in zip(parts(found), parts(expected), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("network", "count"), [(BlobNet, 8), (BlobNetSmall, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_built_in_networks_are_cut_to_the_bit(network, count, dtype):
    module = network(40, 7, 3).eval().freeze(device=torch.device("cpu"), dtype=dtype)
    segments = segments_of(module, "blobnet")
    assert len(segments) == count
    features = torch.randint(0, 2, (9, 40)).to(dtype)
    with torch.inference_mode():
        for ours, theirs in zip(through(segments, features), module(features), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("module", "attribute", "said"),
    [
        pytest.param(staged_models.Skipping(), None, "-B layers=blocks \\(or other\\)", id="which attribute to name"),
        pytest.param(staged_models.Opaque(), None, "no ModuleList to name", id="none to name"),
        pytest.param(staged_models.Skipping(), "embed", "'embed' is Linear", id="no list"),
        pytest.param(staged_models.Opaque(), "blocks", "has no such attribute", id="no such attribute, and no list"),
        pytest.param(staged_models.Backwards(), "blocks", "once each and in their order", id="another order"),
        pytest.param(staged_models.Skipping(), "other", "once each and in their order", id="never called"),
        pytest.param(staged_models.Deciding(), "blocks", "Give it a method segments", id="depends on values"),
        pytest.param(staged_models.NoList(), None, "returned int", id="segments() that lists nothing"),
    ],
)
def test_a_model_whose_layers_cannot_be_told_apart_says_what_to_name(module, attribute, said):
    with pytest.raises(UsageError, match=said):
        segments_of(module, "a-model", attribute)

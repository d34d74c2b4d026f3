"""Other weights for a model that is at work: of its shape, or refused by name."""

from __future__ import annotations

import pytest
import torch
from decoders import opened
from tiny import copy_of, tiny_checkpoint

from gpuinfer.api import ModelSpec
from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint import open_checkpoint
from gpuinfer.text.checkpoint.loader import read_other_weights
from gpuinfer.text.decoder.torch_layers import tensors_of


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(tensors_of(one), tensors_of(other), strict=True))


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
@pytest.mark.parametrize("where", ["the folder", "its file", "a folder without settings", "shards"])
def test_weights_are_read_from_wherever_a_trainer_leaves_them(family, where, tmp_path):
    own = opened(tiny_checkpoint(family))
    folder = tiny_checkpoint(family, seed=1, shard="100KB") if where == "shards" else tiny_checkpoint(family, seed=1)
    wanted = opened(folder).weights(torch.float32)
    place = folder
    if where == "its file":
        place = folder / "model.safetensors"
    if where == "a folder without settings":
        place = copy_of(folder, tmp_path / "bare")
        (place / "config.json").unlink()
    assert same(read_other_weights(own, str(place), torch.float32), wanted)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param({"num_hidden_layers": 3}, "layers 3 instead of 2", id="more layers"),
        pytest.param({"intermediate_size": 96}, "intermediate 96 instead of 160", id="narrower"),
        pytest.param({"tie_word_embeddings": True}, r"'lm_head.weight' \[384, 64\] is missing", id="a tied head"),
    ],
)
def test_weights_of_another_shape_are_refused_with_what_differs(given, said):
    own, other = opened(tiny_checkpoint("llama")), tiny_checkpoint("llama", **given)
    with pytest.raises(UsageError, match=said):
        read_other_weights(own, str(other), torch.float32)


def test_a_head_of_its_own_does_not_fit_a_model_without():
    own, other = (opened(tiny_checkpoint("llama", tie_word_embeddings=tied)) for tied in (True, False))
    with pytest.raises(UsageError, match="a head of their own"):
        read_other_weights(own, str(other.folder), torch.float32)


def test_a_file_of_another_shape_is_refused_by_its_tensors(tmp_path):
    own, other = opened(tiny_checkpoint("llama")), tiny_checkpoint("llama", intermediate_size=96)
    with pytest.raises(UsageError, match=r"gate_proj.*\[96, 64\]"):
        read_other_weights(own, str(other / "model.safetensors"), torch.float32)


@pytest.mark.parametrize(
    ("model", "place", "said"),
    [
        pytest.param("tiny", "nowhere", "there are no weights at nowhere", id="nothing there"),
        pytest.param("null", "nowhere", "has no weights that could be changed", id="a model that computes nothing"),
    ],
)
def test_what_is_not_there_is_said(model, place, said):
    with pytest.raises(UsageError, match=said):
        read_other_weights(open_checkpoint(ModelSpec(model, kind="text")), place, torch.float32)

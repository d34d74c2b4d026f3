"""Folders as PEFT saves them: what they come to in our names, and what is refused with which cure."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from random_adapters import peft_folder, random_adapter
from safetensors.torch import load_file, save_file
from text.decoders import opened
from text.tiny import tiny_checkpoint
from text.tiny_diffusion import tiny_diffusion

from gpuinfer.api import ModelSpec
from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint import adapter_bytes, open_checkpoint, read_adapter


@pytest.fixture(scope="module")
def checkpoint():
    return opened(tiny_checkpoint("qwen2"))


def refused(checkpoint, folder, *words):
    with pytest.raises(UsageError) as told:
        read_adapter(checkpoint, str(folder))
    for word in words:
        assert word in str(told.value)


def changed(folder, **tensors):
    """The same folder with other tensors; None leaves one out."""
    file = folder / "adapter_model.safetensors"
    found = load_file(file) | {name: value for name, value in tensors.items() if value is not None}
    save_file({name: value for name, value in found.items() if tensors.get(name, 0) is not None}, file)
    return folder


def same(found, wanted, scale=1.0):
    for layer, other in zip(found.layers, wanted.layers, strict=True):
        by_place = {(low.product, low.first): low for low in layer}
        assert len(by_place) == len(other)
        for low in other:
            own = by_place[low.product, low.first]
            torch.testing.assert_close(own.down, low.down)
            torch.testing.assert_close(own.up, scale * low.up)


def test_all_layers_are_found_under_their_names(checkpoint, tmp_path):
    shape = checkpoint.shape
    same(read_adapter(checkpoint, str(peft_folder(tmp_path / "all", shape))), random_adapter(shape))
    some = peft_folder(tmp_path / "some", shape, 7, 3, ("v", "gate"))
    same(read_adapter(checkpoint, str(some)), random_adapter(shape, 7, 3, ("v", "gate")))


def test_the_scale_is_as_the_configuration_says(checkpoint, tmp_path):
    for number, (config, scale) in enumerate(
        [
            ({"lora_alpha": 16}, 4.0),
            ({"lora_alpha": 16, "use_rslora": True}, 8.0),
            ({"lora_alpha": 16, "alpha_pattern": {"proj": 1, ".*_proj": 2}}, 0.5),
            ({"lora_alpha": 3.0, "unheard_of": None, "init_lora_weights": "gaussian"}, 0.75),
        ]
    ):
        folder = peft_folder(tmp_path / str(number), checkpoint.shape, **config)
        same(read_adapter(checkpoint, str(folder)), random_adapter(checkpoint.shape), scale)


def test_ranks_may_differ_by_pattern(checkpoint, tmp_path):
    one, two = (peft_folder(tmp_path / name, checkpoint.shape, rank) for name, rank in (("a", 4), ("b", 2)))
    other = {name: value for name, value in load_file(two / "adapter_model.safetensors").items() if "q_proj" in name}
    folder = changed(one, **other)
    refused(checkpoint, folder, "says rank 4", "has rank 2", "rank_pattern")
    config = json.loads((folder / "adapter_config.json").read_text()) | {"rank_pattern": {"q_proj": 2}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert {low.rank for low in read_adapter(checkpoint, str(folder)).layers[0]} == {2, 4}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, ["of type 'IA3'", "merge_and_unload"]),
        ({"use_dora": True}, ["DoRA", "Merge it"]),
        ({"modules_to_save": ["lm_head"]}, ["whole modules", "Merge it"]),
        ({"bias": "lora_only"}, ["bias 'lora_only'", "Merge it"]),
        ({"lora_bias": True}, ["biases of its own"]),
        ({"init_lora_weights": "pissa"}, ["pissa", "changes the base too"]),
        ({"r": 8}, ["says rank 8", "has rank 4", "adapter_config.json"]),
        ({"r": 0}, ["'r' is 0"]),
        ({"r": 100_000}, ["'r' is 100000"]),
        ({"lora_alpha": "much"}, ["'lora_alpha' is 'much'"]),
        ({"wholly_new": 3}, ["wholly_new", "not known here"]),
        ({"layer_replication": [[0, 2]]}, ["repeats layers"]),
        ({"rank_pattern": {"q_proj": "2"}}, ["rank_pattern"]),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_a_configuration_that_cannot_be_honoured_is_refused_with_the_cure(checkpoint, tmp_path, config, words):
    refused(checkpoint, peft_folder(tmp_path / "one", checkpoint.shape, **config), *words)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("base_model.model.lm_head.lora_A.weight", torch.zeros(4, 64), "lm_head"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", torch.zeros(4, 64), "embed_tokens"),
        (f"{FIRST}.lora_magnitude_vector", torch.zeros(64), "magnitude"),
        (f"{FIRST}.bias", torch.zeros(64), "q_proj.bias"),
        (f"{FIRST}.lora_B.weight", None, "no lora_B of model.layers.0.self_attn.q_proj"),
        (f"{FIRST}.lora_A.weight", torch.full((4, 64), float("nan")), "NaN"),
        (f"{FIRST}.lora_A.weight", torch.zeros(4, 64, 1), "another base"),
    ],
)
def test_tensors_that_are_no_low_ranks_of_layers_are_refused(checkpoint, tmp_path, name, value, word):
    refused(checkpoint, changed(peft_folder(tmp_path / "one", checkpoint.shape), **{name: value}), word)


def test_what_is_not_there_or_damaged_or_of_another_base_is_said(checkpoint, tmp_path):
    wide, deep = (
        opened(tiny_checkpoint("llama", **more)).shape for more in ({"hidden_size": 128}, {"num_hidden_layers": 3})
    )
    refused(checkpoint, peft_folder(tmp_path / "wide", wide), "for another base", "[128, 4]", "[64, 4]")
    refused(checkpoint, peft_folder(tmp_path / "deep", deep), "adapts layer 2", "2 layers")
    refused(checkpoint, tmp_path / "nowhere", "no folder", "save_pretrained")
    refused(checkpoint, tiny_checkpoint("qwen2"), "adapter_config.json")
    pickled = peft_folder(tmp_path / "pickled", checkpoint.shape)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    refused(checkpoint, pickled, "pickle", "safe_serialization")
    (pickled / "adapter_model.bin").unlink()
    refused(checkpoint, pickled, "no adapter_model.safetensors")
    empty = peft_folder(tmp_path / "empty", checkpoint.shape)
    save_file({}, empty / "adapter_model.safetensors")
    refused(checkpoint, empty, "no tensor at all")
    (empty / "adapter_model.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    refused(checkpoint, empty, "damaged")
    (empty / "adapter_config.json").write_text("[]")
    refused(checkpoint, empty, "JSON object")
    null = open_checkpoint(ModelSpec("null", kind="text"))
    refused(null, peft_folder(tmp_path / "one", checkpoint.shape), "no layers")


def low_ranks(folder, modules):
    """An adapter as PEFT saves it, of these modules with so many outputs and inputs."""
    folder.mkdir()
    tensors = {}
    for name, (outputs, inputs) in modules.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(2, inputs)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, 2)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "fan_in_fan_out": True}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


GPT2, LLADA, LLADA2 = "transformer.h.1.", "model.transformer.blocks.1.", "model.layers.1.attention."
ADAPTED = {  # modules with their outputs and inputs; products, first outputs, numbers of outputs
    "gpt2": (
        {f"{GPT2}attn.c_attn": (192, 64), f"{GPT2}attn.c_proj": (64, 64)}
        | {f"{GPT2}mlp.c_fc": (256, 64), f"{GPT2}mlp.c_proj": (64, 256)},
        [("qkv", 0, 64), ("qkv", 64, 64), ("qkv", 128, 64), ("out", 0, 64), ("up", 0, 256), ("down", 0, 64)],
    ),
    "llada": (
        {f"{LLADA}v_proj": (32, 64), f"{LLADA}ff_out": (64, 160)},
        [("qkv", 96, 32), ("down", 0, 64)],
    ),
    "llada2": (
        {f"{LLADA2}query_key_value": (128, 64), f"{LLADA2}dense": (64, 64)},
        [("qkv", 0, 64), ("qkv", 64, 32), ("qkv", 96, 32), ("out", 0, 64)],
    ),
    "sdar": ({"model.layers.1.self_attn.o_proj": (64, 128)}, [("out", 0, 64)]),
}


@pytest.mark.parametrize("family", ADAPTED)
def test_adapters_are_found_under_the_familys_names(family, tmp_path):
    modules, expected = ADAPTED[family]
    base = opened(tiny_checkpoint("gpt2") if family == "gpt2" else tiny_diffusion(family))
    adapter = read_adapter(base, str(low_ranks(tmp_path / "adapter", modules)))
    assert adapter.layers[0] == ()
    assert sorted((low.product, low.first, len(low.up)) for low in adapter.layers[1]) == sorted(expected)
    if family == "llada2":
        experts = low_ranks(tmp_path / "experts", {"model.layers.1.mlp.experts.0.up_proj": (48, 64)})
        refused(base, experts, "here only query_key_value, dense of the layers can be")


def test_what_one_takes_is_known_before_it_is_packed(checkpoint, tmp_path):
    adapter = read_adapter(checkpoint, str(peft_folder(tmp_path / "one", checkpoint.shape, 16)))
    assert adapter_bytes(adapter) == adapter.nbytes
    plain, more = (checkpoint.estimate(4, 8, 64, torch.float32, beside) for beside in (0, adapter_bytes(adapter)))
    assert more.peak_bytes - plain.peak_bytes == more.weights_bytes - plain.weights_bytes == adapter.nbytes

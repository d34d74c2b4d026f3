"""Folders that are incomplete, foreign or damaged are refused with a cure; none ends in a traceback."""

from __future__ import annotations

import contextlib
import json
import struct

import pytest
import torch
from counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from text.tiny import copy_of, tiny_checkpoint
from text.tiny_diffusion import config_of, tiny_diffusion

from gpuinfer.api import ModelSpec
from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint import open_checkpoint
from gpuinfer.text.checkpoint.config_keys import ANOTHER_DECODER
from gpuinfer.text.checkpoint.safetensors_folder import SafetensorsStore, read_header

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
QUERY = "model.layers.1.self_attn.q_proj.weight"
EXPERT = "model.layers.1.mlp.experts."


def open_named(name):
    open_checkpoint(ModelSpec(str(name), kind="text")).weights(torch.float32)


def refusal(name):
    with pytest.raises(UsageError) as refused:
        open_named(name)
    message = str(refused.value)
    assert len(message) < 900 + len(str(name))
    return message


@pytest.fixture
def folder(tmp_path):
    return copy_of(tiny_checkpoint("llama"), tmp_path / "model")


@pytest.mark.parametrize("name", ["", "no/such/owner", "~nobody-of-that-name/x", "a\0b", "x" * 5000, "tiney", "modle"])
def test_names_that_mean_nothing(name, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    message = refusal(name)
    assert "there is no model folder" in message
    assert ("Did you mean 'tiny'?" in message) == (name == "tiney")
    assert f"Did you mean '{folder}'?" in refusal(folder.parent / "modle")
    assert "is a file. Give the folder" in refusal(folder / FILE)


def test_a_folder_in_the_working_folder_goes_before_a_built_in_model(folder, monkeypatch):
    folder.rename(folder.parent / "tiny")
    monkeypatch.chdir(folder.parent)
    assert open_checkpoint(ModelSpec("tiny", kind="text")).shape.family == "llama"


@pytest.mark.parametrize(
    ("present", "named", "cure"),
    [
        ("adapter_config.json", "", "Merge it into its base model"),
        ("ckpt.pt", "", "--checkpoint"),
        ("model.gguf", "", "Give the file itself: --model"),
        ("notes.txt", "", "Check --model"),
        ("model.gguf", "model.gguf", "it ends within its header"),
    ],
)
def test_a_folder_without_config(present, named, cure, tmp_path):
    (tmp_path / present).write_text("")
    assert cure in refusal(tmp_path / named)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"a":' * 100_000, b"\xff", b'{"vocab_size": ' + b"9" * 5000 + b"}"],
    ids=["empty", "cut short", "a list", "nested without end", "no UTF-8", "a number without end"],
)
def test_a_settings_file_that_is_no_json_object(content, folder):
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        (folder / name).write_bytes(content)
        assert name in refusal(folder)


def test_code_of_a_tokenizer_s_own_is_refused_but_for_dream_not_needed(folder, tmp_path):
    evil = {"auto_map": {"AutoTokenizer": ["evil.py", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(evil))
    message = refusal(folder)
    assert "(auto_map), which gpuinfer's own decoders never do." in message
    assert f"remove auto_map from {folder / 'tokenizer_config.json'}" in message
    dream = copy_of(tiny_diffusion("dream"), tmp_path / "dream")
    path = dream / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **evil, "tokenizer_class": "DreamTokenizer"}))
    open_named(dream)
    path.write_text(json.dumps({**evil, "tokenizer_class": "Other"}))
    assert "asks to run code of its own" in refusal(dream)


def test_absent_weights_and_pickles_with_code_are_refused(folder):
    (folder / FILE).unlink()
    assert "has neither model.safetensors nor" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    message = refusal(folder)
    assert "cannot read" in message
    assert "more than tensors and plain values" in message
    assert f'save_pretrained("{folder}")' in message


def test_damaged_indexes_and_missing_shards_are_named(tmp_path):
    sharded = copy_of(tiny_checkpoint("llama", shard="60KB"), tmp_path / "model")
    whole = (sharded / INDEX).read_text()
    for files in (None, {}, {"a": 1}, {"a": "../../etc/passwd"}, {"a": "weights.npz"}):
        (sharded / INDEX).write_text(json.dumps({} if files is None else {"weight_map": files}))
        assert INDEX in refusal(sharded), files
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"a": "pytorch_model.bin"}}))
    assert "lacks pytorch_model.bin of 1 shards" in refusal(sharded)
    (sharded / INDEX).write_text(whole)
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    name, *_ = state = load_file(first)
    del state[name]
    save_file(state, first)
    assert f"'{name}'" in refusal(sharded)
    second.unlink()
    assert second.name in refusal(sharded)


def without(*beginnings):
    return lambda state: {name: one for name, one in state.items() if not name.startswith(beginnings)}


def with_more(name, value):
    return lambda state: {**state, name: value}


BIAS = QUERY.replace("weight", "bias")
MISFITS = [  # family, what becomes of its tensors, what the message names
    ("llama", without(QUERY), f"'{QUERY}' [64, 64] is missing"),
    ("llama", with_more("model.extra.weight", torch.ones(2)), "'model.extra.weight' is not part of it"),
    ("llama", with_more(BIAS, torch.ones(64)), f"'{BIAS}' is not part"),
    ("llama", with_more(QUERY, torch.ones(32, 64)), f"'{QUERY}' is [32, 64], config.json makes it [64, 64]"),
    ("llama", lambda _: load_file(tiny_checkpoint("gpt2") / FILE), " more"),
    ("llada-moe", without(f"{EXPERT}5."), "expert 5 of 'model.layers.1.mlp' is missing."),
    ("llada2", without(*(f"{EXPERT}{n}." for n in (1, 3, 4, 5))), "experts 1, 3, 4 and 1 more of 'model.layers.1.mlp'"),
    ("llada2", without(f"{EXPERT}0.up_proj"), f"'{EXPERT}0.up_proj.weight' [48, 64] is missing"),
    *(
        ("llama", with_more(QUERY, torch.ones(64, 64).to(dtype)), ANOTHER_DECODER)
        for dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int32)
    ),
]


@pytest.mark.parametrize(("family", "change", "named"), MISFITS)
def test_tensors_that_do_not_fit_the_config_are_named(family, change, named, tmp_path):
    made = copy_of(tiny_checkpoint(family) if family == "llama" else tiny_diffusion(family), tmp_path / "model")
    save_file(change(load_file(made / FILE)), made / FILE)
    assert named in refusal(made)


def test_experts_beyond_those_of_the_config_are_named(tmp_path):
    folder = copy_of(tiny_diffusion("llada2"), tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(config_of("llada2", num_experts=6, n_group=3, topk_group=2)))
    assert "'model.layers.1.mlp.gate.weight' is [8, 64], config.json makes it [6, 64]" in refusal(folder)


def test_files_that_are_cut_short_or_shrink_or_vanish_once_opened(folder):
    path = folder / FILE
    whole = path.read_bytes()
    opened = open_checkpoint(ModelSpec(str(folder), kind="text"))
    path.write_bytes(whole[:-10_000])
    with pytest.raises(UsageError, match="ends within tensor"):
        opened.weights(torch.float32)
    path.unlink()
    with pytest.raises(UsageError, match="cannot read"):
        opened.weights(torch.float32)
    for left in (0, 5, 8, 100, 5000, 200_000):
        path.write_bytes(whole[:left])
        assert f"{path} is damaged" in refusal(folder)


def headed(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BAD_HEADERS = {
    "a header longer than the file": headed({}, length=1 << 62),
    "no UTF-8": headed(b"\xff\xfe"),
    "nested without end": headed(b"[" * 200_000),
    "a list": headed([]),
    "no object": headed({"a": 1}),
    "beyond the file": headed({"a": entry(offsets=(0, 80))}, bytes(8)),
    "end before begin": headed({"a": entry(offsets=(8, 0))}, bytes(8)),
    "before the file": headed({"a": entry(offsets=(-8, 0))}, bytes(8)),
    "a shape of other size": headed({"a": entry(shape=(3,))}, bytes(8)),
    "a shape beyond reason": headed({"a": entry(shape=(1 << 40, 1 << 40))}, bytes(8)),
    "a truth value for a size": headed({"a": entry(shape=[True, 2])}, bytes(8)),
    "a text for a shape": headed({"a": entry(shape="2")}, bytes(8)),
    "overlapping": headed({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_headers(case, tmp_path):
    (tmp_path / FILE).write_bytes(BAD_HEADERS[case])
    with pytest.raises(UsageError, match="is damaged"):
        read_header(tmp_path / FILE)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-4, 64) | st.floats() | st.sampled_from(["F32", "BF16", "I8", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "w"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(header=st.dictionaries(st.text(max_size=3), json_values, max_size=4), data=st.binary(max_size=64))
@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_a_header_says_it_is_read_or_refused(header, data, tmp_path):
    (tmp_path / FILE).write_bytes(headed(header, data))
    try:
        tensors = read_header(tmp_path / FILE)
    except UsageError:
        return
    store = SafetensorsStore("a file", tensors)
    for name, place in tensors.items():
        store.read(name, torch.empty(place.shape, dtype=torch.float32))
    assert store.digests(tensors).keys() == tensors.keys()


@given(at=st.integers(0, 4000), replaced=st.binary(min_size=1, max_size=12), kept=st.integers(0, 5000))
@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
def test_a_folder_whose_header_is_damaged_or_cut_is_opened_or_refused(at, replaced, kept, folder):
    content = bytearray((tiny_checkpoint("llama") / FILE).read_bytes())
    content[at : at + len(replaced)] = replaced
    (folder / FILE).write_bytes(content[: kept if kept < 1000 else None])
    with contextlib.suppress(UsageError):
        open_named(folder)

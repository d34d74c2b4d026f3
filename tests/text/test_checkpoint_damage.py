"""Folders that are incomplete, foreign or damaged are refused with a cure; none ends in a traceback."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable
from pathlib import Path

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
from gpuinfer.text.checkpoint.config_keys import ANOTHER_PROGRAM
from gpuinfer.text.checkpoint.safetensors_folder import SafetensorsStore, read_header

QUERY = "model.layers.1.self_attn.q_proj.weight"


def open_named(name: Path | str) -> None:
    open_checkpoint(ModelSpec(str(name), kind="text")).weights(torch.float32)


def refusal(name: Path | str) -> str:
    with pytest.raises(UsageError) as refused:
        open_named(name)
    message = str(refused.value)
    assert len(message) < 900
    return message


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_of(tiny_checkpoint("llama"), tmp_path / "model")


def without(*beginnings: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda state: {name: one for name, one in state.items() if not name.startswith(beginnings)}


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    return folder


def test_a_folder_that_is_not_there_is_told_from_its_neighbours(folder: Path) -> None:
    message = refusal(folder.parent / "modle")
    assert f"Did you mean '{folder}'?" in message
    assert "tiny" in message


@pytest.mark.parametrize("name", ["", "no/such/owner", "~nobody-of-that-name/x", "a\0b", "x" * 5000, "tiney"])
def test_names_that_mean_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="there is no model folder"):
        open_named(name)


def test_a_name_close_to_a_built_in_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "Did you mean 'tiny'?" in refusal("tinny")


def test_a_folder_in_the_working_folder_goes_before_a_built_in_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.rename(folder.parent / "tiny")
    monkeypatch.chdir(folder.parent)
    assert open_checkpoint(ModelSpec("tiny", kind="text")).shape.family == "llama"


def test_a_file_is_no_folder(folder: Path) -> None:
    assert "is a file. Give the folder" in refusal(folder / "model.safetensors")
    (folder / "model.gguf").touch()
    assert "GGUF files are not read. Give the original Hugging Face folder" in refusal(folder / "model.gguf")


@pytest.mark.parametrize(
    ("present", "cure"),
    [
        pytest.param("adapter_config.json", "Merge it into its base model", id="an adapter"),
        pytest.param("ckpt.pt", "--checkpoint", id="a nanoGPT folder"),
        pytest.param("model.gguf", "original Hugging Face folder", id="GGUF"),
        pytest.param("notes.txt", "Check --model", id="something else"),
    ],
)
def test_a_folder_without_config(present: str, cure: str, tmp_path: Path) -> None:
    (tmp_path / present).write_text("")
    assert cure in refusal(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("", id="empty"),
        pytest.param("{", id="cut short"),
        pytest.param("[]", id="a list"),
        pytest.param('{"a":' * 100_000, id="nested without end"),
        pytest.param("\udcff", id="no UTF-8"),
        pytest.param('{"vocab_size": ' + "9" * 5000 + "}", id="a number without end"),
    ],
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_settings_file_that_is_no_json_object(file: str, content: str, folder: Path) -> None:
    (folder / file).write_bytes(content.encode(errors="surrogateescape"))
    assert file in refusal(folder)


def test_code_of_a_tokenizer_s_own_is_refused_but_for_dream_not_needed(folder: Path, tmp_path: Path) -> None:
    evil = {"auto_map": {"AutoTokenizer": ["evil.py", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(evil))
    message = refusal(folder)
    assert "asks to run code of its own (auto_map), which is refused with every backend." in message
    assert f"remove auto_map from {folder / 'tokenizer_config.json'}" in message
    dream = copy_of(tiny_diffusion("dream"), tmp_path / "dream")
    path = dream / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **evil, "tokenizer_class": "DreamTokenizer"}))
    open_named(dream)
    path.write_text(json.dumps({**evil, "tokenizer_class": "Other"}))
    assert "asks to run code of its own" in refusal(dream)


def test_absent_and_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "has neither model.safetensors nor" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    message = refusal(folder)
    assert "save_pretrained" in message
    assert str(folder) in message


@pytest.mark.parametrize(
    "index",
    [
        pytest.param({}, id="no map"),
        pytest.param({"weight_map": {}}, id="an empty map"),
        pytest.param({"weight_map": {"a": 1}}, id="numbers for files"),
        pytest.param({"weight_map": {"a": "../../etc/passwd"}}, id="a file outside the folder"),
        pytest.param({"weight_map": {"a": "pytorch_model.bin"}}, id="a pickle"),
    ],
)
def test_an_index_that_is_damaged_is_refused(index: dict, tmp_path: Path) -> None:
    sharded = copy_of(tiny_checkpoint("llama", shard="60KB"), tmp_path / "model")
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model.safetensors.index.json" in refusal(sharded)


def test_a_shard_that_is_missing_or_incomplete_is_named(tmp_path: Path) -> None:
    sharded = copy_of(tiny_checkpoint("llama", shard="60KB"), tmp_path / "model")
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    name, *_ = state = load_file(first)
    del state[name]
    save_file(state, first)
    assert f"'{name}'" in refusal(sharded)
    second.unlink()
    assert second.name in refusal(sharded)


EXPERT = "model.layers.1.mlp.experts."
MISFITS = {  # family, change of its tensors, what the message names
    "a tensor is missing": ("llama", without(QUERY), f"'{QUERY}' [64, 64] is missing"),
    "an unknown tensor": (
        "llama",
        lambda state: {**state, "model.extra.weight": torch.ones(2)},
        "'model.extra.weight' is not part of it",
    ),
    "a bias that the config does not know": (
        "llama",
        lambda state: {**state, QUERY.replace("weight", "bias"): torch.ones(64)},
        f"'{QUERY.replace('weight', 'bias')}' is not part",
    ),
    "another shape": (
        "llama",
        lambda state: {**state, QUERY: torch.ones(32, 64)},
        f"'{QUERY}' is [32, 64], config.json makes it [64, 64]",
    ),
    "another model": ("llama", lambda _: load_file(tiny_checkpoint("gpt2") / "model.safetensors"), " more"),
    "an expert is missing": ("llada-moe", without(f"{EXPERT}5."), "expert 5 of 'model.layers.1.mlp' is missing."),
    "four experts are missing": (
        "llada2",
        without(*(f"{EXPERT}{number}." for number in (1, 3, 4, 5))),
        "experts 1, 3, 4 and 1 more of 'model.layers.1.mlp' are missing.",
    ),
    "half an expert": ("llada2", without(f"{EXPERT}0.up_proj"), f"'{EXPERT}0.up_proj.weight' [48, 64] is missing"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_tensors_that_do_not_fit_the_config_are_named(case: str, tmp_path: Path) -> None:
    family, change, named = MISFITS[case]
    made = tiny_checkpoint(family) if family == "llama" else tiny_diffusion(family)
    assert named in refusal(rewritten(copy_of(made, tmp_path / "model"), change))


def test_experts_beyond_those_of_the_config_are_named(tmp_path: Path) -> None:
    folder = copy_of(tiny_diffusion("llada2"), tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(config_of("llada2", num_experts=6, n_group=3, topk_group=2)))
    assert "'model.layers.1.mlp.gate.weight' is [8, 64], config.json makes it [6, 64]" in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int32])
def test_quantised_weights_are_sent_elsewhere(dtype: torch.dtype, folder: Path) -> None:
    quantised = rewritten(folder, lambda state: {**state, QUERY: torch.ones(64, 64).to(dtype)})
    assert refusal(quantised).endswith(ANOTHER_PROGRAM)


@pytest.mark.parametrize("left", [0, 5, 8, 100, 5000, 200_000])
def test_a_file_that_was_cut_short(left: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    assert f"{path} is damaged" in refusal(folder)


def test_a_file_that_shrinks_after_it_was_opened(folder: Path) -> None:
    checkpoint = open_checkpoint(ModelSpec(str(folder), kind="text"))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10_000])
    with pytest.raises(UsageError, match="ends within tensor"):
        checkpoint.weights(torch.float32)


def test_a_file_that_vanishes_after_it_was_opened(folder: Path) -> None:
    checkpoint = open_checkpoint(ModelSpec(str(folder), kind="text"))
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="cannot read"):
        checkpoint.weights(torch.float32)


def headed(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BAD_HEADERS = [
    pytest.param(headed({}, length=1 << 62), id="a header longer than the file"),
    pytest.param(headed(b"\xff\xfe"), id="no UTF-8"),
    pytest.param(headed(b"[" * 200_000), id="nested without end"),
    pytest.param(headed([]), id="a list"),
    pytest.param(headed({"a": 1}), id="no object"),
    pytest.param(headed({"a": entry(offsets=(0, 80))}, bytes(8)), id="beyond the file"),
    pytest.param(headed({"a": entry(offsets=(8, 0))}, bytes(8)), id="end before begin"),
    pytest.param(headed({"a": entry(offsets=(-8, 0))}, bytes(8)), id="before the file"),
    pytest.param(headed({"a": entry(shape=(3,))}, bytes(8)), id="a shape of other size"),
    pytest.param(headed({"a": entry(shape=(1 << 40, 1 << 40))}, bytes(8)), id="a shape beyond reason"),
    pytest.param(headed({"a": entry(shape=[True, 2])}, bytes(8)), id="a truth value for a size"),
    pytest.param(headed({"a": entry(shape="2")}, bytes(8)), id="a text for a shape"),
    pytest.param(headed({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)), id="overlapping"),
]


@pytest.mark.parametrize("content", BAD_HEADERS)
def test_bad_headers(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="is damaged"):
        read_header(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-4, 64) | st.floats() | st.sampled_from(["F32", "BF16", "I8", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "w"]), inner, max_size=4)
    ),
    max_leaves=12,
)


def read_or_refuse(path: Path) -> None:
    try:
        tensors = read_header(path)
    except UsageError:
        return
    store = SafetensorsStore("a file", tensors)
    for name, place in tensors.items():
        store.read(name, torch.empty(place.shape, dtype=torch.float32))
    assert store.digests(tensors).keys() == tensors.keys()


@given(header=st.dictionaries(st.text(max_size=3), json_values, max_size=4), data=st.binary(max_size=64))
@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_a_header_says_it_is_read_or_refused(header: dict, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(headed(header, data))
    read_or_refuse(path)


@given(at=st.integers(0, 4000), replaced=st.binary(min_size=1, max_size=12), kept=st.integers(0, 5000))
@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
def test_a_folder_whose_header_is_damaged_or_cut_is_opened_or_refused(
    at: int, replaced: bytes, kept: int, folder: Path
) -> None:
    content = bytearray((tiny_checkpoint("llama") / "model.safetensors").read_bytes())
    content[at : at + len(replaced)] = replaced
    (folder / "model.safetensors").write_bytes(content[: kept if kept < 1000 else None])
    with contextlib.suppress(UsageError):
        open_named(folder)

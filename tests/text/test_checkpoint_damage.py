"""Folders that are not whole, not ours or not sound are refused with the cure; nothing ends in a traceback."""

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


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return copy_of(tiny_checkpoint("llama", shard="60KB"), tmp_path / "model")


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")
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


def test_code_of_a_tokenizer_s_own_is_refused(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.py", None]}}))
    message = refusal(folder)
    assert "asks to run code of its own (auto_map), which is refused with every backend." in message
    assert f"remove auto_map from {folder / 'tokenizer_config.json'}" in message


def test_pickled_weights_are_refused_with_the_way_to_convert_them(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    message = refusal(folder)
    assert "save_pretrained" in message
    assert str(folder) in message


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "has neither model.safetensors nor" in refusal(folder)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    lost = sorted(sharded.glob("*.safetensors"))[1]
    lost.unlink()
    assert lost.name in refusal(sharded)


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
def test_an_index_that_is_none(index: dict, sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model.safetensors.index.json" in refusal(sharded)


def test_a_shard_that_lacks_what_the_index_says(sharded: Path) -> None:
    first = sorted(sharded.glob("*.safetensors"))[0]
    state = load_file(first)
    name = next(iter(state))
    del state[name]
    save_file(state, first)
    assert f"'{name}'" in refusal(sharded)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    assert f"'{QUERY}' [64, 64] is missing" in refusal(changed(folder, lambda state: state.pop(QUERY)))


def test_an_unknown_tensor_is_named(folder: Path) -> None:
    message = refusal(changed(folder, lambda state: state.update({"model.extra.weight": torch.ones(2)})))
    assert "'model.extra.weight' is not part of it" in message


def test_a_bias_that_the_config_does_not_know_is_not_dropped_in_silence(folder: Path) -> None:
    bias = QUERY.replace("weight", "bias")
    assert f"'{bias}' is not part" in refusal(changed(folder, lambda state: state.update({bias: torch.ones(64)})))


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    message = refusal(changed(folder, lambda state: state.update({QUERY: torch.ones(32, 64)})))
    assert f"'{QUERY}' is [32, 64], config.json makes it [64, 64]" in message


def test_another_model_s_weights_are_told_in_a_few_names(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((tiny_checkpoint("gpt2") / "model.safetensors").read_bytes())
    message = refusal(folder)
    assert "is missing" in message
    assert " more" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int32])
def test_quantised_weights_are_sent_elsewhere(dtype: torch.dtype, folder: Path) -> None:
    message = refusal(changed(folder, lambda state: state.update({QUERY: torch.ones(64, 64).to(dtype)})))
    assert message.endswith(ANOTHER_PROGRAM)


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


def damaged_somewhere(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        strategy = given(
            at=st.integers(0, 4000), replaced=st.binary(min_size=1, max_size=12), kept=st.integers(0, 5000)
        )
        quiet = settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
        return quiet(strategy(test))

    return decorate


def damage(folder: Path, at: int, replaced: bytes, kept: int) -> None:
    """Overwrite a few bytes of the header, and cut the file where `kept` is small."""
    content = bytearray((tiny_checkpoint("llama") / "model.safetensors").read_bytes())
    content[at : at + len(replaced)] = replaced
    (folder / "model.safetensors").write_bytes(content[: kept if kept < 1000 else None])
    with contextlib.suppress(UsageError):
        open_named(folder)


@damaged_somewhere(60)
def test_whatever_is_damaged_the_folder_is_opened_or_refused(at: int, replaced: bytes, kept: int, folder: Path) -> None:
    damage(folder, at, replaced, kept)


@pytest.mark.soak
@damaged_somewhere(5000)
def test_soak_whatever_is_damaged_is_refused(at: int, replaced: bytes, kept: int, folder: Path) -> None:
    damage(folder, at, replaced, kept)

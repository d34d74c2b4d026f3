"""nanoGPT's files: weights as its model has them, an alphabet beside, and no code run whatever a pickle asks."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from text.tiny import tiny_checkpoint

from gpuinfer.api import ModelSpec
from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint import Checkpoint, open_checkpoint
from gpuinfer.text.checkpoint.nanogpt import read_characters
from gpuinfer.text.checkpoint.pickle_reader import plain_value

ALPHABET = "\n !abcdefghijklmnopqrstuvwxyzé東"
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 32, "vocab_size": len(ALPHABET)}


def state(bias: bool = True, vocabulary: int = len(ALPHABET), prefix: str = "") -> dict[str, torch.Tensor]:
    """A state dict with nanoGPT's names, its head tied to its embedding."""
    generator = torch.Generator().manual_seed(0)
    made = {
        "transformer.wte.weight": torch.randn(vocabulary, 16, generator=generator),
        "transformer.wpe.weight": torch.randn(32, 16, generator=generator),
    }
    shapes = {"attn.c_attn": (48, 16), "attn.c_proj": (16, 16), "mlp.c_fc": (64, 16), "mlp.c_proj": (16, 64)}
    for layer in range(2):
        for name, shape in shapes.items():
            made[f"transformer.h.{layer}.{name}.weight"] = torch.randn(*shape, generator=generator)
            made[f"transformer.h.{layer}.{name}.bias"] = torch.randn(shape[0], generator=generator)
        for name in ("ln_1", "ln_2"):
            made[f"transformer.h.{layer}.{name}.weight"] = torch.randn(16, generator=generator)
            made[f"transformer.h.{layer}.{name}.bias"] = torch.randn(16, generator=generator)
    made |= {"transformer.ln_f.weight": torch.ones(16), "transformer.ln_f.bias": torch.ones(16)}
    made["lm_head.weight"] = made["transformer.wte.weight"]
    return {prefix + name: tensor for name, tensor in made.items() if bias or not name.endswith(".bias")}


def saved(folder: Path, content: dict[str, Any] | None = None, meta: Any = None) -> Path:
    path = folder / "model.pt"
    torch.save({"model": state(), "model_args": SIZES} if content is None else content, path)
    meta = {"vocab_size": len(ALPHABET), "itos": dict(enumerate(ALPHABET))} if meta is None else meta
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return path


def opened(path: Path, meta: Path | None = None) -> Checkpoint:
    arguments = {} if meta is None else {"meta": str(meta)}
    return open_checkpoint(ModelSpec("nano", weights=str(path), arguments=arguments, kind="text"))


def refusal(path: Path, meta: Path | None = None) -> str:
    with pytest.raises(UsageError) as refused:
        opened(path, meta)
    return str(refused.value)


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("bias", [True, False], ids=["biases", "no biases"])
def test_weights_are_the_saved_ones(bias: bool, prefix: str, tmp_path: Path) -> None:
    wanted = state(bias)
    arguments = {**SIZES, "bias": bias, "dropout": 0.2}
    content = {
        "model": state(bias, prefix=prefix),
        "model_args": arguments,
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}},
        "iter_num": 5,
        "best_val_loss": torch.tensor(1.5),
        "config": {"dataset": "shakespeare"},
    }
    checkpoint = opened(saved(tmp_path, content))
    weights, shape = checkpoint.weights(torch.float32), checkpoint.shape
    assert torch.equal(weights.embedding, wanted["transformer.wte.weight"])
    assert torch.equal(weights.positions, wanted["transformer.wpe.weight"])
    assert weights.head.weight is weights.embedding
    for number, layer in enumerate(weights.layers):
        parts = {"attn.c_attn": layer.qkv, "attn.c_proj": layer.out, "mlp.c_fc": layer.up, "mlp.c_proj": layer.down}
        for name, linear in parts.items():
            assert torch.equal(linear.weight, wanted[f"transformer.h.{number}.{name}.weight"])
            assert (linear.bias is not None) == bias
        assert torch.equal(layer.mlp_norm.scale, wanted[f"transformer.h.{number}.ln_2.weight"])
        assert (layer.mlp_norm.shift is not None) == bias
    assert (shape.family, shape.layers, shape.heads, shape.positions, shape.activation) == ("nanogpt", 2, 2, 32, "gelu")
    assert shape.tied
    assert shape.end_tokens == ()


def test_a_head_of_its_own_is_kept(tmp_path: Path) -> None:
    content = {"model": state() | {"lm_head.weight": torch.ones(len(ALPHABET), 16)}, "model_args": SIZES}
    weights = opened(saved(tmp_path, content)).weights(torch.float32)
    assert torch.equal(weights.head.weight, torch.ones(len(ALPHABET), 16))


def test_sizes_in_config_will_do(tmp_path: Path) -> None:
    config = {"n_layer": 2, "n_head": 2, "n_embd": 16, "learning_rate": 1e-3, "vocab_size": None}
    shape = opened(saved(tmp_path, {"model": state(), "config": config})).shape
    assert (shape.vocabulary, shape.positions) == (len(ALPHABET), 32)


def test_the_older_format_of_torch_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path)
    torch.save({"model": state(), "model_args": SIZES}, path, _use_new_zipfile_serialization=False)
    assert torch.equal(opened(path).weights(torch.float32).embedding, state()["transformer.wte.weight"])


def test_a_pt_file_may_be_the_model_s_name(tmp_path: Path) -> None:
    assert open_checkpoint(ModelSpec(str(saved(tmp_path)), kind="text")).shape.family == "nanogpt"


def test_the_alphabet_lies_beside_it_or_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path)
    assert opened(path).language_files().characters == tuple(ALPHABET)
    named = tmp_path / "letters.json"
    named.write_text(json.dumps({"itos": {str(n): one for n, one in enumerate(ALPHABET.upper())}}))
    assert opened(path, named).language_files().characters == tuple(ALPHABET.upper())


def test_a_tokenizer_may_take_the_alphabet_s_place(tmp_path: Path) -> None:
    path, folder = saved(tmp_path), tiny_checkpoint("gpt2")
    assert opened(path, folder).language_files().folder == folder
    assert opened(path, folder / "tokenizer.json").language_files().folder == folder


def test_without_an_alphabet_the_cure_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path)
    (tmp_path / "meta.pkl").unlink()
    assert "--meta" in refusal(path)


def test_an_alphabet_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, meta={"itos": {n: chr(97 + n) for n in range(100)}})
    assert "100 characters" in refusal(path)


def test_a_vocabulary_padded_beyond_the_alphabet_is_fine(tmp_path: Path) -> None:
    content = {"model": state(vocabulary=64), "model_args": {**SIZES, "vocab_size": 64}}
    assert opened(saved(tmp_path, content)).shape.vocabulary == 64


def test_the_fingerprint_knows_weights_and_alphabet(tmp_path: Path) -> None:
    path = saved(tmp_path)
    before = opened(path).fingerprint
    assert opened(path).fingerprint == before
    saved(tmp_path, {"model": {name: value + 1 for name, value in state().items()}, "model_args": SIZES})
    assert opened(path).fingerprint != before
    saved(tmp_path, meta={"itos": dict(enumerate(ALPHABET.upper()))})
    assert opened(path).fingerprint != before


NOT_SOUND = [
    pytest.param({"model_args": SIZES}, "no 'model'", id="no model"),
    pytest.param({"model": state()}, "neither 'model_args' nor 'config'", id="no sizes"),
    pytest.param({"model": state(), "model_args": {**SIZES, "n_head": 3}}, "n_head", id="heads that do not divide"),
    pytest.param({"model": state(), "model_args": {**SIZES, "n_layer": "2"}}, "n_layer", id="a size that is a text"),
    pytest.param({"model": state(), "model_args": {**SIZES, "n_layer": 3}}, "h.2.", id="fewer layers than it says"),
    pytest.param({"model": state(), "model_args": {**SIZES, "n_layer": 1}}, "not part of it", id="more layers"),
    pytest.param({"model": state(), "model_args": {**SIZES, "block_size": 8}}, "wpe", id="another block size"),
    pytest.param(
        {"model": state(), "model_args": {**SIZES, "rotary": True}}, "'rotary': True", id="an unknown argument"
    ),
    pytest.param({"model": {"a": 3}, "model_args": SIZES}, "more than named tensors", id="no tensors"),
    pytest.param({"model": {}, "model_args": SIZES}, "missing", id="nothing in it"),
    pytest.param(
        {"model": state() | {"lm_head.weight": torch.ones(3).to_sparse()}, "model_args": SIZES}, "sparse", id="sparse"
    ),
    pytest.param(
        {"model": state() | {"lm_head.weight": torch.ones(3, dtype=torch.int8)}, "model_args": SIZES}, "int8", id="int8"
    ),
    pytest.param([1, 2], "no mapping", id="a list"),
]


@pytest.mark.parametrize(("content", "named"), NOT_SOUND)
def test_files_that_do_not_fit(content: Any, named: str, tmp_path: Path) -> None:
    assert named in refusal(saved(tmp_path, content))


def test_files_that_are_none(tmp_path: Path) -> None:
    assert "there is no checkpoint file" in refusal(tmp_path / "absent.pt")
    path = saved(tmp_path)
    whole = path.read_bytes()
    for content in (b"", b"hello", whole[: len(whole) // 2], whole[:-30], b"\x80\x02" + whole):
        path.write_bytes(content)
        assert "cannot read" in refusal(path)


class Evil:
    """Its pickle makes a file when it is loaded."""

    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.touched,)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "older format"])
def test_code_in_a_checkpoint_is_not_run(legacy: bool, tmp_path: Path) -> None:
    path = saved(tmp_path)
    content = {"model": state(), "model_args": SIZES, "config": Evil(tmp_path / "ran")}
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    said = refusal(path)
    assert "would run code when opened" in said
    assert "weights_only" not in said  # torch advises to open it all the same
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_code_in_an_alphabet_is_not_run(protocol: int, tmp_path: Path) -> None:
    path = saved(tmp_path)
    evil = {"itos": dict(enumerate(ALPHABET)), "more": Evil(tmp_path / "ran")}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(evil, protocol))
    assert "no plain meta.pkl" in refusal(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"cos\nsystem\n(S'true'\ntR.", id="a call"),
        pytest.param(b"cbuiltins\ndict\n.", id="a class alone"),
        pytest.param(b"\x80\x04\x8c\x02os\x8c\x06system\x93.", id="a class from the stack"),
        pytest.param(b"(i__main__\nX\n.", id="an instance"),
        pytest.param(b"\x82\x01.", id="an extension"),
        pytest.param(b"Pname\n.", id="a persistent object"),
        pytest.param(b"}}K\x01s.", id="a key that is a dict"),
        pytest.param(b"}K\x01\x85K\x01s.", id="a key that is a tuple"),
        pytest.param(b"K\x01", id="no end"),
        pytest.param(b".", id="nothing in it"),
        pytest.param(b"(.", id="a mark alone"),
        pytest.param(b"(\x85.", id="a tuple of a mark"),
        pytest.param(b"K\x01e.", id="to append without a list"),
        pytest.param(b"h\x07.", id="from an empty memo"),
        pytest.param(b"", id="empty"),
        pytest.param(b"\x8d" + b"\xff" * 8 + b".", id="a text beyond the file"),
    ],
)
def test_a_pickle_of_anything_but_plain_values_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        plain_value(data)


def test_a_pickle_of_too_many_steps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuinfer.text.checkpoint.pickle_reader.MOST_STEPS", 100)
    with pytest.raises(ValueError, match="steps"):
        plain_value(pickle.dumps(list(range(200))))


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.text(max_size=5) | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(value=plain, protocol=st.integers(0, pickle.HIGHEST_PROTOCOL))
@settings(max_examples=examples(150), deadline=None)
def test_plain_values_come_back_whatever_the_protocol(value: Any, protocol: int) -> None:
    assert plain_value(pickle.dumps(value, protocol)) == value


def test_a_text_with_an_escape_that_is_none_is_refused_without_a_warning() -> None:
    with pytest.raises(ValueError, match="asks for STRING"):
        plain_value(rb"S'\u'" + b"\n.")


@given(
    value=plain,
    at=st.integers(0, 60),
    replaced=st.binary(min_size=1, max_size=4),
    protocol=st.integers(0, pickle.HIGHEST_PROTOCOL),
)
@settings(max_examples=examples(300), deadline=None)
def test_whatever_a_pickle_holds_it_is_read_or_refused(value: Any, at: int, replaced: bytes, protocol: int) -> None:
    data = bytearray(pickle.dumps(value, protocol))
    data[at : at + len(replaced)] = replaced
    try:
        found = plain_value(bytes(data))
    except ValueError:
        return
    assert isinstance(found, None | bool | int | str | float | list | tuple | dict)


@pytest.mark.parametrize(
    "meta",
    [
        pytest.param({"itos": ["a", "b"]}, id="a list"),
        pytest.param({"itos": {"0": "a", "1": "b"}}, id="ids as texts"),
        pytest.param({"stoi": {"a": 0, "b": 1}, "vocab_size": 2}, id="characters to ids"),
    ],
)
def test_an_alphabet_as_json(meta: dict, tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    assert read_characters(tmp_path / "meta.json") == ("a", "b")


@pytest.mark.parametrize(
    "meta",
    [
        pytest.param({"itos": {"0": "a", "2": "b"}}, id="a hole"),
        pytest.param({"itos": {"0": "a", "00": "b"}}, id="an id twice"),
        pytest.param({"itos": ["a", "a"]}, id="a character twice"),
        pytest.param({"itos": ["a", "bc"]}, id="more than characters"),
        pytest.param({"itos": ["a", 3]}, id="a number"),
        pytest.param({"itos": []}, id="none at all"),
        pytest.param({"stoi": {"a": True, "b": 0}}, id="a truth value for an id"),
        pytest.param({"stoi": {"a": [0]}}, id="a list for an id"),
        pytest.param({}, id="neither"),
    ],
)
def test_an_alphabet_that_is_none(meta: dict, tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UsageError, match=r"Give the meta file"):
        read_characters(tmp_path / "meta.json")


def test_an_alphabet_beyond_reason_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "meta.pkl").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(UsageError, match="too much for an alphabet"):
        read_characters(tmp_path / "meta.pkl")
    with pytest.raises(UsageError, match="Check --meta"):
        read_characters(tmp_path / "absent.pkl")

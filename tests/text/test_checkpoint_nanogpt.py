"""nanoGPT's files: weights as its model has them, an alphabet beside them, and no code run whatever a pickle holds."""

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
from gpuinfer.text.checkpoint import open_checkpoint
from gpuinfer.text.checkpoint.nanogpt import read_vocabulary
from gpuinfer.text.checkpoint.pickle_reader import read_pickle

ALPHABET = "\n !abcdefghijklmnopqrstuvwxyzé東"
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 32, "vocab_size": len(ALPHABET)}


def state(bias=True, vocabulary: int = len(ALPHABET), prefix="", **more: torch.Tensor):
    """A state dict with nanoGPT's names, its head tied to its embedding."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (vocabulary, 16), "wpe.weight": (32, 16)}
    linear = {"attn.c_attn": (48, 16), "attn.c_proj": (16, 16), "mlp.c_fc": (64, 16), "mlp.c_proj": (16, 64)}
    for layer in range(2):
        for name, shape in {**linear, "ln_1": (16,), "ln_2": (16,)}.items():
            shapes |= {f"h.{layer}.{name}.weight": shape, f"h.{layer}.{name}.bias": shape[:1]}
    shapes |= {"ln_f.weight": (16,), "ln_f.bias": (16,)}
    made = {f"transformer.{name}": torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    made |= {"lm_head.weight": made["transformer.wte.weight"], **more}
    return {prefix + name: tensor for name, tensor in made.items() if bias or not name.endswith(".bias")}


def saved(folder, content=None, meta=None, **more):
    path = folder / "model.pt"
    torch.save({"model": state(), "model_args": SIZES, **more} if content is None else content, path)
    meta = {"vocab_size": len(ALPHABET), "itos": dict(enumerate(ALPHABET))} if meta is None else meta
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return path


def opened(path, meta=None):
    arguments = {} if meta is None else {"meta": str(meta)}
    return open_checkpoint(ModelSpec("nano", weights=str(path), arguments=arguments, kind="text"))


def refusal(path):
    with pytest.raises(UsageError) as refused:
        opened(path)
    return str(refused.value)


@pytest.mark.parametrize(("bias", "prefix"), [(True, ""), (False, "_orig_mod."), (True, "module._orig_mod.")])
def test_weights_are_the_saved_ones(bias, prefix, tmp_path):
    wanted = state(bias)
    content = {
        "model": state(bias, prefix=prefix),
        "model_args": {**SIZES, "bias": bias, "dropout": 0.2},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}},
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
    assert (shape.tied, shape.end_tokens) == (True, ())


def test_variants_of_the_file_are_read(tmp_path):
    untied = {"model": state(**{"lm_head.weight": torch.ones(len(ALPHABET), 16)}), "model_args": SIZES}
    assert torch.equal(opened(saved(tmp_path, untied)).weights(torch.float32).head.weight, torch.ones(31, 16))
    config = {"n_layer": 2, "n_head": 2, "n_embd": 16, "learning_rate": 1e-3, "vocab_size": None}
    shape = opened(saved(tmp_path, {"model": state(), "config": config})).shape
    assert (shape.vocabulary, shape.positions) == (len(ALPHABET), 32)
    path = saved(tmp_path)
    assert open_checkpoint(ModelSpec(str(path), kind="text")).shape.family == "nanogpt"
    torch.save({"model": state(), "model_args": SIZES}, path, _use_new_zipfile_serialization=False)
    assert torch.equal(opened(path).weights(torch.float32).embedding, state()["transformer.wte.weight"])


def larger(vocabulary, **more):
    return {"model": state(vocabulary=vocabulary, **more), "model_args": {**SIZES, "vocab_size": vocabulary}}


def test_tokens_of_padding_are_left_out_with_a_warning(tmp_path, caplog):
    untied = larger(64, **{"lm_head.weight": torch.ones(64, 16)})
    for name, content in (("tied", larger(64)), ("untied", untied)):
        (tmp_path / name).mkdir()
        path = saved(tmp_path / name, content)
        caplog.clear()
        found = [opened(path) for _ in range(2)][-1]
        assert [record.message.count("31 tokens") for record in caplog.records] == [1]  # and not at each opening
        weights = found.weights(torch.float32)
        assert (found.shape.vocabulary, found.shape.tied) == (31, name == "tied")
        assert weights.embedding.shape == weights.head.weight.shape == (31, 16)
        assert torch.equal(weights.embedding, content["model"]["transformer.wte.weight"][:31])


@pytest.mark.parametrize("vocabulary", [32, 69, 128])
def test_a_model_of_more_tokens_than_have_a_text_is_refused(vocabulary, tmp_path):
    found = refusal(saved(tmp_path, larger(vocabulary)))
    assert f"meta.pkl has 31 tokens, {tmp_path / 'model.pt'} knows {vocabulary}. Give the --meta" in found


def test_padding_of_a_tokenizer_is_left_out_too(tmp_path, caplog):
    (folder := tmp_path / "tokenizer").mkdir()
    content = {"model": {"vocab": {f"t{n}": n for n in range(100)}}, "added_tokens": [{"id": 100}]}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert opened(saved(tmp_path, larger(101)), folder).shape.vocabulary == 101
    assert not caplog.records
    assert opened(saved(tmp_path, larger(128)), folder).shape.vocabulary == 101
    assert "101 tokens" in caplog.text
    with pytest.raises(UsageError, match=r"101 tokens.* knows 192. Give the --meta"):
        opened(saved(tmp_path, larger(192)), folder)


def test_the_alphabet_lies_beside_the_file_or_is_named_or_a_tokenizer_replaces_it(tmp_path):
    path, folder = saved(tmp_path), tiny_checkpoint("gpt2")
    assert opened(path).language.vocabulary == tuple(ALPHABET)
    named = tmp_path / "letters.json"
    named.write_text(json.dumps({"itos": {str(n): one for n, one in enumerate(ALPHABET.upper())}}))
    assert opened(path, named).language.vocabulary == tuple(ALPHABET.upper())
    for tokenizer in (folder, folder / "tokenizer.json"):
        assert opened(path, tokenizer).language.folder == folder
    first, again = (opened(saved(tmp_path)).fingerprint for _ in range(2))
    moved = opened(saved(tmp_path, {"model": {n: one + 1 for n, one in state().items()}, "model_args": SIZES}))
    assert first == again
    assert len({first, moved.fingerprint, opened(path, named).fingerprint}) == 3  # weights and alphabet count


def sized(**changes):
    return {"model": state(), "model_args": {**SIZES, **changes}}


def with_head(head):
    return {"model": state(**{"lm_head.weight": head}), "model_args": SIZES}


REFUSED = [  # what a file holds, what the message names
    ({"model_args": SIZES}, "no 'model'"),
    ({"model": state()}, "neither 'model_args' nor 'config'"),
    (sized(n_head=3), "n_head"),
    (sized(n_layer="2"), "n_layer"),
    (sized(n_layer=3), "h.2."),
    (sized(n_layer=1), "not part of it"),
    (sized(block_size=8), "wpe"),
    (sized(rotary=True), "'rotary': True"),
    ({"model": {"a": 3}, "model_args": SIZES}, "more than named tensors"),
    ({"model": {}, "model_args": SIZES}, "missing"),
    (with_head(torch.ones(3).to_sparse()), "sparse"),
    (with_head(torch.ones(3).to(torch.int8)), "int8"),
    ([1, 2], "no mapping"),
]


def test_a_file_that_does_not_fit_is_refused(tmp_path):
    for content, named in REFUSED:
        assert named in refusal(saved(tmp_path, content))
    assert "there is no checkpoint file" in refusal(tmp_path / "absent.pt")
    path = saved(tmp_path)
    whole = path.read_bytes()
    for content in (b"", b"hello", whole[: len(whole) // 2], whole[:-30], b"\x80\x02" + whole):
        path.write_bytes(content)
        assert "cannot read" in refusal(path)
    assert "100 tokens" in refusal(saved(tmp_path, meta={"itos": {n: chr(97 + n) for n in range(100)}}))
    with (tmp_path / "meta.pkl").open("wb") as file:
        file.truncate(1 << 30)
    assert "too much for a vocabulary" in refusal(path)
    (tmp_path / "meta.pkl").unlink()
    assert "--meta" in refusal(path)


class Evil:
    """Its pickle makes a file when it is loaded."""

    def __init__(self, touched):
        self.touched = touched

    def __reduce__(self):
        return Path.touch, (self.touched,)


def test_code_in_a_checkpoint_or_an_alphabet_is_not_run(tmp_path):
    path, evil = saved(tmp_path), Evil(tmp_path / "ran")
    for zipped in (True, False):
        torch.save({**sized(), "config": evil}, path, _use_new_zipfile_serialization=zipped)
        message = refusal(path)
        assert "would run code when opened" in message
        assert "weights_only" not in message  # torch advises to open the file all the same
    saved(tmp_path)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        meta = {"itos": dict(enumerate(ALPHABET)), "more": evil}
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta, protocol))
        assert "no plain meta.pkl" in refusal(path)
    assert not (tmp_path / "ran").exists()


HOSTILE = {
    "a call": b"cos\nsystem\n(S'true'\ntR.",
    "a class alone": b"cbuiltins\ndict\n.",
    "a class from the stack": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "an instance": b"(i__main__\nX\n.",
    "an extension": b"\x82\x01.",
    "a persistent object": b"Pname\n.",
    "a key that is a dict": b"}}K\x01s.",
    "a key that is a tuple": b"}K\x01\x85K\x01s.",
    "a state for a text": b"X\x01\x00\x00\x00a}K\x01K\x01sb.",
    "a text that is called": b"X\x01\x00\x00\x00a)R.",
    "an array of any size": b"\x96" + b"\xff" * 7 + b"\x00.",
    "a string with an escape that is none": rb"S'\u'" + b"\n.",
    "a float cut short": b"G\x00.",
    "no end": b"K\x01",
    "nothing in it": b".",
    "a mark alone": b"(.",
    "to append without a list": b"K\x01e.",
    "an odd dict": b"(K\x01d.",
    "from an empty memo": b"h\x07.",
    "a code that is none": b"\xff.",
    "empty": b"",
    "a text beyond the file": b"\x8d" + b"\xff" * 8 + b".",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_pickle_of_anything_but_plain_values_is_refused(case):
    with pytest.raises(ValueError, match=r"\w"):
        read_pickle(HOSTILE[case])


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.text(max_size=5) | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=20,
)
protocols = st.integers(0, pickle.HIGHEST_PROTOCOL)


@given(value=plain, at=st.integers(0, 60), replaced=st.binary(min_size=1, max_size=4), protocol=protocols)
@settings(max_examples=examples(300), deadline=None)
def test_a_pickle_is_read_as_it_was_written_and_read_or_refused_once_damaged(
    value: Any, at: int, replaced: bytes, protocol: int
):
    data = bytearray(pickle.dumps(value, protocol))
    assert read_pickle(bytes(data)) == value
    data[at : at + len(replaced)] = replaced
    try:
        found = read_pickle(bytes(data))
    except ValueError:
        return
    assert isinstance(found, None | bool | int | str | float | list | tuple | dict)


@pytest.mark.parametrize("meta", [{"itos": ["a", "b"]}, {"itos": {"0": "a", "1": "b"}}, {"stoi": {"a": 0, "b": 1}}])
def test_an_alphabet_in_json_is_read(meta, tmp_path):
    (tmp_path / "meta.json").write_text(json.dumps({**meta, "vocab_size": 2}))
    assert read_vocabulary(tmp_path / "meta.json").vocabulary == ("a", "b")


BAD_ALPHABETS = [
    *({"itos": one} for one in ({"0": "a", "2": "b"}, {"0": "a", "00": "b"}, ["a", "a"], ["a", 3], [])),
    *({"stoi": one} for one in ({"a": True, "b": 0}, {"a": [0]})),
    {"itos": ["a", "b"], "separator": 3},
    {},
]


@pytest.mark.parametrize("meta", BAD_ALPHABETS, ids=str)
def test_an_alphabet_that_is_none_is_refused(meta, tmp_path):
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UsageError, match="Give the meta file"):
        read_vocabulary(tmp_path / "meta.json")

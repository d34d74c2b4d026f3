"""Hugging Face folders: every weight is the stored one, bit for bit, wherever and however it is stored."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from text.tiny import FAMILIES, copy_of, tiny_checkpoint

from gpuinfer.api import ModelSpec
from gpuinfer.text.checkpoint import Checkpoint, open_checkpoint, safetensors_folder
from gpuinfer.text.checkpoint import checkpoint as digests

CASES = [
    *(pytest.param(family, {}, id=family) for family in FAMILIES),
    pytest.param("llama", {"attention_bias": True, "mlp_bias": True}, id="llama with biases"),
    pytest.param("llama", {"tie_word_embeddings": True, "head_dim": 32}, id="llama tied, wide heads"),
    pytest.param("qwen2", {"tie_word_embeddings": False}, id="qwen2 untied"),
    pytest.param("qwen3", {"attention_bias": True}, id="qwen3 with biases"),
    pytest.param("gpt2", {"n_inner": 96}, id="gpt2 with an inner size of its own"),
    pytest.param("gpt2", {"tie_word_embeddings": False}, id="gpt2 untied"),
]


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(ModelSpec(str(folder), kind="text"))


def reference(folder: Path) -> dict[str, torch.Tensor]:
    """What transformers loads, without the prefix of the family."""
    state = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return {name.removeprefix("model.").removeprefix("transformer."): tensor for name, tensor in state.items()}


def expected_rotary(state: dict[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor | None]:
    def joined(names: list[str], kind: str) -> torch.Tensor | None:
        found = [state.get(f"layers.{layer}.{name}.{kind}") for name in names]
        return None if found[0] is None else torch.cat(found)

    groups = {
        "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "out": ["self_attn.o_proj"],
        "up": ["mlp.gate_proj", "mlp.up_proj"],
        "down": ["mlp.down_proj"],
    }
    named = {f"{part}.{kind}": joined(names, kind) for part, names in groups.items() for kind in ("weight", "bias")}
    norms = {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "query_norm": "self_attn.q_norm",
        "key_norm": "self_attn.k_norm",
    }
    return named | {f"{part}.scale": state.get(f"layers.{layer}.{name}.weight") for part, name in norms.items()}


def expected_gpt2(state: dict[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor | None]:
    named = {}
    for part, name in {"qkv": "attn.c_attn", "out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}.items():
        named[f"{part}.weight"] = state[f"h.{layer}.{name}.weight"].T
        named[f"{part}.bias"] = state[f"h.{layer}.{name}.bias"]
    for part, name in {"attention_norm": "ln_1", "mlp_norm": "ln_2"}.items():
        named[f"{part}.scale"] = state[f"h.{layer}.{name}.weight"]
        named[f"{part}.shift"] = state[f"h.{layer}.{name}.bias"]
    return named


def value(holder: object, path: str) -> torch.Tensor | None:
    for name in path.split("."):
        holder = None if holder is None else getattr(holder, name)
    return holder


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_every_weight_is_the_stored_one(family: str, changes: dict) -> None:
    folder = tiny_checkpoint(family, **changes)
    state, checkpoint = reference(folder), opened(folder)
    weights = checkpoint.weights(torch.float32)
    expected = expected_gpt2 if family == "gpt2" else expected_rotary
    compared = 0
    for number, layer in enumerate(weights.layers):
        for path, tensor in expected(state, number).items():
            mine = value(layer, path)
            assert (mine is None) == (tensor is None), path
            if tensor is not None:
                assert mine.is_contiguous()
                assert torch.equal(mine, tensor), path
                compared += 1
    assert compared >= 2 * 6
    embedding, norm = ("wte.weight", "ln_f") if family == "gpt2" else ("embed_tokens.weight", "norm")
    assert torch.equal(weights.embedding, state[embedding])
    assert torch.equal(weights.head.weight, state["lm_head.weight"])
    assert torch.equal(weights.norm.scale, state[f"{norm}.weight"])
    assert (weights.norm.shift is not None) == (family == "gpt2")
    assert (weights.head.weight is weights.embedding) == checkpoint.shape.tied
    assert (weights.positions is None) == (family != "gpt2")
    if family == "gpt2":
        assert torch.equal(weights.positions, state["wpe.weight"])
        assert torch.equal(weights.norm.shift, state["ln_f.bias"])


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_weights_are_cast_as_torch_casts_them(family: str, stored: str, wanted: torch.dtype) -> None:
    folder = tiny_checkpoint(family, dtype=stored)
    checkpoint = opened(folder)
    assert checkpoint.dtype == stored
    weights, state = checkpoint.weights(wanted), load_file(folder / "model.safetensors")
    name = "transformer.wte.weight" if family == "gpt2" else "model.embed_tokens.weight"
    assert torch.equal(weights.embedding, state[name].to(wanted))
    assert weights.layers[0].qkv.weight.dtype == weights.layers[0].qkv.bias.dtype == wanted
    assert weights.norm.scale.dtype == torch.float32


def test_a_tensor_larger_than_the_staging_is_cast_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuinfer.text.checkpoint.safetensors_folder.STAGING_BYTES", 1000)
    folder = tiny_checkpoint("llama")
    state = load_file(folder / "model.safetensors")
    weights = opened(folder).weights(torch.bfloat16)
    assert torch.equal(weights.embedding, state["model.embed_tokens.weight"].bfloat16())


def test_shards_and_one_file_are_the_same_model() -> None:
    whole, cut = tiny_checkpoint("qwen3"), tiny_checkpoint("qwen3", shard="60KB")
    assert len(list(cut.glob("*.safetensors"))) > 2
    one, other = opened(whole), opened(cut)
    assert one.fingerprint == other.fingerprint
    for mine, theirs in zip(one.weights(torch.float32).layers, other.weights(torch.float32).layers, strict=True):
        assert torch.equal(mine.qkv.weight, theirs.qkv.weight)
        assert torch.equal(mine.up.weight, theirs.up.weight)


@pytest.mark.parametrize(("family", "prefix"), [("llama", "model."), ("gpt2", "transformer.")])
def test_names_without_the_family_s_prefix_are_known(family: str, prefix: str, tmp_path: Path) -> None:
    folder = copy_of(tiny_checkpoint(family), tmp_path / "bare")
    state = load_file(folder / "model.safetensors")
    bare = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    if family == "gpt2":  # as the first of all GPT-2 folders has it
        bare |= {"h.0.attn.bias": torch.ones(1, 1, 256, 256), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(bare, folder / "model.safetensors")
    mine, theirs = opened(folder).weights(torch.float32), opened(tiny_checkpoint(family)).weights(torch.float32)
    assert torch.equal(mine.layers[1].down.weight, theirs.layers[1].down.weight)


def test_buffers_of_older_files_are_left_out(tmp_path: Path) -> None:
    folder = copy_of(tiny_checkpoint("llama"), tmp_path / "old")
    state = load_file(folder / "model.safetensors")
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(state, folder / "model.safetensors")
    assert opened(folder).weights(torch.float32).embedding.shape == (384, 64)


@pytest.mark.parametrize("same", [True, False], ids=["the same head beside it", "another head beside it"])
def test_a_head_that_is_stored_beside_a_tied_embedding(same: bool, tmp_path: Path) -> None:
    folder = copy_of(tiny_checkpoint("qwen2"), tmp_path / "both")
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone() if same else torch.randn(384, 64)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = opened(folder)
    assert checkpoint.shape.tied == same
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).lm_head.weight
    assert torch.equal(checkpoint.weights(torch.float32).head.weight, theirs)


def test_a_tied_model_of_which_only_the_head_is_stored(tmp_path: Path) -> None:
    folder = copy_of(tiny_checkpoint("qwen2"), tmp_path / "head")
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state.pop("model.embed_tokens.weight")
    save_file(state, folder / "model.safetensors")
    weights = opened(folder).weights(torch.float32)
    assert torch.equal(weights.embedding, state["lm_head.weight"])
    assert weights.head.weight is weights.embedding


def test_weights_do_not_lie_in_the_file(tmp_path: Path) -> None:
    folder = copy_of(tiny_checkpoint("llama"), tmp_path / "gone")
    weights = opened(folder).weights(torch.float32)
    before = weights.embedding.clone()
    (folder / "model.safetensors").write_bytes(b"")
    assert torch.equal(weights.embedding, before)


def test_the_tokenizer_is_the_folder_s() -> None:
    folder = tiny_checkpoint("llama")
    files = opened(folder).language_files()
    assert (files.folder, files.characters, files.bytes) == (folder, None, False)


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        pytest.param("config.json", True, id="settings"),
        pytest.param("tokenizer.json", True, id="tokenizer"),
        pytest.param("chat_template.jinja", True, id="chat template"),
        pytest.param("README.md", False, id="a file that changes no answer"),
    ],
)
def test_the_fingerprint_tells_models_apart_by(file: str, changed: bool, tmp_path: Path) -> None:
    folder = copy_of(tiny_checkpoint("llama"), tmp_path / "copy")
    before = opened(folder).fingerprint
    assert before == opened(tiny_checkpoint("llama")).fingerprint
    with (folder / file).open("a") as written:
        written.write("\n")
    assert (opened(folder).fingerprint != before) == changed


def test_the_fingerprint_knows_each_byte_of_each_tensor(tmp_path: Path) -> None:
    folder = copy_of(tiny_checkpoint("llama"), tmp_path / "copy")
    file = folder / "model.safetensors"
    content, seen = file.read_bytes(), {opened(folder).fingerprint}
    places = open_checkpoint(ModelSpec(str(folder), kind="text")).store.tensors
    for number, place in enumerate(places.values()):
        at = place.start + number * 31 % (4 * place.shape[0])
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        seen.add(opened(folder).fingerprint)
    assert len(seen) == 1 + len(places)


def test_digests_do_not_depend_on_threads_and_cover_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "CHUNK_BYTES", 64)
    contents = {str(size): bytes(n % 251 for n in range(size)) for size in (0, 1, 63, 64, 65, 1000)}

    def of(contents: dict[str, bytes]) -> dict[str, bytes]:
        sources = {
            name: digests.DigestSource(
                len(content), lambda start, length, content=content: content[start : start + length]
            )
            for name, content in contents.items()
        }
        return digests.digests_of(sources)

    first = of(contents)
    monkeypatch.setattr(digests, "cores", lambda: 3)
    assert of(contents) == first
    assert len(set(first.values())) == len(contents)
    for at in range(0, 1000, 37):
        changed = bytearray(contents["1000"])
        changed[at] ^= 128
        assert of({"1000": bytes(changed)})["1000"] != first["1000"]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """How many tensors were read for digests, call by call, with a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "SETTLED_S", -3600.0)
    calls: list[int] = []
    compute = safetensors_folder.digests_of
    monkeypatch.setattr(
        safetensors_folder, "digests_of", lambda sources: (calls.append(len(sources)), compute(sources))[1]
    )
    return calls


def test_weights_are_read_for_the_fingerprint_once_as_long_as_they_stay(counted: list[int], tmp_path: Path) -> None:
    folder = copy_of(tiny_checkpoint("llama"), tmp_path / "copy")
    first = opened(folder).fingerprint
    assert opened(folder).fingerprint == first
    assert len(counted) == 1
    file = folder / "model.safetensors"
    times, content = file.stat(), bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a copying program may leave it
    assert opened(folder).fingerprint != first
    assert len(counted) == 2


def test_a_file_that_changed_a_moment_ago_is_not_trusted_to_stay(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(digests, "SETTLED_S", 3600.0)
    folder = copy_of(tiny_checkpoint("llama"), tmp_path / "copy")
    assert opened(folder).fingerprint == opened(folder).fingerprint
    assert len(counted) == 2


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"stamp": 1, "digests": {}}', b"\xff"])
def test_kept_digests_that_are_damaged_are_computed_again(counted: list[int], content: bytes, tmp_path: Path) -> None:
    folder = copy_of(tiny_checkpoint("llama"), tmp_path / "copy")
    first = opened(folder).fingerprint
    for place in (tmp_path / "cache").rglob("*.json"):
        place.write_bytes(content)
    assert opened(folder).fingerprint == first
    assert len(counted) == 2


def test_a_head_that_differs_in_one_value_is_not_tied(tmp_path: Path) -> None:
    folder = copy_of(tiny_checkpoint("qwen2"), tmp_path / "both")
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["lm_head.weight"][3, 3] += 1.0
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert not opened(folder).shape.tied


def test_generation_config_names_the_end_tokens(tmp_path: Path) -> None:
    folder = copy_of(tiny_checkpoint("llama"), tmp_path / "copy")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2, 5]}))
    assert opened(folder).shape.end_tokens == (5, 2)
    (folder / "generation_config.json").unlink()
    assert opened(folder).shape.end_tokens == (2,)

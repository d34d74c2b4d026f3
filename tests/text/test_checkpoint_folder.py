"""Folders and built-in models: every weight is the stored one, bit for bit, wherever and however it is stored."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from text.decoders import opened, same_weights
from text.diffusion_oracle import opened as stored
from text.tiny import FAMILIES, copy_of, tiny_checkpoint
from text.tiny_diffusion import FAMILIES as DIFFUSION
from text.tiny_diffusion import MASK, tiny_diffusion

from gpuinfer.api import ModelSpec
from gpuinfer.errors import UsageError
from gpuinfer.generation import Prompt
from gpuinfer.text.checkpoint import Estimate, open_checkpoint, refuse_oversized, safetensors_folder, save_folder
from gpuinfer.text.checkpoint import checkpoint as digests
from gpuinfer.text.checkpoint.loader import read_other_weights
from gpuinfer.text.decoder.torch_layers import tensors_of
from gpuinfer.text.language import open_language

FILE = "model.safetensors"


def rewritten(folder: Path, change: Any) -> Path:
    """The folder with the tensors that `change` makes of its own."""
    save_file(change(load_file(folder / FILE)), folder / FILE, metadata={"format": "pt"})
    return folder


CASES = [
    *(pytest.param(family, {}, id=family) for family in FAMILIES),
    pytest.param("llama", {"attention_bias": True, "mlp_bias": True}, id="llama with biases"),
    pytest.param("llama", {"tie_word_embeddings": True, "head_dim": 32}, id="llama tied, wide heads"),
    pytest.param("qwen2", {"tie_word_embeddings": False}, id="qwen2 untied"),
    pytest.param("qwen3", {"attention_bias": True}, id="qwen3 with biases"),
    pytest.param("gpt2", {"n_inner": 96}, id="gpt2 with an inner size of its own"),
    pytest.param("gpt2", {"tie_word_embeddings": False}, id="gpt2 untied"),
]


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


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("family", "stored"), [("qwen2", "bfloat16"), ("gpt2", "float16")])
def test_weights_are_cast_as_torch_casts_them(
    family: str, stored: str, wanted: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_folder, "STAGING_BYTES", 1000)  # less than a tensor
    folder = tiny_checkpoint(family, dtype=stored)
    checkpoint = opened(folder)
    assert checkpoint.dtype == stored
    weights, state = checkpoint.weights(wanted), load_file(folder / FILE)
    name = "transformer.wte.weight" if family == "gpt2" else "model.embed_tokens.weight"
    assert torch.equal(weights.embedding, state[name].to(wanted))
    assert weights.layers[0].qkv.weight.dtype == weights.layers[0].qkv.bias.dtype == wanted
    assert weights.norm.scale.dtype == torch.float32


def test_shards_and_one_file_are_the_same_model() -> None:
    whole, cut = tiny_checkpoint("qwen3"), tiny_checkpoint("qwen3", shard="60KB")
    assert len(list(cut.glob("*.safetensors"))) > 2
    one, other = opened(whole), opened(cut)
    assert one.fingerprint == other.fingerprint
    assert same_weights(one.weights(torch.float32), other.weights(torch.float32))
    files = one.language_files()
    assert (files.folder, files.characters, files.bytes) == (whole, None, False)


PREFIXES = {"llama": "model.", "gpt2": "transformer.", "llada": "model.transformer.", "llada2": "model."}


@pytest.mark.parametrize("family", PREFIXES)
def test_names_may_lack_their_prefix_and_buffers_of_older_files_are_left_out(family: str, tmp_path: Path) -> None:
    whole = tiny_diffusion(family) if family in DIFFUSION else tiny_checkpoint(family)
    bare = copy_of(whole, tmp_path / "bare")
    rewritten(bare, lambda state: {name.removeprefix(PREFIXES[family]): one for name, one in state.items()})
    if family == "gpt2":  # as the first of all GPT-2 folders has it
        buffers = {"h.0.attn.bias": torch.ones(1, 1, 256, 256), "h.0.attn.masked_bias": torch.tensor(-1e4)}
        rewritten(bare, lambda state: {**state, **buffers})
    if family == "llama":
        rewritten(bare, lambda state: {**state, "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert same_weights(opened(bare).weights(torch.float32), opened(whole).weights(torch.float32))


def stored_head(change: Any) -> Any:
    return lambda state: {**state, "lm_head.weight": change(state["model.embed_tokens.weight"].clone())}


def one_value_apart(head: torch.Tensor) -> torch.Tensor:
    head[3, 3] += 1.0
    return head


@pytest.mark.parametrize(
    ("change", "tied"),
    [
        pytest.param(stored_head(lambda head: head), True, id="the same head beside it"),
        pytest.param(stored_head(torch.randn_like), False, id="another head beside it"),
        pytest.param(stored_head(one_value_apart), False, id="a head that differs in one value"),
        pytest.param(lambda state: {n.replace("model.embed_tokens", "lm_head"): one for n, one in state.items()}, True,
                     id="the head alone"),
    ],
)  # fmt: skip
def test_a_head_is_tied_to_its_embedding_if_it_is_the_same(change: Any, tied: bool, tmp_path: Path) -> None:
    folder = rewritten(copy_of(tiny_checkpoint("qwen2"), tmp_path / "both"), change)
    checkpoint = opened(folder)
    weights = checkpoint.weights(torch.float32)
    assert checkpoint.shape.tied == (weights.head.weight is weights.embedding) == tied
    assert torch.equal(weights.head.weight, load_file(folder / FILE)["lm_head.weight"])


def test_weights_do_not_lie_in_the_file_and_the_settings_name_the_ends(tmp_path: Path) -> None:
    folder = copy_of(tiny_checkpoint("llama"), tmp_path / "copy")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2, 5]}))
    assert opened(folder).shape.end_tokens == (5, 2)
    (folder / "generation_config.json").unlink()
    assert opened(folder).shape.end_tokens == (2,)
    weights = opened(folder).weights(torch.float32)
    before = weights.embedding.clone()
    (folder / FILE).write_bytes(b"")
    assert torch.equal(weights.embedding, before)


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
    places = opened(folder).store.tensors
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
        return digests.tensor_digests(sources)

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
    compute = safetensors_folder.tensor_digests
    monkeypatch.setattr(
        safetensors_folder, "tensor_digests", lambda sources: (calls.append(len(sources)), compute(sources))[1]
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


@pytest.mark.parametrize("family", DIFFUSION)
def test_the_tokenizer_of_a_folder_is_read_and_its_end_token_known(family: str) -> None:
    checkpoint = opened(tiny_diffusion(family))
    language = open_language(checkpoint.language_files(), checkpoint.shape)
    assert language.end_tokens == (2,)
    plain, masked = language.encode([Prompt(text="a lazy dog"), Prompt(text="a <|mask|> dog")])
    assert MASK not in plain
    assert MASK in masked


@pytest.mark.parametrize("family", DIFFUSION)
def test_all_stored_tensors_become_weights_and_are_read_in_any_dtype(family: str) -> None:
    folder = tiny_diffusion(family)
    checkpoint, tensors = opened(folder), stored(folder)[1]
    weights = checkpoint.weights(torch.float32)
    assert sum(tensor.numel() for tensor in tensors.values()) == sizes(weights)[0]
    half = checkpoint.weights(torch.bfloat16)
    for layer in half.layers:
        assert layer.up.weight.dtype == layer.down.weight.dtype == torch.bfloat16
        if layer.mixture is not None:
            assert layer.mixture.router.dtype == torch.float32
            assert layer.mixture.up.dtype == torch.bfloat16
    assert checkpoint.estimate(3, 12, 100, torch.float32).weights_bytes == 4 * sizes(weights)[0]


def test_a_step_takes_more_where_a_token_goes_through_more_experts() -> None:
    few, many = (opened(tiny_diffusion("llada-moe", num_experts_per_tok=chosen)) for chosen in (2, 6))
    one, other = (checkpoint.estimate(3, 12, 100, torch.float32) for checkpoint in (few, many))
    assert one.weights_bytes == other.weights_bytes
    assert one.peak_bytes < other.peak_bytes


def test_an_experts_weights_are_stacked_gate_over_value() -> None:
    folder = tiny_diffusion("llada2")
    layer, tensors = opened(folder).weights(torch.float32).layers[1], stored(folder)[1]
    assert layer.mixture is not None
    for number in range(8):
        expert = f"model.layers.1.mlp.experts.{number}."
        gate_and_value = [tensors[f"{expert}{half}_proj.weight"] for half in ("gate", "up")]
        assert torch.equal(layer.mixture.up[number], torch.cat(gate_and_value))
        assert torch.equal(layer.mixture.down[number], tensors[f"{expert}down_proj.weight"])
    assert layer.mixture.bias is not None
    assert torch.equal(layer.mixture.bias, tensors["model.layers.1.mlp.gate.expert_bias"])


PLACES = ("the folder", "its file", "a folder without settings", "shards")


@pytest.mark.parametrize(
    ("family", "where"),
    [(family, where) for family in ("qwen2", "gpt2") for where in PLACES]
    + [(family, PLACES[0]) for family in DIFFUSION],
)
def test_a_running_model_takes_weights_from_where_a_trainer_leaves_them(
    family: str, where: str, tmp_path: Path
) -> None:
    make = tiny_diffusion if family in DIFFUSION else tiny_checkpoint
    own = opened(make(family))
    folder = make(family, seed=1, shard="100KB") if where == "shards" else make(family, seed=1)
    assert own.fingerprint != opened(folder).fingerprint
    place = folder
    if where == "its file":
        place = folder / FILE
    if where == "a folder without settings":
        place = copy_of(folder, tmp_path / "bare")
        (place / "config.json").unlink()
    assert same_weights(read_other_weights(own, str(place), torch.float32), opened(folder).weights(torch.float32))


@pytest.mark.parametrize(
    ("base", "changes", "file", "why"),
    [
        ({}, {"num_hidden_layers": 3}, "", "layers 3 instead of 2"),
        ({}, {"intermediate_size": 96}, "", "intermediate 96 instead of 160"),
        ({}, {"intermediate_size": 96}, FILE, r"gate_proj.*\[96, 64\]"),
        ({}, {"tie_word_embeddings": True}, "", r"'lm_head.weight' \[384, 64\] is missing"),
        ({"tie_word_embeddings": True}, {}, "", "a head of their own"),
    ],
)
def test_weights_of_another_shape_are_refused(base: dict, changes: dict, file: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read_other_weights(
            opened(tiny_checkpoint("llama", **base)), str(tiny_checkpoint("llama", **changes) / file), torch.float32
        )


@pytest.mark.parametrize(
    ("model", "why"), [("tiny", "there are no weights at nowhere"), ("null", "has no weights that could be changed")]
)
def test_weights_that_are_absent_are_refused(model: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read_other_weights(built_in(model), "nowhere", torch.float32)


def built_in(name: str) -> Any:
    return open_checkpoint(ModelSpec(name, kind="text"))


def sizes(weights: Any) -> tuple[int, int]:
    """Values and bytes; of a tensor that is used twice once."""
    tensors = {id(tensor): tensor for tensor in tensors_of(weights)}.values()
    return sum(tensor.numel() for tensor in tensors), sum(tensor.nbytes for tensor in tensors)


MASKED = [f"tiny-{family}" for family in DIFFUSION]


def test_tiny_has_five_million_parameters_speaks_bytes_and_is_the_same_each_time() -> None:
    one, other = built_in("tiny"), built_in("tiny")
    assert (one.fingerprint, one.shape) == (other.fingerprint, other.shape)
    weights = one.weights(torch.float32)
    assert 4_900_000 < sizes(weights)[0] < 5_300_000
    assert same_weights(weights, other.weights(torch.float32))
    assert (one.language_files().bytes, one.shape.end_tokens, one.folder) == (True, (256,), None)


@pytest.mark.parametrize("name", MASKED)
def test_a_tiny_diffusion_model_fills_in_masks_that_it_never_says_itself(name: str) -> None:
    checkpoint = built_in(name)
    masking = checkpoint.shape.masking
    assert masking is not None
    assert checkpoint.shape.family == name.removeprefix("tiny-")
    weights = checkpoint.weights(torch.float32)
    assert sizes(weights)[0] < 800_000
    silent = weights.head.weight[masking.mask_token, 0]
    assert silent < -100 < weights.head.weight[ord("a"), 0] == 0.0


def test_null_takes_no_memory() -> None:
    checkpoint = built_in("null")
    weights = checkpoint.weights(torch.float32)
    assert checkpoint.shape.family == "null"
    assert weights.layers == ()
    assert checkpoint.estimate(256, 64, 2048, torch.float32).cache_bytes == 0


@pytest.mark.parametrize("name", ["tiny", *MASKED])
def test_a_built_in_model_is_written_for_other_programs(name: str, tmp_path: Path) -> None:
    save_folder(built_in(name), tmp_path / "out")
    again, drawn = opened(tmp_path / "out"), built_in(name)
    assert again.shape == drawn.shape
    assert same_weights(again.weights(torch.float32), drawn.weights(torch.float32))
    with pytest.raises(UsageError, match="Use 'tiny'"):
        save_folder(again, tmp_path / "more")


def test_transformers_finds_tiny_to_say_printable_characters_after_any_prompt(tmp_path: Path) -> None:
    save_folder(built_in("tiny"), tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(model.lm_head.weight, built_in("tiny").weights(torch.float32).head.weight)
    prompts = torch.randint(0, 1024, (4, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = model(prompts).logits
    assert logits.softmax(-1)[..., [10, *range(32, 127), 256]].sum(-1).min() > 0.999
    assert logits.argmax(-1).unique().numel() > 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*FAMILIES, "tiny", *MASKED])
def test_the_estimate_is_what_the_weights_take(family: str, dtype: torch.dtype) -> None:
    checkpoint = built_in(family) if family.startswith("tiny") else opened(tiny_checkpoint(family))
    estimate, shape = checkpoint.estimate(3, 12, 100, dtype), checkpoint.shape
    assert estimate.weights_bytes == sizes(checkpoint.weights(dtype))[1]
    assert estimate.cache_bytes == 12 * 32 * 2 * shape.layers * shape.kv_heads * shape.head_dim * dtype.itemsize
    assert estimate.peak_bytes > estimate.weights_bytes + estimate.cache_bytes


FITS = Estimate(weights_bytes=10_000_000_000, cache_bytes=8_000_000_000, peak_bytes=19_000_000_000)


def refusal(free: float, dtype: torch.dtype = torch.float32) -> str:
    with pytest.raises(UsageError) as refused:
        refuse_oversized("m", FITS, int(free), pages=4096, length=2048, dtype=dtype)
    return str(refused.value)


def test_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    refuse_oversized("m", FITS, 19_000_000_000, pages=4096, length=2048, dtype=torch.float32)
    message = refusal(15e9)
    for number in ("10 GB", "8 GB", "19 GB", "15 GB", "4,096 pages", "2,048 tokens", "64 pages"):
        assert number in message


@pytest.mark.parametrize(
    ("free", "dtype", "cure"),
    [
        pytest.param(15e9, torch.float32, "Use -B pages=2048 or --dtype bfloat16", id="fewer pages"),
        pytest.param(15e9, torch.bfloat16, "Use -B pages=2048.", id="narrow already"),
        pytest.param(11.05e9, torch.bfloat16, "Use --context 800.", id="pages for less than one row"),
        pytest.param(18.5e9, torch.bfloat16, "-B pages=3840", id="almost"),
        pytest.param(9e9, torch.float32, "Not even one page fits beside the weights", id="not one page"),
        pytest.param(9e9, torch.bfloat16, "smaller model", id="too large by far"),
        pytest.param(1e9, torch.float32, "smaller model", id="too large even in half"),
    ],
)
def test_the_cure_is_one_that_helps(free: float, dtype: torch.dtype, cure: str) -> None:
    assert cure in refusal(free, dtype)

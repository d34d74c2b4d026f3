"""Folders and built-in models: every weight is the stored one, bit for bit, wherever and however it is stored."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from text.decoders import on_the_cpu, opened, same_weights
from text.diffusion_oracle import opened as stored
from text.oracle import logits_of
from text.steps import step_of
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


def rewritten(folder: Path, change: Any):
    """The folder with the tensors that `change` makes of its own."""
    save_file(change(load_file(folder / FILE)), folder / FILE, metadata={"format": "pt"})
    return folder


def test_weights_of_torch_save_alone_and_beside_safetensors_are_the_same_model(tmp_path):
    whole = tiny_checkpoint("llama")
    state = load_file(whole / FILE)
    pickled, mixed = (copy_of(whole, tmp_path / name) for name in ("pickled", "mixed"))
    for folder in (pickled, mixed):
        (folder / FILE).unlink()
    torch.save(state, pickled / "pytorch_model.bin")
    files = {name: f"part-{number % 2}.{('bin', 'safetensors')[number % 2]}" for number, name in enumerate(state)}
    torch.save({name: one for name, one in state.items() if files[name].endswith("bin")}, mixed / "part-0.bin")
    save_file(
        {name: one for name, one in state.items() if not files[name].endswith("bin")}, mixed / "part-1.safetensors"
    )
    (mixed / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for folder in (pickled, mixed):
        assert same_weights(opened(folder).weights(torch.float32), opened(whole).weights(torch.float32))
        assert opened(folder).fingerprint == opened(whole).fingerprint


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": True, "head_dim": 32}),
        ("qwen3", {"attention_bias": True}),
        ("gpt2", {"n_inner": 96}),
    ],
)
def test_weights_are_where_transformers_has_them(family, changes):
    """Beside the models of test_decoder.py, whose logits too are those of transformers."""
    folder, tokens = tiny_checkpoint(family, **changes), [7, 300, 11, 42, 5]
    checkpoint = opened(folder)
    weights = checkpoint.weights(torch.float32)
    found = on_the_cpu(checkpoint.shape, weights, torch.float32, slots=1, length=8).forward(step_of((0, 0, tokens)))
    torch.testing.assert_close(found, logits_of(folder, tokens), atol=1e-4, rtol=1e-4)
    assert (weights.head.weight is weights.embedding) == checkpoint.shape.tied


@pytest.mark.parametrize(("family", "stored_as"), [("qwen2", "bfloat16"), ("gpt2", "float16")])
def test_weights_are_cast_as_torch_casts_them(family, stored_as, monkeypatch):
    monkeypatch.setattr(safetensors_folder, "STAGING_BYTES", 1000)  # less than a tensor
    folder = tiny_checkpoint(family, dtype=stored_as)
    checkpoint, state = opened(folder), load_file(folder / FILE)
    name = "transformer.wte.weight" if family == "gpt2" else "model.embed_tokens.weight"
    assert checkpoint.dtype == stored_as
    for wanted in (torch.float32, torch.bfloat16, torch.float16):
        weights = checkpoint.weights(wanted)
        assert torch.equal(weights.embedding, state[name].to(wanted))
        assert weights.layers[0].qkv.weight.dtype == weights.layers[0].qkv.bias.dtype == wanted
        assert weights.norm.scale.dtype == torch.float32


def test_shards_and_one_file_are_the_same_model():
    whole, cut = tiny_checkpoint("qwen3"), tiny_checkpoint("qwen3", shard="60KB")
    assert len(list(cut.glob("*.safetensors"))) > 2
    one, other = opened(whole), opened(cut)
    assert one.fingerprint == other.fingerprint
    assert same_weights(one.weights(torch.float32), other.weights(torch.float32))
    assert (one.language.folder, one.language.vocabulary, one.language.bytes) == (whole, None, False)


PREFIXES = {"llama": "model.", "gpt2": "transformer.", "llada": "model.transformer.", "llada2": "model."}


@pytest.mark.parametrize("family", PREFIXES)
def test_names_may_lack_their_prefix_and_buffers_of_older_files_are_left_out(family, tmp_path):
    whole = tiny_diffusion(family) if family in DIFFUSION else tiny_checkpoint(family)
    buffers = {  # as the first of all GPT-2 folders has them
        "gpt2": {"h.0.attn.bias": torch.ones(1, 1, 256, 256), "h.0.attn.masked_bias": torch.tensor(-1e4)},
        "llama": {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
    }.get(family, {})
    bare = rewritten(
        copy_of(whole, tmp_path / "bare"),
        lambda state: {name.removeprefix(PREFIXES[family]): one for name, one in state.items()} | buffers,
    )
    assert same_weights(opened(bare).weights(torch.float32), opened(whole).weights(torch.float32))


def one_value_apart(head):
    head[3, 3] += 1.0
    return head


@pytest.mark.parametrize(
    ("head", "tied"),
    [(lambda head: head, True), (torch.randn_like, False), (one_value_apart, False), (None, True)],
    ids=["the same", "another", "one value differs", "the head alone"],
)
def test_a_head_is_tied_to_its_embedding_if_it_is_the_same(head, tied, tmp_path):
    def change(state):
        if head is None:
            return {name.replace("model.embed_tokens", "lm_head"): one for name, one in state.items()}
        return {**state, "lm_head.weight": head(state["model.embed_tokens.weight"].clone())}

    folder = rewritten(copy_of(tiny_checkpoint("qwen2"), tmp_path / "both"), change)
    checkpoint = opened(folder)
    weights = checkpoint.weights(torch.float32)
    assert checkpoint.shape.tied == (weights.head.weight is weights.embedding) == tied
    assert torch.equal(weights.head.weight, load_file(folder / FILE)["lm_head.weight"])


def test_weights_do_not_lie_in_the_file_and_the_settings_name_the_ends(tmp_path):
    folder = copy_of(tiny_checkpoint("llama"), tmp_path / "copy")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2, 5]}))
    assert opened(folder).shape.end_tokens == (5, 2)
    (folder / "generation_config.json").unlink()
    assert opened(folder).shape.end_tokens == (2,)
    weights = opened(folder).weights(torch.float32)
    before = weights.embedding.clone()
    (folder / FILE).write_bytes(b"")
    assert torch.equal(weights.embedding, before)


def test_the_fingerprint_knows_each_byte_of_each_tensor_and_the_files_that_change_answers(tmp_path):
    folder = copy_of(tiny_checkpoint("llama"), tmp_path / "copy")
    file = folder / FILE
    content, seen = file.read_bytes(), {opened(tiny_checkpoint("llama")).fingerprint}
    places = opened(folder).store.tensors
    for number, place in enumerate(places.values()):
        at = place.start + number * 31 % (4 * place.shape[0])
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        seen.add(opened(folder).fingerprint)
    assert len(seen) == 1 + len(places)
    file.write_bytes(content)
    for name, changed in (
        ("README.md", False),
        ("config.json", True),
        ("tokenizer.json", True),
        ("chat_template.jinja", True),
    ):
        with (folder / name).open("a") as written:
            written.write("\n")
        found = opened(folder).fingerprint
        assert (found not in seen) == changed, name
        seen.add(found)


def test_digests_do_not_depend_on_threads_and_cover_every_chunk(monkeypatch):
    monkeypatch.setattr(digests, "CHUNK_BYTES", 64)
    contents = {str(size): bytes(n % 251 for n in range(size)) for size in (0, 1, 63, 64, 65, 1000)}

    def of(contents):
        read = {name: lambda start, length, one=one: one[start : start + length] for name, one in contents.items()}
        return digests.tensor_digests({name: digests.DigestSource(len(contents[name]), read[name]) for name in read})

    first = of(contents)
    monkeypatch.setattr(digests, "cores", lambda: 3)
    assert of(contents) == first
    assert len(set(first.values())) == len(contents)
    for at in range(0, 1000, 37):
        changed = bytearray(contents["1000"])
        changed[at] ^= 128
        assert of({"1000": bytes(changed)})["1000"] != first["1000"]


def test_weights_are_read_for_the_fingerprint_once_as_long_as_they_stay(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "SETTLED_S", -3600.0)
    calls, compute = [], safetensors_folder.tensor_digests
    monkeypatch.setattr(safetensors_folder, "tensor_digests", lambda all: (calls.append(len(all)), compute(all))[1])
    folder = copy_of(tiny_checkpoint("llama"), tmp_path / "copy")
    first = opened(folder).fingerprint
    assert opened(folder).fingerprint == first
    assert len(calls) == 1
    for number, damage in enumerate((b"", b"{}", b"[]", b'{"stamp": 1, "digests": {}}', b"\xff"), 2):
        for place in (tmp_path / "cache").rglob("*.json"):
            place.write_bytes(damage)
        assert opened(folder).fingerprint == first
        assert len(calls) == number
    file = folder / FILE
    times, content = file.stat(), bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a copying program may leave it
    assert opened(folder).fingerprint != first
    assert len(calls) == 7
    monkeypatch.setattr(digests, "SETTLED_S", 3600.0)  # what changed a moment ago may change again unseen
    shutil.rmtree(tmp_path / "cache")
    assert opened(folder).fingerprint == opened(folder).fingerprint != first
    assert len(calls) == 9


@pytest.mark.parametrize("family", DIFFUSION)
def test_all_tensors_of_a_diffusion_model_become_weights_and_its_tokenizer_is_read(family):
    checkpoint, tensors = opened(tiny_diffusion(family)), stored(tiny_diffusion(family))[1]
    weights = checkpoint.weights(torch.float32)
    assert sum(tensor.numel() for tensor in tensors.values()) == sizes(weights)[0]
    assert checkpoint.estimate(3, 12, 100, torch.float32).weights_bytes == 4 * sizes(weights)[0]
    for layer in checkpoint.weights(torch.bfloat16).layers:
        assert layer.up.weight.dtype == layer.down.weight.dtype == torch.bfloat16
        if layer.mixture is not None:
            assert (layer.mixture.router.dtype, layer.mixture.up.dtype) == (torch.float32, torch.bfloat16)
    language = open_language(checkpoint.language, checkpoint.shape)
    assert language.end_tokens == (2,)
    plain, masked = language.encode([Prompt(text="a lazy dog"), Prompt(text="a <|mask|> dog")])
    assert (MASK in plain, MASK in masked) == (False, True)


@pytest.mark.parametrize("family", ["qwen2", "gpt2", *DIFFUSION])
def test_a_running_model_takes_weights_from_where_a_trainer_leaves_them(family, tmp_path):
    make = tiny_diffusion if family in DIFFUSION else tiny_checkpoint
    own, folder = opened(make(family)), make(family, seed=1)
    assert own.fingerprint != opened(folder).fingerprint
    places = [folder]
    if family not in DIFFUSION:
        bare = copy_of(folder, tmp_path / "bare")
        (bare / "config.json").unlink()
        places += [folder / FILE, bare, make(family, seed=1, shard="100KB")]
    for place in places:
        assert same_weights(read_other_weights(own, str(place), torch.float32), opened(folder).weights(torch.float32))


@pytest.mark.parametrize(
    ("base", "changes", "file", "why"),
    [
        ({}, {"num_hidden_layers": 3}, "", "layers 3 instead of 2"),
        ({}, {"intermediate_size": 96}, "", "intermediate 96 instead of 160"),
        ({}, {"intermediate_size": 96}, FILE, r"gate_proj.*\[96, 64\]"),
        ({}, {"tie_word_embeddings": True}, "", r"'lm_head.weight' \[384, 64\] is missing"),
        ({"tie_word_embeddings": True}, {}, "", "a head of their own"),
        ("tiny", None, "nowhere", "there are no weights at nowhere"),
        ("null", None, "nowhere", "has no weights that could be changed"),
    ],
)
def test_weights_that_are_absent_or_of_another_shape_are_refused(base, changes, file, why):
    own = built_in(base) if isinstance(base, str) else opened(tiny_checkpoint("llama", **base))
    place = file if changes is None else tiny_checkpoint("llama", **changes) / file
    with pytest.raises(UsageError, match=why):
        read_other_weights(own, str(place), torch.float32)


def built_in(name):
    return open_checkpoint(ModelSpec(name, kind="text"))


def sizes(weights):
    """Values and bytes; of a tensor that is used twice once."""
    tensors = {id(tensor): tensor for tensor in tensors_of(weights)}.values()
    return sum(tensor.numel() for tensor in tensors), sum(tensor.nbytes for tensor in tensors)


MASKED = [f"tiny-{family}" for family in DIFFUSION]


@pytest.mark.parametrize("name", ["tiny", *MASKED])
def test_a_built_in_model_is_the_same_each_time_and_is_written_for_other_programs(name, tmp_path):
    one, other = built_in(name), built_in(name)
    weights = one.weights(torch.float32)
    assert (one.fingerprint, one.shape) == (other.fingerprint, other.shape)
    if name == "tiny":
        assert 4_900_000 < sizes(weights)[0] < 5_300_000
        assert (one.language.bytes, one.shape.end_tokens, one.folder) == (True, (256,), None)
    else:
        assert one.shape.family == name.removeprefix("tiny-")
        assert sizes(weights)[0] < 800_000
        silent = weights.head.weight[one.shape.masking.mask_token, 0]  # a mask is filled in and never said
        assert silent < -100 < weights.head.weight[ord("a"), 0] == 0.0
    save_folder(other, tmp_path / "out")
    again = opened(tmp_path / "out")
    assert again.shape == one.shape
    assert same_weights(again.weights(torch.float32), weights)
    with pytest.raises(UsageError, match="Use 'tiny'"):
        save_folder(again, tmp_path / "more")


def test_transformers_finds_tiny_to_say_printable_characters_after_any_prompt(tmp_path):
    save_folder(built_in("tiny"), tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(model.lm_head.weight, built_in("tiny").weights(torch.float32).head.weight)
    prompts = torch.randint(0, 1024, (4, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = model(prompts).logits
    assert logits.softmax(-1)[..., [10, *range(32, 127), 256]].sum(-1).min() > 0.999
    assert logits.argmax(-1).unique().numel() > 20


@pytest.mark.parametrize("family", [*FAMILIES, "tiny", *MASKED])
def test_the_estimate_is_what_the_weights_take(family):
    checkpoint = built_in(family) if family.startswith("tiny") else opened(tiny_checkpoint(family))
    shape = checkpoint.shape
    for dtype in (torch.float32, torch.bfloat16):
        estimate = checkpoint.estimate(3, 12, 100, dtype)
        assert estimate.weights_bytes == sizes(checkpoint.weights(dtype))[1]
        assert estimate.cache_bytes == 12 * 32 * 2 * shape.layers * shape.kv_heads * shape.head_dim * dtype.itemsize
        assert estimate.peak_bytes > estimate.weights_bytes + estimate.cache_bytes


def test_null_takes_no_memory_and_more_experts_of_a_token_take_more():
    null = built_in("null")
    assert (null.shape.family, null.weights(torch.float32).layers) == ("null", ())
    assert null.estimate(256, 64, 2048, torch.float32).cache_bytes == 0
    few, many = (opened(tiny_diffusion("llada-moe", num_experts_per_tok=chosen)) for chosen in (2, 6))
    one, other = (checkpoint.estimate(3, 12, 100, torch.float32) for checkpoint in (few, many))
    assert one.weights_bytes == other.weights_bytes
    assert one.peak_bytes < other.peak_bytes


@pytest.mark.parametrize(
    ("free", "dtype", "cure"),
    [
        (15e9, torch.float32, "Use -B pages=2048 or --dtype bfloat16"),
        (15e9, torch.bfloat16, "Use -B pages=2048."),
        (11.05e9, torch.bfloat16, "Use --context 800."),
        (18.5e9, torch.bfloat16, "-B pages=3840"),
        (9e9, torch.float32, "Not even one page fits beside the weights"),
        (9e9, torch.bfloat16, "smaller model"),
        (1e9, torch.float32, "smaller model"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_the_numbers_and_a_cure_that_helps(free, dtype, cure):
    estimate = Estimate(weights_bytes=10_000_000_000, cache_bytes=8_000_000_000, peak_bytes=19_000_000_000)
    refuse_oversized("m", estimate, 19_000_000_000, pages=4096, length=2048, dtype=dtype)
    with pytest.raises(UsageError) as refused:
        refuse_oversized("m", estimate, int(free), pages=4096, length=2048, dtype=dtype)
    message = str(refused.value)
    assert cure in message
    if free == 15e9:
        numbers = ("10 GB", "8 GB", "19 GB", "15 GB", "4,096 pages", "2,048 tokens", "64 pages")
        assert all(number in message for number in numbers)

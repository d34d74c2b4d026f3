"""GGUF files of families that transformers computes are the models that they were made of: the same state, and the
same logits as transformers' own reading of the file where it has one.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
import transformers
from text.gguf_files import KINDS, stored, tokenizer_metadata, write_gguf
from text.tiny import tiny_checkpoint

from gpuinfer.api import ModelSpec
from gpuinfer.errors import UsageError
from gpuinfer.text import model_listing
from gpuinfer.text.checkpoint import open_checkpoint
from gpuinfer.text.checkpoint.gguf_transformers import ARCHITECTURES, MIXTURE

SIZES = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
LONG = [1.0 + 0.5 * n for n in range(8)]
SHORT = [1.0 + 0.1 * n for n in range(8)]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {  # by name of the case: architecture, transformers' configuration, metadata besides the sizes
    "gemma2": (
        "gemma2",
        lambda: transformers.Gemma2Config(**SIZES, head_dim=32, query_pre_attn_scalar=32, sliding_window=16),
        {"attention.sliding_window": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "phi3": ("phi3", lambda: transformers.Phi3Config(**SIZES, sliding_window=16), {"attention.sliding_window": 16}),
    "phi3 of long contexts": (
        "phi3",
        lambda: transformers.Phi3Config(
            **SIZES,
            original_max_position_embeddings=64,
            rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "long_factor": LONG, "short_factor": SHORT},
        ),
        {"rope.scaling.original_context_length": 64},
    ),
    "mixtral": (
        "llama",
        lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, rope_theta=1e4),
        {"expert_count": 4, "expert_used_count": 2},
    ),
    "qwen2moe": (
        "qwen2moe",
        lambda: transformers.Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=64),
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
    ),
    "qwen3moe": (
        "qwen3moe",
        lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=32, norm_topk_prob=True),
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
    ),
    "starcoder2": ("starcoder2", lambda: transformers.Starcoder2Config(**SIZES, sliding_window=None), {}),
    "granite": (
        "granite",
        lambda: transformers.GraniteConfig(
            **SIZES, attention_multiplier=0.2, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=4.0
        ),
        {"attention.scale": 0.2, "embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 4.0},
    ),
    "olmo2": ("olmo2", lambda: transformers.Olmo2Config(**SIZES), {}),
    "llama": ("llama", lambda: transformers.LlamaConfig(**SIZES), {}),
    "qwen3": ("qwen3", lambda: transformers.Qwen3Config(**SIZES, head_dim=32), {}),
}
READ_BY_TRANSFORMERS = ("gemma2", "phi3", "qwen2moe", "qwen3moe", "starcoder2")


def random_model(config):
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            weights.add_(torch.randn(weights.shape) * 0.1) if weights.ndim == 1 else weights.mul_(4)
            if "gate.weight" in name:
                weights.mul_(8)  # experts that are chosen clearly
    return model.eval()


def tensors_of(model, architecture, kind):
    """As llama.cpp's converter names and orders them."""
    config = model.config
    [number] = [one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    known = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found = {}
    for name, tensor in model.state_dict().items():
        values, stem = tensor.numpy(), name.rpartition(".")[0]
        if stem == "lm_head" and config.tie_word_embeddings:
            continue
        layer = name.removeprefix("model.layers.").split(".")[0]
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            found[f"blk.{layer}.ffn_gate_exps.weight"] = gate.contiguous().numpy()
            found[f"blk.{layer}.ffn_up_exps.weight"] = up.contiguous().numpy()
            continue
        if name.endswith("experts.down_proj"):
            found[f"blk.{layer}.ffn_down_exps.weight"] = values
            continue
        count = heads.get(stem.split(".")[-1])
        if count and architecture in ("llama", "granite"):
            values = values.reshape(count, 2, values.shape[0] // count // 2, -1).swapaxes(1, 2).reshape(values.shape)
        if architecture == "gemma2" and stem.endswith("norm"):
            values = values + 1
        if name.endswith("shared_expert_gate.weight"):
            values = values.reshape(-1)
        found[f"{known.get_name(stem)}.{name.rpartition('.')[2]}"] = values
    rope = config.rope_parameters
    for end in ("long", "short"):
        if f"{end}_factor" in rope:
            found[f"rope_factors_{end}.weight"] = torch.tensor(rope[f"{end}_factor"]).numpy()
    return {name: stored(values, "F32" if name.endswith("gate_inp.weight") else kind) for name, values in found.items()}


def file_of(case, path, kind="F32", **changes):
    """The file, and the model that it was made of."""
    architecture, make, more = FAMILIES[case]
    torch.manual_seed(7)
    model = random_model(make())
    config = model.config
    eps = getattr(config, "rms_norm_eps", None)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.freq_base": 10_000.0,
        **({"attention.layer_norm_epsilon": config.norm_epsilon} if eps is None else {}),
        **({} if eps is None else {"attention.layer_norm_rms_epsilon": eps}),
        **more,
        **changes,
    }
    metadata = tokenizer_metadata(tiny_checkpoint("llama")) | {
        f"{architecture}.{key}": value for key, value in keys.items()
    }
    metadata["tokenizer.ggml.padding_token_id"] = 0
    return write_gguf(path, architecture, metadata, tensors_of(model, architecture, kind)), model


def opened(place):
    return open_checkpoint(ModelSpec(str(place), kind="text"), "transformers")


def logits_of(model):
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return model(torch.arange(3, 40)[None]).logits


@pytest.mark.parametrize("case", FAMILIES)
def test_a_file_is_the_model_that_it_was_made_of(case, tmp_path):
    file, model = file_of(case, tmp_path / "m.gguf")
    found = opened(file)
    read, wanted = found.model(torch.float32), model.state_dict()
    assert found.shape.decoder == "transformers"
    assert read.state_dict().keys() == wanted.keys()
    for name, tensor in read.state_dict().items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-6)
    torch.testing.assert_close(logits_of(read), logits_of(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", READ_BY_TRANSFORMERS)
def test_a_quantised_file_is_as_transformers_reads_it(case, tmp_path):
    file, _ = file_of(case, tmp_path / "m.gguf", kind="Q8_0")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    read = opened(file).model(torch.float32)
    for name, tensor in read.state_dict().items():
        torch.testing.assert_close(tensor, theirs.state_dict()[name], rtol=0, atol=1e-6)


def test_an_answer_of_a_mixture_of_experts(tmp_path, gpuinfer, monkeypatch):
    file_of("mixtral", tmp_path / "m.gguf", kind="Q8_0")
    monkeypatch.chdir(tmp_path)
    words = ["--prompt", "The", "--max-new-tokens", "3", "--ignore-eos", "--quiet", "--output", "a.jsonl"]
    code, _, err = gpuinfer("generate", "--model", "m.gguf", *words)
    assert code == 0, err
    assert '"completion_tokens":3' in Path("a.jsonl").read_text()


def test_what_is_listed_is_what_is_read():
    assert {*ARCHITECTURES} - {MIXTURE} == model_listing.READ_GGUF


REFUSED = [  # case | metadata that change | what the message names
    ("qwen3moe", {"expert_weights_scale": 2.5}, "'qwen3moe.expert_weights_scale': 2.5"),
    ("olmo2", {"rope.dimension_count": 8}, "'olmo2.rope.dimension_count' is not the 16 values of a head"),
    ("mixtral", {"expert_used_count": 0}, "'expert_used_count' is 0"),
    ("phi3 of long contexts", {"rope.scaling.original_context_length": 0}, "original_context_length' is 0"),
    ("granite", {"feed_forward_length": 100}, "its header makes it [100, 64]"),
]


@pytest.mark.parametrize(("case", "changes", "named"), REFUSED)
def test_what_transformers_would_compute_otherwise_is_refused(case, changes, named, tmp_path):
    file, _ = file_of(case, tmp_path / "m.gguf", **changes)
    with pytest.raises(UsageError) as refused:
        opened(file).model(torch.float32)
    assert named in str(refused.value)


def test_a_tensor_that_the_family_does_not_have_is_named(tmp_path):
    _, model = file_of("olmo2", tmp_path / "m.gguf")
    file, _ = file_of("olmo2", tmp_path / "m.gguf")
    tensors = tensors_of(model, "olmo2", "F32") | {"blk.0.attn_q.bias": (torch.zeros(64).numpy(), KINDS.F32)}
    reader = gguf.GGUFReader(file)
    metadata = {
        key: field.contents() for key, field in reader.fields.items() if not key.startswith(("GGUF.", "general."))
    }
    changed = write_gguf(tmp_path / "n.gguf", "olmo2", metadata, tensors)
    with pytest.raises(UsageError, match=r"tensor 'blk\.0\.attn_q\.bias' is not part of a olmo2 model"):
        opened(changed).model(torch.float32)


def test_native_decoders_refuse_other_files_by_name(tmp_path):
    file, _ = file_of("olmo2", tmp_path / "m.gguf")
    with pytest.raises(UsageError, match="no decoder of ours is for models of type 'olmo2'"):
        open_checkpoint(ModelSpec(str(file), kind="text"), "native")

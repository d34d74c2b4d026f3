"""Logits of each family of diffusion models: the plain implementation's, and those of a twin in transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from text.decoders import Make, each_decoder, opened
from text.diffusion_oracle import embedding_of, logits_of, predictions
from text.diffusion_oracle import opened as stored
from text.steps import table_of
from text.tiny_diffusion import FAMILIES, MASK, tiny_diffusion
from torch import Tensor

from gpuinfer.text.transformer import Decoder, Shape, Step

VARIANTS: dict[str, dict[str, Any]] = {
    **{family: {} for family in FAMILIES},
    "llada, tied": {"weight_tying": True},
    "llada, biases": {"include_qkv_bias": True},
    "llada, one key head": {"n_kv_heads": None, "multi_query_attention": True},
    "llada-moe, one layer without experts": {"moe_layer_freq": [0, 1]},
    "llada-moe, no q and k norms": {"qk_layernorm": False},
    "llada2, no shared expert": {"num_shared_experts": 0},
    "llada2, two shared experts": {"num_shared_experts": 2},
    "llada2, one group": {"n_group": 1, "topk_group": 1},
    "llada2, biases, all of a head turns": {
        "use_bias": True, "use_qkv_bias": True, "partial_rotary_factor": 1.0, "rotary_dim": 16,
    },
    "sdar, tied, blocks of 8": {"tie_word_embeddings": True, "block_size": 8},
    "sdar, biases": {"attention_bias": True},
}  # fmt: skip
DICE = np.random.default_rng(7)
CANVASES = [
    [*DICE.integers(MASK + 1, 384, prompt).tolist(), *[MASK] * masks] for prompt, masks in ((5, 19), (40, 32), (17, 1))
]


def folder_of(variant: str) -> Path:
    """Its head such that logits are as large as those of a trained model."""
    return tiny_diffusion(variant.partition(",")[0], head=0.5, **VARIANTS[variant])


def sees_of(shape: Shape, start: int, length: int, canvas: int) -> list[int]:
    """How much each of these positions sees of a canvas: all, or up to the end of its block."""
    block = shape.masking.block if shape.masking else None
    if block is None:
        return [canvas] * length
    return [min(canvas, (at // block + 1) * block) for at in range(start, start + length)]


def step_of(shape: Shape, *segments: tuple[int, int, Sequence[int], int]) -> Step:
    """A step of (slot, start, tokens, length of the canvas) segments that asks for all logits."""
    tokens = [token for _, _, run, _ in segments for token in run]
    sees = [one for _, start, run, canvas in segments for one in sees_of(shape, start, len(run), canvas)]
    slots, starts = [slot for slot, *_ in segments], [start for _, start, *_ in segments]
    lengths = [len(run) for _, _, run, _ in segments]
    arrays = [np.array(part, np.int32) for part in (tokens, table_of(slots), starts, lengths, range(len(tokens)))]
    return Step(*arrays, sees=np.array(sees, np.int32))


def decoder_of(make: Make, folder: Path, **options: Any) -> Decoder:
    checkpoint = opened(folder)
    settings = {"slots": len(CANVASES), "length": 96, **options}
    return make(checkpoint.shape, checkpoint.weights(torch.float32), torch.float32, **settings)


@pytest.mark.sample(5)
@each_decoder
@pytest.mark.parametrize("variant", VARIANTS)
def test_canvases_of_all_lengths_in_one_step_have_the_logits_of_the_plain_implementation(
    make: Make, variant: str
) -> None:
    folder = folder_of(variant)
    decoder = decoder_of(make, folder)
    segments = [(slot, 0, canvas, len(canvas)) for slot, canvas in enumerate(CANVASES)]
    found = decoder.forward(step_of(decoder.shape, *segments)).clone()
    decoder.close()
    expected = torch.cat([logits_of(folder, canvas) for canvas in CANVASES])
    assert expected.abs().max() > 5
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


@each_decoder
@pytest.mark.parametrize("family", ["llada2", "sdar"])
def test_a_block_causal_canvas_has_the_same_logits_block_by_block(make: Make, family: str) -> None:
    folder, canvas = folder_of(family), CANVASES[1]
    decoder = decoder_of(make, folder, slots=2)
    block = decoder.shape.masking.block
    steps = [(1, at, canvas[at : at + block], len(canvas)) for at in range(0, len(canvas), block)]
    found = [decoder.forward(step_of(decoder.shape, step)).clone() for step in steps]
    decoder.close()
    torch.testing.assert_close(torch.cat(found), logits_of(folder, canvas), atol=1e-4, rtol=1e-5)


def test_predictions_are_shifted_for_dream_alone_and_embeddings_may_stand_for_tokens() -> None:
    for family in FAMILIES:
        folder, plain, other = tiny_diffusion(family), list(CANVASES[0]), list(CANVASES[0])
        logits, shifted = logits_of(folder, plain), predictions(folder, plain)
        is_shifted = opened(folder).shape.masking.shifted
        assert is_shifted == (family == "dream")
        assert torch.equal(shifted[is_shifted:], logits[: len(logits) - is_shifted])
        other[3] = 77
        assert torch.equal(logits_of(folder, plain, {3: embedding_of(folder)[77]}), logits_of(folder, other))


TWINS = {"llada": "Llama", "llada-moe": "Qwen3Moe", "llada2": "Glm4Moe", "dream": "Qwen2", "sdar": "Qwen3"}
RENAMED = {  # in this order
    "llada": {
        "model.transformer.ff_out": "lm_head", "model.transformer": "model", "wte": "embed_tokens", "ln_f": "norm",
        "blocks": "layers", "attn_norm": "input_layernorm", "ff_norm": "post_attention_layernorm",
        "attn_out": "self_attn.o_proj", "ff_proj": "mlp.gate_proj", "ff_out": "mlp.down_proj",
        ".up_proj": ".mlp.up_proj", "q_proj": "self_attn.q_proj", "k_proj": "self_attn.k_proj",
        "v_proj": "self_attn.v_proj",
    },
    "llada2": {
        "word_embeddings": "embed_tokens", "attention.query_layernorm": "self_attn.q_norm",
        "attention.key_layernorm": "self_attn.k_norm", "attention.dense": "self_attn.o_proj",
        "gate.expert_bias": "gate.e_score_correction_bias",
    },
}  # fmt: skip


def twin_config(family: str, config: dict[str, Any]) -> dict[str, Any]:
    """The twin's, which says the same in its own words."""
    if family == "llada":
        return {
            "hidden_size": config["d_model"], "num_attention_heads": config["n_heads"],
            "num_key_value_heads": config["n_kv_heads"], "num_hidden_layers": config["n_layers"],
            "intermediate_size": config["mlp_hidden_size"], "max_position_embeddings": config["max_sequence_length"],
            "vocab_size": config["vocab_size"], "rms_norm_eps": config["rms_norm_eps"],
            "rope_theta": config["rope_theta"],
        }  # fmt: skip
    own = {name: value for name, value in config.items() if name not in ("architectures", "auto_map", "model_type")}
    if family == "llada-moe":
        return {
            **own,
            "head_dim": 16,
            "moe_intermediate_size": own["expert_intermediate_size"],
            "norm_topk_prob": False,
        }
    if family == "llada2":
        counts = {"n_routed_experts": own["num_experts"], "n_shared_experts": own["num_shared_experts"]}
        return {**own, **counts, "use_qk_norm": True, "attention_bias": False}
    return own


def twin_tensors(family: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in tensors.items():
        for old, new in RENAMED.get(family, {}).items():
            name = name.replace(old, new)
        if "query_key_value" in name:
            keys = config["head_dim"] * config["num_key_value_heads"]
            sizes = [config["head_dim"] * config["num_attention_heads"], keys, keys]
            for kind, part in zip("qkv", tensor.split(sizes), strict=True):
                found[name.replace("attention.query_key_value", f"self_attn.{kind}_proj")] = part
        else:
            found[name] = tensor
    return found


@torch.inference_mode()
def twin_logits(family: str, folder: Path, tokens: Sequence[int]) -> Tensor:
    """What a left-to-right model of transformers with the same weights says where it may look ahead."""
    import transformers

    config, tensors = stored(folder)
    settings = getattr(transformers, f"{TWINS[family]}Config")(**twin_config(family, config))
    settings._attn_implementation = "eager"
    model = getattr(transformers, f"{TWINS[family]}ForCausalLM")(settings).eval()
    load(model, twin_tensors(family, config, dict(tensors)))
    block = opened(folder).shape.masking.block or len(tokens)
    blocks = torch.arange(len(tokens)) // block
    mask = torch.where(blocks[:, None] >= blocks[None, :], 0.0, float("-inf"))[None, None]
    return model(torch.tensor([list(tokens)]), attention_mask=mask, use_cache=False).logits[0].float()


def load(model: Any, tensors: dict[str, Tensor]) -> None:
    """By name; experts that the model keeps stacked are stacked."""
    for name, own in model.state_dict().items():
        own.copy_(tensors[name] if name in tensors else stacked(name, own, tensors))


def stacked(name: str, own: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    layer, _, kind = name.partition(".experts.")
    parts = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else [kind]
    each = [torch.cat([tensors[f"{layer}.experts.{at}.{part}.weight"] for part in parts]) for at in range(len(own))]
    return torch.stack(each)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plain_implementation_is_what_a_twin_in_transformers_computes(family: str) -> None:
    folder = folder_of(family)
    torch.testing.assert_close(
        logits_of(folder, CANVASES[1]), twin_logits(family, folder, CANVASES[1]), atol=1e-4, rtol=1e-5
    )

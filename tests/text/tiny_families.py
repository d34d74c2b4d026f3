"""Tiny folders, with random weights, of families that transformers' own code computes."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from text.tiny import END, PAD, POSITIONS, SPECIAL, VOCABULARY, folder_name, publish, session_folder, write_tokenizer

WINDOW = 8  # less than the prompts of the tests
_WIDE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "eos_token_id": END,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
}
_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}
DECODERS: Mapping[str, dict[str, Any]] = {
    "apertus": {},
    "cohere": {},
    "cohere2": _SLIDING,
    "deepseek_v3": {
        **_MLA,
        **_EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "diffllama": {},
    "ernie4_5": {},
    "exaone4": _SLIDING,
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, **_SLIDING},
    "gemma3_text": {"head_dim": 16, **_SLIDING},
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        **_SLIDING,
    },
    "glm4": {"head_dim": 16},
    "gpt_bigcode": _GPT,
    "gpt_neox": {},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, **_SLIDING},
    "granite": {"embedding_multiplier": 2.0, "logits_scaling": 3.0, "attention_multiplier": 0.2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "mimo_v2_flash": {"head_dim": 16, "v_head_dim": 8, **_EXPERTS, "n_routed_experts": 4, "n_group": 1, **_SLIDING},
    "minicpm3": _MLA | {"num_key_value_heads": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron": {"head_dim": 16},
    "olmo": {},
    "olmo2": {},
    "olmo3": _SLIDING,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "phi": {},
    "phi3": {},
    "qwen2_moe": {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "head_dim": 16},
    "seed_oss": {"head_dim": 16},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {"sliding_window": WINDOW},
}
TIED = ("cohere", "cohere2", "ernie4_5", "gpt_bigcode", "opt", "smollm3", "starcoder2")
SCALED = ("gemma", "gemma2", "gemma3_text", "gemma4_text", "minicpm3")
EMBEDDINGS = dict.fromkeys(TIED, 0.12) | dict.fromkeys(SCALED, 0.02)  # how far they scatter


def tiny_family(family: str, *, seed: int = 0, **changes: Any) -> Path:
    """A folder as transformers writes it: 2 layers, 64 values, 4 heads over 2, 384 tokens, 256 positions."""
    made = session_folder() / folder_name(family, ["family", seed, changes])
    if not made.is_dir():
        draft = Path(tempfile.mkdtemp(prefix=f"{made.name}.", dir=session_folder()))
        _write_family(draft, family, seed, {**DECODERS.get(family, {}), **changes})
        publish(draft, made)
    return made


def family_config(family: str, changes: Mapping[str, Any]) -> Any:
    import transformers

    return transformers.AutoConfig.for_model(family, **{**_WIDE, **changes})


def _write_family(folder: Path, family: str, seed: int, changes: Mapping[str, Any]) -> None:
    import torch
    import transformers

    write_tokenizer(folder, SPECIAL)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers' own code
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(family_config(family, changes)).to(torch.float32)
        with torch.no_grad():
            for name, weights in model.named_parameters():
                # Else a token that is its own embedding's likeliest would be said again and again.
                spread = EMBEDDINGS.get(family, 0.5) if "embed" in name or "wte" in name else 0.12
                if weights.dim() > 1:
                    weights.normal_(0.0, spread)
                else:
                    weights.add_(torch.randn_like(weights) * 0.1)
    model.save_pretrained(folder)

"""GGUF files of tiny Hugging Face folders, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
KINDS = gguf.GGMLQuantizationType
CONTROL, NORMAL, BYTE, USER_DEFINED = 3, 1, 6, 4


def gguf_name(name: str) -> str:
    stem, _, ending = name.rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{ending}"
    number, _, rest = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{LAYER[rest]}.{ending}"


def gguf_tensors(folder: Path, family: str) -> dict[str, np.ndarray]:
    """float32, by their names in the file; of Llama, rows of queries and keys by pairs that turn together."""
    config = json.loads((folder / "config.json").read_text())
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    found = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        own = gguf_name(name)
        count = heads.get(own.split(".")[-2])
        if count and family == "llama":
            half = tensor.shape[0] // count // 2
            tensor = tensor.reshape(count, 2, half, -1).swapaxes(1, 2).reshape(tensor.shape)
        found[own] = tensor.astype(np.float32)
    return found


def stored(tensor: np.ndarray, kind: str) -> tuple[np.ndarray, Any]:
    """A matrix in this type, a vector in float32, as the writer wants them."""
    own = KINDS.F32 if tensor.ndim == 1 else KINDS[kind]
    return gguf.quantize(tensor, own), own


def as_read(tensor: np.ndarray, kind: str) -> np.ndarray:
    return gguf.dequantize(*stored(tensor, kind)) if tensor.ndim > 1 else tensor


def tokenizer_metadata(folder: Path) -> dict[str, Any]:
    """Of a byte-level tokenizer.json, or of one with pieces of text."""
    state = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    vocabulary, byte_level = state["model"]["vocab"], not state["model"].get("byte_fallback")
    tokens = [text for text, _ in sorted(vocabulary.items(), key=lambda pair: pair[1])]
    special = {one["id"]: one["special"] for one in state["added_tokens"]}
    kinds = [
        (CONTROL if special[token] else USER_DEFINED)
        if token in special
        else BYTE
        if text.startswith("<0x")
        else NORMAL
        for token, text in enumerate(tokens)
    ]
    merges = [one if isinstance(one, str) else " ".join(one) for one in state["model"]["merges"]]
    found = {"model": "gpt2" if byte_level else "llama", "tokens": tokens, "token_type": kinds}
    found |= {"pre": "gpt-2", "merges": merges} if byte_level else {"scores": [-float(n) for n in range(len(tokens))]}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown")):
        if isinstance(config.get(name), str) and config[name] in vocabulary:
            found[f"{key}_token_id"] = vocabulary[config[name]]
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def model_metadata(folder: Path, family: str) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or {}
    keys = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(rope.get("rope_theta", 10_000.0)),
        "rope.dimension_count": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "attention.key_length": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
    }
    return {f"{family}.{key}": value for key, value in keys.items()}


def write_gguf(path: Path, family: str, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[Any, Any]]) -> Path:
    """`tensors`: values as `stored` makes them, by name."""
    writer = gguf.GGUFWriter(path, family)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_of(
    folder: Path, path: Path, *, family: str = "llama", kind: str = "F32", without: tuple[str, ...] = (), **changes: Any
) -> Path:
    """The folder's model as a file. `changes`: metadata, dots in their names written "__"; `without`: keys left out."""
    metadata = model_metadata(folder, family) | tokenizer_metadata(folder)
    template = folder / "chat_template.jinja"
    if template.is_file():
        metadata["tokenizer.chat_template"] = template.read_text()
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    metadata = {key: value for key, value in metadata.items() if not key.startswith(without or "\0")}
    tensors = {name: stored(tensor, kind) for name, tensor in gguf_tensors(folder, family).items()}
    return write_gguf(path, family, metadata, tensors)

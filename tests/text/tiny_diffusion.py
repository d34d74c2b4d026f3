"""Tiny folders of masked diffusion models, as their makers publish them: random weights, a real tokenizer, no network.

`from text.tiny_diffusion import tiny_diffusion`. A folder is written in a temporary place, once for all processes of a
test run: the tests that share it must not change it (`text.tiny.copy_of` gives one that may be changed).
"""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from text.tiny import END, PAD, POSITIONS, SPECIAL, VOCABULARY, folder_name, publish, session_folder, write_tokenizer

MASK = len(SPECIAL)  # the token that follows those of the other tiny models
MASK_TEXT = "<|mask|>"
HEAD = 1.0  # of the head's weights: the likeliest of some masks has a probability over 0.9, of others under 0.3
FAMILIES = ("llada", "llada-moe", "llada2", "dream", "sdar")

Tensors = Iterator[tuple[str, tuple[int, ...]]]


def tiny_diffusion(family: str, *, seed: int = 0, dtype: str = "float32", head: float = HEAD, **changes: Any) -> Path:
    """A folder: 2 layers (llada2: 3, the first without experts), 64 values, 4 heads over 2, 384 tokens, 256 positions.

    `changes` are keys of config.json; None takes one away. `head` scales the head, and so how sure the model is.
    """
    name = folder_name(family, [seed, dtype, head, changes])
    made = session_folder() / name
    if not made.is_dir():
        draft = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=session_folder()))
        _write(draft, family, seed, getattr(torch, dtype), head, changes)
        publish(draft, made)
    return made


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """config.json as this family has it."""
    config = {**CONFIGS[family], **changes}
    return {name: value for name, value in config.items() if value is not None}


def tensors_of(family: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a model of this config has."""
    return dict(TENSORS[family](config))


def _write(folder: Path, family: str, seed: int, dtype: torch.dtype, head: float, changes: dict[str, Any]) -> None:
    write_tokenizer(folder, [*SPECIAL, MASK_TEXT], mask_token=MASK_TEXT)
    config = config_of(family, **changes)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    drawn = {name: _drawn(name, shape, seed, head).to(dtype) for name, shape in tensors_of(family, config).items()}
    save_file(drawn, folder / "model.safetensors", metadata={"format": "pt"})


def _drawn(name: str, shape: tuple[int, ...], seed: int, head: float) -> torch.Tensor:
    """So large that neighbours and positions matter to what stands at a mask, which the mask itself is hardly ever.
    Queries and keys are long enough that attention is not even.
    """
    dice = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    drawn = torch.randn(shape, generator=dice)
    if len(shape) == 1:
        is_norm = "norm" in name or name.endswith("ln_f.weight")
        is_long = any(kind in name for kind in ("q_norm", "k_norm", "query_layernorm", "key_layernorm"))
        return 0.1 * drawn + (0.0 if not is_norm else 2.0 if is_long else 1.0)
    if name in ("lm_head.weight", "model.transformer.ff_out.weight"):
        drawn[MASK] = 0.0
        return head * drawn
    return 0.5 * drawn if "wte" in name or "embed" in name else 0.25 * drawn


def _linear(name: str, out: int, inner: int, bias: bool = False) -> Tensors:
    yield f"{name}.weight", (out, inner)
    if bias:
        yield f"{name}.bias", (out,)


def _mlp(prefix: str, hidden: int, inner: int) -> Tensors:
    for kind in ("gate", "up"):
        yield from _linear(f"{prefix}{kind}_proj", inner, hidden)
    yield from _linear(f"{prefix}down_proj", hidden, inner)


def _experts(prefix: str, hidden: int, inner: int, count: int) -> Tensors:
    yield from _linear(f"{prefix}gate", count, hidden)
    for expert in range(count):
        yield from _mlp(f"{prefix}experts.{expert}.", hidden, inner)


def _ends(config: Mapping[str, Any], embedding: str = "embed_tokens") -> Tensors:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield f"model.{embedding}.weight", (vocabulary, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.get("tie_word_embeddings", False):
        yield "lm_head.weight", (vocabulary, hidden)


def _llada(config: Mapping[str, Any]) -> Tensors:
    hidden, inner, heads = config["d_model"], config["mlp_hidden_size"], config["n_heads"]
    keys, bias = hidden // heads * config.get("n_kv_heads", 1), config.get("include_bias", False)
    qkv = bias or config.get("include_qkv_bias", False)
    rows = config.get("embedding_size", config["vocab_size"])
    yield "model.transformer.wte.weight", (rows, hidden)
    for number in range(config["n_layers"]):
        block = f"model.transformer.blocks.{number}."
        yield f"{block}attn_norm.weight", (hidden,)
        for kind, size in (("q", hidden), ("k", keys), ("v", keys)):
            yield from _linear(f"{block}{kind}_proj", size, hidden, qkv)
        yield from _linear(f"{block}attn_out", hidden, hidden, bias)
        yield f"{block}ff_norm.weight", (hidden,)
        for kind in ("ff_proj", "up_proj"):
            yield from _linear(f"{block}{kind}", inner, hidden, bias)
        yield from _linear(f"{block}ff_out", hidden, inner, bias)
    yield "model.transformer.ln_f.weight", (hidden,)
    if not config.get("weight_tying", False):
        yield from _linear("model.transformer.ff_out", rows, hidden, bias)


def _norms(layer: str, hidden: int) -> Tensors:
    for kind in ("input_layernorm", "post_attention_layernorm"):
        yield f"{layer}{kind}.weight", (hidden,)


def _llama_names(config: Mapping[str, Any], *, bias: bool, normed: bool) -> Tensors:
    """Everything but what stands for the MLP."""
    hidden, heads, keys = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim", hidden // heads)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        yield from _norms(layer, hidden)
        for kind, count in (("q", heads), ("k", keys), ("v", keys)):
            yield from _linear(f"{layer}self_attn.{kind}_proj", count * size, hidden, bias)
        yield from _linear(f"{layer}self_attn.o_proj", hidden, heads * size, config.get("attention_bias", False))
        for kind in "qk" if normed else "":
            yield f"{layer}self_attn.{kind}_norm.weight", (size,)
    yield from _ends(config)


def _dense(config: Mapping[str, Any], *, bias: bool, normed: bool) -> Tensors:
    yield from _llama_names(config, bias=bias, normed=normed)
    for number in range(config["num_hidden_layers"]):
        yield from _mlp(f"model.layers.{number}.mlp.", config["hidden_size"], config["intermediate_size"])


def _llada_moe(config: Mapping[str, Any]) -> Tensors:
    yield from _llama_names(config, bias=config["attention_bias"], normed=config["qk_layernorm"])
    hidden = config["hidden_size"]
    for number, mixed in enumerate(config["moe_layer_freq"]):
        mlp = f"model.layers.{number}.mlp."
        if mixed:
            yield from _experts(mlp, hidden, config["expert_intermediate_size"], config["num_experts"])
        else:
            yield from _mlp(mlp, hidden, config["dense_intermediate_size"])


def _llada2(config: Mapping[str, Any]) -> Tensors:
    hidden, heads, keys = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    size, inner, bias = config["head_dim"], config["moe_intermediate_size"], config["use_qkv_bias"]
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        mlp, attention = f"{layer}mlp.", f"{layer}attention."
        yield from _norms(layer, hidden)
        yield from _linear(f"{attention}query_key_value", (heads + 2 * keys) * size, hidden, bias)
        yield from _linear(f"{attention}dense", hidden, heads * size, config["use_bias"])
        for kind in ("query", "key"):
            yield f"{attention}{kind}_layernorm.weight", (size,)
        if number < config["first_k_dense_replace"]:
            yield from _mlp(mlp, hidden, config["intermediate_size"])
            continue
        yield from _experts(mlp, hidden, inner, config["num_experts"])
        yield f"{mlp}gate.expert_bias", (config["num_experts"],)
        if config["num_shared_experts"]:
            yield from _mlp(f"{mlp}shared_experts.", hidden, inner * config["num_shared_experts"])
    yield from _ends(config, "word_embeddings")


_IDS = {"vocab_size": VOCABULARY, "eos_token_id": END, "pad_token_id": PAD, "mask_token_id": MASK}
_MADE = json.loads(Path(__file__).with_name("diffusion_configs.json").read_text())  # as their makers publish them
_WIDE = {**_MADE.pop("wide"), "max_position_embeddings": POSITIONS}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    **{family: {**_WIDE, **_IDS, **own} for family, own in _MADE.items()},
    "dream": {**_WIDE, **_IDS, **_MADE["dream"], "bos_token_id": END},
    "llada": {**_MADE["llada"], **_IDS, "embedding_size": VOCABULARY, "max_sequence_length": POSITIONS},
}
TENSORS: Mapping[str, Callable[[Mapping[str, Any]], Tensors]] = {
    "llada": _llada,
    "llada-moe": _llada_moe,
    "llada2": _llada2,
    "dream": lambda config: _dense(config, bias=True, normed=False),
    "sdar": lambda config: _dense(config, bias=config["attention_bias"], normed=True),
}

"""What masked diffusion models say about a canvas, in plain torch from config.json and the stored tensors alone.

Written from what is published of each family, one row at a time, with nothing of the engine: the judge of decoders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, silu, softmax

Tensors = Mapping[str, Tensor]


@torch.inference_mode()
def logits_of(folder: Path, tokens: Sequence[int], vectors: Mapping[int, Tensor] | None = None) -> Tensor:
    """Float32 logits [tokens, vocabulary] as the model gives them, at every position of one canvas, all alone.

    `vectors`: embeddings that stand at some positions in place of their tokens' own.
    """
    config, tensors = opened(folder)
    hidden = embedding_of(folder)[torch.tensor(list(tokens))]
    for position, vector in (vectors or {}).items():
        hidden[position] = vector
    return FORWARDS[config["architectures"][0]](config, tensors, hidden)


def predictions(folder: Path, tokens: Sequence[int], vectors: Mapping[int, Tensor] | None = None) -> Tensor:
    """The same, each row for the token that stands at its own position: Dream's are shifted by one."""
    logits = logits_of(folder, tokens, vectors)
    if opened(folder)[0]["architectures"] != ["DreamModel"]:
        return logits
    return torch.cat([logits[:1], logits[:-1]])


def embedding_of(folder: Path) -> Tensor:
    """Float32 [vocabulary, hidden]."""
    tensors = opened(folder)[1]
    names = ("model.transformer.wte.weight", "model.embed_tokens.weight", "model.word_embeddings.weight")
    return next(tensors[name] for name in names if name in tensors)


@lru_cache(maxsize=32)
def opened(folder: Path) -> tuple[dict[str, Any], Tensors]:
    """config.json and all tensors, float32."""
    config = json.loads((folder / "config.json").read_text())
    found = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    return config, {name: tensor.float() for name, tensor in found.items()}


@dataclass(frozen=True)
class Attention:
    heads: int
    keys: int
    size: int
    theta: float
    turned: int  # values of a head that turn
    block: int | None = None  # None: every position sees all

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[positions, heads × size] of queries [positions, heads, size], keys and values [positions, keys, size]."""
        queries, keys = self._turn(queries), self._turn(keys)
        keys, values = (part.repeat_interleave(self.heads // self.keys, dim=1) for part in (keys, values))
        scores = torch.einsum("qhs,khs->hqk", queries, keys) / self.size**0.5
        weights = softmax(scores.masked_fill(~self._seen(len(queries)), float("-inf")), -1)
        return torch.einsum("hqk,khs->qhs", weights, values).flatten(1)

    def _turn(self, part: Tensor) -> Tensor:
        half = self.turned // 2
        frequencies = 1.0 / self.theta ** (torch.arange(0, self.turned, 2).float() / self.turned)
        angles = torch.outer(torch.arange(len(part)).float(), frequencies)[:, None, :]
        first, second, rest = part[..., :half], part[..., half : self.turned], part[..., self.turned :]
        turned = [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()]
        return torch.cat([*turned, rest], -1)

    def _seen(self, count: int) -> Tensor:
        if self.block is None:
            return torch.ones(count, count, dtype=torch.bool)
        blocks = torch.arange(count) // self.block
        return blocks[:, None] >= blocks[None, :]


def normed(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps)


def product(tensors: Tensors, name: str, inputs: Tensor) -> Tensor:
    return linear(inputs, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


def llada(config: Mapping[str, Any], tensors: Tensors, hidden: Tensor) -> Tensor:
    size, eps = config["d_model"] // config["n_heads"], config["rms_norm_eps"]
    attention = Attention(config["n_heads"], config.get("n_kv_heads", 1), size, config["rope_theta"], size)
    for number in range(config["n_layers"]):
        block = f"model.transformer.blocks.{number}."
        inputs = normed(hidden, tensors[f"{block}attn_norm.weight"], eps)
        parts = (product(tensors, f"{block}{kind}_proj", inputs).unflatten(-1, (-1, size)) for kind in "qkv")
        hidden = hidden + product(tensors, f"{block}attn_out", attention(*parts))
        inputs = normed(hidden, tensors[f"{block}ff_norm.weight"], eps)
        inner = silu(product(tensors, f"{block}ff_proj", inputs)) * product(tensors, f"{block}up_proj", inputs)
        hidden = hidden + product(tensors, f"{block}ff_out", inner)
    hidden = normed(hidden, tensors["model.transformer.ln_f.weight"], eps)
    if config["weight_tying"]:
        return linear(hidden, tensors["model.transformer.wte.weight"])
    return product(tensors, "model.transformer.ff_out", hidden)


def llama_like(config: Mapping[str, Any], tensors: Tensors, hidden: Tensor) -> Tensor:
    """Dream, SDAR and LLaDA-MoE: Llama's names, with what the tensors show (biases, q and k norms, experts)."""
    size = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    heads, keys, eps = config["num_attention_heads"], config["num_key_value_heads"], config["rms_norm_eps"]
    attention = Attention(heads, keys, size, config["rope_theta"], size, config.get("block_size"))
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        inputs = normed(hidden, tensors[f"{layer}input_layernorm.weight"], eps)
        parts = [product(tensors, f"{layer}self_attn.{kind}_proj", inputs).unflatten(-1, (-1, size)) for kind in "qkv"]
        for at, kind in enumerate("qk"):
            if (scale := tensors.get(f"{layer}self_attn.{kind}_norm.weight")) is not None:
                parts[at] = normed(parts[at], scale, eps)
        hidden = hidden + product(tensors, f"{layer}self_attn.o_proj", attention(*parts))
        inputs = normed(hidden, tensors[f"{layer}post_attention_layernorm.weight"], eps)
        hidden = hidden + after_attention(config, tensors, f"{layer}mlp.", inputs)
    return head(config, tensors, hidden, "model.embed_tokens.weight")


def llada2(config: Mapping[str, Any], tensors: Tensors, hidden: Tensor) -> Tensor:
    heads, keys, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    turned, eps = int(size * config["partial_rotary_factor"]), config["rms_norm_eps"]
    attention = Attention(heads, keys, size, config["rope_theta"], turned, config.get("block_size", 32))
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        inputs = normed(hidden, tensors[f"{layer}input_layernorm.weight"], eps)
        fused = product(tensors, f"{layer}attention.query_key_value", inputs).unflatten(-1, (-1, size))
        queries, others, values = fused.split([heads, keys, keys], dim=1)
        queries = normed(queries, tensors[f"{layer}attention.query_layernorm.weight"], eps)
        others = normed(others, tensors[f"{layer}attention.key_layernorm.weight"], eps)
        hidden = hidden + product(tensors, f"{layer}attention.dense", attention(queries, others, values))
        inputs = normed(hidden, tensors[f"{layer}post_attention_layernorm.weight"], eps)
        hidden = hidden + after_attention(config, tensors, f"{layer}mlp.", inputs)
    return head(config, tensors, hidden, "model.word_embeddings.weight")


def head(config: Mapping[str, Any], tensors: Tensors, hidden: Tensor, embedding: str) -> Tensor:
    hidden = normed(hidden, tensors["model.norm.weight"], config["rms_norm_eps"])
    return linear(hidden, tensors[embedding if config["tie_word_embeddings"] else "lm_head.weight"])


def mlp(tensors: Tensors, prefix: str, inputs: Tensor) -> Tensor:
    inner = silu(product(tensors, f"{prefix}gate_proj", inputs)) * product(tensors, f"{prefix}up_proj", inputs)
    return product(tensors, f"{prefix}down_proj", inner)


def after_attention(config: Mapping[str, Any], tensors: Tensors, prefix: str, inputs: Tensor) -> Tensor:
    """An ordinary MLP; or of each token its experts, one token and one expert after another, and the shared one."""
    if f"{prefix}gate.weight" not in tensors:
        return mlp(tensors, prefix, inputs)
    chosen, weights = ROUTERS[config["architectures"][0]](config, tensors, prefix, inputs)
    sums = []
    for token in range(len(inputs)):
        outputs = [mlp(tensors, f"{prefix}experts.{expert}.", inputs[token]) for expert in chosen[token].tolist()]
        sums.append((torch.stack(outputs) * weights[token, :, None]).sum(0))
    if f"{prefix}shared_experts.gate_proj.weight" in tensors:
        return torch.stack(sums) + mlp(tensors, f"{prefix}shared_experts.", inputs)
    return torch.stack(sums)


def llada_moe_router(config: Mapping[str, Any], tensors: Tensors, prefix: str, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """[tokens, chosen] experts and weights: the likeliest, weighed by their probabilities as they are."""
    likely = softmax(linear(inputs, tensors[f"{prefix}gate.weight"]), -1).topk(config["num_experts_per_tok"], -1)
    return likely.indices, likely.values


def llada2_router(config: Mapping[str, Any], tensors: Tensors, prefix: str, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Chosen by biased scores within the groups whose two best add up to most; weighed by the plain ones."""
    scores = torch.sigmoid(linear(inputs, tensors[f"{prefix}gate.weight"]))
    grouped = (scores + tensors[f"{prefix}gate.expert_bias"]).unflatten(-1, (config["n_group"], -1))
    best = grouped.topk(2, -1).values.sum(-1).topk(config["topk_group"], -1).indices
    out = torch.ones(grouped.shape[:-1], dtype=torch.bool).scatter(-1, best, False)
    chosen = (
        grouped.masked_fill(out[..., None], float("-inf")).flatten(1).topk(config["num_experts_per_tok"], -1).indices
    )
    weights = scores.gather(-1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True) * config["routed_scaling_factor"]


Router = Callable[[Mapping[str, Any], Tensors, str, Tensor], tuple[Tensor, Tensor]]
ROUTERS: Mapping[str, Router] = {"LLaDAMoEModelLM": llada_moe_router, "LLaDA2MoeModelLM": llada2_router}
FORWARDS: Mapping[str, Callable[[Mapping[str, Any], Tensors, Tensor], Tensor]] = {
    "LLaDAModelLM": llada,
    "LLaDAMoEModelLM": llama_like,
    "LLaDA2MoeModelLM": llada2,
    "DreamModel": llama_like,
    "SDARForCausalLM": llama_like,
}

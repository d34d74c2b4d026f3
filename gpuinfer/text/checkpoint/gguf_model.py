"""Opens a GGUF file as a model: its metadata as the config.json that it was made of, its tensors by the names that a
Hugging Face folder has, dequantised as they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.host.machine import cores
from gpuinfer.text.checkpoint.checkpoint import (
    Checkpoint,
    Digests,
    DigestSource,
    LanguageFiles,
    cached_digests,
    tensor_digests,
)
from gpuinfer.text.checkpoint.config_keys import ConfigFields, elsewhere, key_set, shown_value
from gpuinfer.text.checkpoint.gguf_file import GgufFile, GgufTensor, damaged_gguf, gguf_library
from gpuinfer.text.checkpoint.model_family import Biases, shape_of
from gpuinfer.text.checkpoint.tensor_layout import LLAMA, RotaryLayout, StoredTensor, check_store, tensor_parts
from gpuinfer.text.transformer import Rope, Shape

NATIVE = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Architectures as GGUF names them → our families. Mistral and SmolLM2 are "llama"."""
TURNED = ("llama",)  # rows of queries and keys are in the order of pairs that turn together
CHUNK_VALUES = 1 << 16  # that are dequantised at once: what processors cache
FLOATS = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}
HEAD, EMBEDDING, FACTORS = "output.weight", "token_embd.weight", "rope_freqs.weight"
KNOWN = key_set("""
    block_count context_length embedding_length feed_forward_length vocab_size attention.head_count
    attention.head_count_kv attention.key_length attention.value_length attention.layer_norm_rms_epsilon
    rope.freq_base rope.dimension_count rope.scaling.type rope.scaling.factor rope.scaling.original_context_length
    rope.scaling.finetuned rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow tensor_data_layout attention.causal
    """)  # fmt: skip
"""Keys behind the architecture's name that are honoured, or change nothing."""


def is_native_gguf(file: GgufFile) -> bool:
    """Whether a decoder of ours is for the model."""
    return file.architecture in NATIVE and not file.metadata.get(f"{file.architecture}.expert_count")


def open_gguf(file: GgufFile, name: str) -> Checkpoint:
    """The model of a file for which `is_native_gguf`. Weights are not read. Raises `UsageError`."""
    config = config_of_gguf(file)
    shape = _turned_by_factors(shape_of(config, where=str(file.path)), file)
    biases = Biases(*(f"blk.0.{one}.bias" in file.tensors for one in ("attn_q", "attn_output", "ffn_up", "ffn_down")))
    names = gguf_names(file, RotaryLayout(replace(shape, tied=False), biases))
    layout = RotaryLayout(shape, biases)
    store = GgufStore(file, names, shape)
    check_store(store, layout, settings="its header")
    kinds = [one.kind for one in file.tensors.values() if len(one.shape) > 1]
    usual = max(set(kinds), key=kinds.count, default=0)
    return Checkpoint(
        name=name,
        shape=shape,
        folder=None,
        dtype=str(FLOATS.get(usual, torch.float32)).removeprefix("torch."),
        layout=layout,
        store=store,
        language=LanguageFiles(gguf=file),
        identity=file.header_digest,
    )


def shown_architecture(file: GgufFile) -> str:
    mixture = " with experts" if file.metadata.get(f"{file.architecture}.expert_count") else ""
    return f"{file.architecture[:40]}{mixture}"


class GgufFields(ConfigFields):
    """Metadata of one architecture, by keys without its name."""

    def __init__(self, file: GgufFile) -> None:
        self.prefix = f"{file.architecture}."
        own = {key: value for key, value in file.metadata.items() if key.startswith(self.prefix)}
        super().__init__({key.removeprefix(self.prefix): value for key, value in own.items()}, str(file.path))


def config_of_gguf(file: GgufFile) -> dict[str, Any]:
    """What config.json says of the model, without scaling that only the file's tensors tell. Raises `UsageError`."""
    fields = GgufFields(file)
    refuse_unknown_metadata(fields, KNOWN)
    embedding = file.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise damaged_gguf(file.path, f"it has no tensor '{EMBEDDING}'")
    heads = fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", fields.integer("embedding_length") // heads or 1)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            raise elsewhere(f"{file.path}: '{fields.prefix}{key}' is not the {head_dim} values of a head")
    family = NATIVE[file.architecture]
    config: dict[str, Any] = {
        "model_type": family,
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "vocab_size": embedding.shape[0],
        "hidden_size": fields.integer("embedding_length"),
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": fields.number("rope.freq_base", 10_000.0),
        "tie_word_embeddings": HEAD not in file.tensors,
        "hidden_act": "silu",
    }
    for key in ("bos", "eos"):
        config[f"{key}_token_id"] = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    if scaling := rope_scaling_of(fields):
        config["rope_scaling"] = scaling
    if family == "qwen2":
        config["use_sliding_window"] = False
    elif "blk.0.attn_q.bias" in file.tensors:
        config["attention_bias"] = True
    return config


def refuse_unknown_metadata(fields: GgufFields, known: Collection[str]) -> None:
    """Raises `UsageError` for keys of the architecture beside the `known` ones, unless they switch something off."""
    strange = {key: value for key, value in fields.values.items() if key not in known and value not in (0, False, "")}
    if strange:
        shown = ", ".join(f"'{fields.prefix}{key[:60]}': {shown_value(strange[key])}" for key in list(strange)[:3])
        raise elsewhere(f"{fields.where} has {shown}: it may change what the model computes")


def rope_scaling_of(fields: GgufFields) -> dict[str, Any] | None:
    """Positions that are scaled, as config.json says it. Raises `UsageError` for a kind that is not read."""
    kind = fields.text("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise elsewhere(f"{fields.where}: rotary positions of type '{kind[:40]}' are asked for (linear, yarn run here)")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = fields.integer("rope.scaling.original_context_length")
        for name in ("beta_fast", "beta_slow"):
            if fields.has(f"rope.scaling.yarn_{name}"):
                scaling[name] = fields.number(f"rope.scaling.yarn_{name}")
    return scaling


def _turned_by_factors(shape: Shape, file: GgufFile) -> Shape:
    """The shape with angles divided by the file's factors, which is how Llama 3's scaling is stored."""
    factors = file.tensors.get(FACTORS)
    if factors is None or shape.rope is None:
        return shape
    count = len(shape.rope.inverse_frequencies)
    if prod(factors.shape) != count or factors.kind != 0:
        raise damaged_gguf(file.path, f"tensor '{FACTORS}' does not hold {count} numbers")
    divided = torch.tensor(shape.rope.inverse_frequencies) / torch.from_numpy(factors.raw()).view(torch.float32)
    return replace(shape, rope=Rope(tuple(divided.tolist()), shape.rope.attention_factor))


def gguf_names(file: GgufFile, layout: RotaryLayout) -> dict[str, str]:
    """The file's name of each tensor, by the name in a Hugging Face folder. Those that the layout does not have keep
    their own; a tensor with factors of rotary positions is left out.
    """
    gguf = gguf_library()
    [architecture] = [one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture]
    known = gguf.get_tensor_name_map(architecture, layout.shape.layers)
    found: dict[str, str] = {}
    for part in tensor_parts(layout):
        stem, _, ending = part.name.rpartition(".")
        own = f"{known.get_name(stem)}.{ending}"
        if own in file.tensors:
            found[part.name] = own
    others = file.tensors.keys() - set(found.values()) - {FACTORS}
    return found | {name: name for name in others}


class GgufStore:
    """Tensors by the names of a Hugging Face folder."""

    def __init__(self, file: GgufFile, names: Mapping[str, str], shape: Shape) -> None:
        self.where = str(file.path)
        self._file, self._shape = file, shape
        self._places = {name: file.tensors[own] for name, own in names.items()}
        self._turned = file.architecture in TURNED
        self.tensors = {
            name: StoredTensor(place.shape, FLOATS.get(place.kind, torch.float32))
            for name, place in self._places.items()
        }

    def read(self, name: str, into: Tensor) -> None:
        place, heads = self._places[name], self._heads(name)
        stored = torch.empty_like(into) if heads else into
        fill_dequantised(place, stored.view(-1, stored.shape[-1]), self._file.path)
        if heads:
            into.copy_(halves_together(stored, heads))

    def _heads(self, name: str) -> int:
        """Of queries and keys whose rows are stored in another order; else 0."""
        if not self._turned:
            return 0
        query, key, _ = LLAMA.qkv
        if f".{query}." in name:
            return self._shape.heads
        return self._shape.kv_heads if f".{key}." in name else 0

    def digests(self, names: Collection[str]) -> Digests:
        """Those of a whole file are kept until it changes."""

        def compute() -> Digests:
            return tensor_digests(
                {name: DigestSource(self._places[name].size, self._places[name].raw) for name in names}
            )

        kept = len(names) == len(self._places) and len(self._file.paths) == 1
        return cached_digests(self._file.path, names, compute) if kept else compute()


def halves_together(stored: Tensor, heads: int) -> Tensor:
    """Queries or keys as a Hugging Face folder has them, of rows in which the two of a head that turn together follow
    one another.
    """
    half = stored.shape[0] // heads // 2
    return stored.view(heads, half, 2, -1).swapaxes(1, 2).reshape(stored.shape)


def fill_dequantised(place: GgufTensor, into: Tensor, path: Path) -> None:
    """Fill `into` [rows, columns], in its own dtype, from a tensor of as many values; on all cores.

    Raises `UsageError` for a type that the installed gguf library does not dequantise.
    """
    if place.kind in FLOATS:
        into.copy_(torch.from_numpy(place.raw()).view(FLOATS[place.kind]).view(into.shape))
        return
    decode, block, block_bytes = _block_decoder(place.kind, path)
    rows, columns = into.shape
    some = max(1, CHUNK_VALUES // columns)  # rows
    row_bytes = columns // block * block_bytes

    def fill(start: int) -> None:
        part = into[start : start + some]
        blocks = place.raw(start * row_bytes, part.shape[0] * row_bytes).reshape(-1, block_bytes)
        part.copy_(torch.from_numpy(decode(blocks)).view(part.shape))

    starts = range(0, rows, some)
    if len(starts) == 1:
        fill(0)
        return
    with ThreadPoolExecutor(min(cores(), len(starts)), "gpuinfer-gguf") as pool:
        for _ in pool.map(fill, starts):
            pass


def _block_decoder(kind: int, path: Path) -> tuple[Callable[[Any], Any], int, int]:
    """The function from uint8 [blocks, bytes] to float32 [blocks, values], and a block's values and bytes."""
    gguf = gguf_library()
    form = gguf.GGMLQuantizationType(kind)
    quant = getattr(gguf.quants, form.name, None)
    if quant is None:
        raise UsageError(
            f"{path} holds tensors of type {form.name}, which the installed gguf library does not dequantise. Get a "
            "newer one (pip install --upgrade gguf), or a file in Q8_0, Q4_K_M or another common type."
        )
    quant.init_grid()
    return quant.dequantize_blocks, *gguf.GGML_QUANT_SIZES[form]

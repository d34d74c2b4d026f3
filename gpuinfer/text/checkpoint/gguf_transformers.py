"""GGUF files of families that transformers' own code computes: Gemma 3. Their metadata become transformers'
configuration, their tensors its state, dequantised by us.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.checkpoint import Digests, DigestSource, LanguageFiles, cached_digests, tensor_digests
from gpuinfer.text.checkpoint.config_keys import key_set
from gpuinfer.text.checkpoint.gguf_file import GgufFile, damaged_gguf, gguf_library
from gpuinfer.text.checkpoint.gguf_model import (
    KNOWN,
    GgufFields,
    fill_dequantised,
    refuse_unknown_metadata,
    shown_architecture,
)
from gpuinfer.text.checkpoint.model_family import Biases
from gpuinfer.text.checkpoint.tensor_layout import RotaryLayout, StoredTensor
from gpuinfer.text.checkpoint.transformers_folder import TransformersCheckpoint, shape_of_traced
from gpuinfer.text.checkpoint.transformers_trace import first_words, need_transformers, quiet, traced

HEAD, EMBEDDING = "output.weight", "token_embd.weight"
GEMMA3_LAYERS_27B, GEMMA3_PATTERN, GEMMA3_LOCAL_BASE = 62, 6, 10_000.0  # Gemma team 2025, and its published configs
GEMMA3_KEYS = KNOWN | key_set("attention.sliding_window rope.freq_base_swa final_logit_softcapping")


def gemma3_config(file: GgufFile) -> dict[str, Any]:
    """Each sixth layer attends to all positions, the others to a window, with angles of their own."""
    fields = GgufFields(file)
    refuse_unknown_metadata(fields, GEMMA3_KEYS)
    layers, hidden = fields.integer("block_count"), fields.integer("embedding_length")
    heads, head_dim = fields.integer("attention.head_count"), fields.integer("attention.key_length", 256)
    whole: dict[str, Any] = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base", 1_000_000.0)}
    if fields.text("rope.scaling.type", "none") == "linear":
        whole |= {"rope_type": "linear", "factor": fields.number("rope.scaling.factor")}
    local = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", GEMMA3_LOCAL_BASE)}
    full = [(layer + 1) % GEMMA3_PATTERN == 0 for layer in range(layers)]
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": file.tensors[EMBEDDING].shape[0],
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "query_pre_attn_scalar": hidden // heads if layers == GEMMA3_LAYERS_27B else head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", 1e-6),
        "sliding_window": fields.integer("attention.sliding_window"),
        "layer_types": ["full_attention" if one else "sliding_attention" for one in full],
        "rope_parameters": {"full_attention": whole, "sliding_attention": local},
        "final_logit_softcapping": fields.number("final_logit_softcapping", 0.0, above=-1.0) or None,
        "tie_word_embeddings": HEAD not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }


CONFIGS: Mapping[str, Callable[[GgufFile], dict[str, Any]]] = {"gemma3": gemma3_config}
RAISED_NORMS = ("gemma3",)  # families whose norms are stored plus one


class GgufDigests:
    """`Store` of a file of which only digests are wanted."""

    tensors: Mapping[str, StoredTensor] = {}

    def __init__(self, file: GgufFile) -> None:
        self.where, self._file = str(file.path), file

    def read(self, name: str, into: Tensor) -> None:
        raise UsageError(f"{self.where}: '{name}' belongs to transformers' model. Use -B decoder=transformers.")

    def digests(self, names: Collection[str]) -> Digests:
        """Of all tensors, by their names in the file."""
        file = self._file

        def compute() -> Digests:
            return tensor_digests({name: DigestSource(one.size, one.raw) for name, one in file.tensors.items()})

        return cached_digests(file.path, file.tensors, compute) if len(file.paths) == 1 else compute()


def open_gguf_with_transformers(file: GgufFile, name: str) -> TransformersCheckpoint:
    """Weights are not read. Raises `UsageError` for an architecture that does not run here."""
    if file.architecture not in CONFIGS:
        raise UsageError(
            f"{file.path} is a model of architecture '{shown_architecture(file)}', which is not read from GGUF files "
            "here. Give the original Hugging Face folder: its family may be known."
        )
    if EMBEDDING not in file.tensors:
        raise damaged_gguf(file.path, f"it has no tensor '{EMBEDDING}'")
    values = CONFIGS[file.architecture](file)
    need_transformers()
    from transformers import AutoConfig

    make: Any = AutoConfig
    try:
        with quiet():
            config = make.for_model(values.pop("model_type"), **values)
    except Exception as error:  # noqa: BLE001  checks of its own, of any kind
        raise damaged_gguf(file.path, f"transformers rejects its settings: {first_words(error)}") from None
    found = traced(config)
    shape = shape_of_traced(found, {})
    return TransformersCheckpoint(
        name=name,
        shape=shape,
        folder=None,
        dtype="float32",
        layout=RotaryLayout(shape, Biases()),
        store=GgufDigests(file),
        language=LanguageFiles(gguf=file),
        identity=file.header_digest,
        traced=found,
        weights_from=file.path,
        state=partial(gguf_state, file, config),
    )


def gguf_state(file: GgufFile, config: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The state of transformers' model of this config: of each tensor the values of the file, in `dtype`.

    Raises `UsageError` for tensors that are missing or of another shape.
    """
    from transformers import AutoModelForCausalLM

    make: Any = AutoModelForCausalLM
    gguf = gguf_library()
    [architecture] = [one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture]
    known = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    with quiet(), torch.device("meta"):
        wanted = make.from_config(config).state_dict()
    found = {}
    for name, empty in wanted.items():
        stem, _, ending = name.rpartition(".")
        own = f"{known.get_name(stem)}.{ending}"
        if own == HEAD and config.tie_word_embeddings:
            continue
        place = file.tensors.get(own)
        if place is None or place.shape != tuple(empty.shape):
            shown = "is missing" if place is None else f"is {list(place.shape)}"
            raise damaged_gguf(file.path, f"tensor '{own}' {shown}, where its header makes it {list(empty.shape)}")
        whole = file.architecture in RAISED_NORMS and stem.endswith("norm")
        into = torch.empty(place.shape, dtype=torch.float32 if whole else dtype)
        fill_dequantised(place, into.view(-1, into.shape[-1]), file.path)
        found[name] = (into - 1.0).to(dtype) if whole else into
    return found

"""GGUF files of families that transformers' own code computes, by `ARCHITECTURES`. Their metadata become transformers'
configuration, their tensors its state, dequantised by us.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.checkpoint import Digests, DigestSource, LanguageFiles, cached_digests, tensor_digests
from gpuinfer.text.checkpoint.config_keys import elsewhere, key_set
from gpuinfer.text.checkpoint.gguf_file import GgufFile, GgufTensor, damaged_gguf, gguf_library
from gpuinfer.text.checkpoint.gguf_model import (
    EMBEDDING,
    FACTORS,
    FLOATS,
    HEAD,
    KNOWN,
    GgufFields,
    config_of_gguf,
    fill_dequantised,
    halves_together,
    is_native_gguf,
    refuse_unknown_metadata,
    rope_scaling_of,
    shown_architecture,
)
from gpuinfer.text.checkpoint.model_family import Biases
from gpuinfer.text.checkpoint.tensor_layout import RotaryLayout, StoredTensor
from gpuinfer.text.checkpoint.transformers_folder import TransformersCheckpoint, shape_of_traced
from gpuinfer.text.checkpoint.transformers_trace import first_words, need_transformers, quiet, traced

Config = dict[str, Any]
TURNING = "rope.dimension_count"
LONG_FACTORS = "rope_factors_"
EXPERT_KEYS = key_set("""
    expert_count expert_used_count expert_feed_forward_length expert_shared_feed_forward_length expert_shared_count
    """)  # fmt: skip


def usual_config(
    file: GgufFile, family: str, more: Collection[str] = (), eps: str = "layer_norm_rms_epsilon"
) -> Config:
    """What nearly all families have. `more`: keys that the caller reads. Raises `UsageError` for others."""
    fields = GgufFields(file)
    refuse_unknown_metadata(fields, {*KNOWN, *more, f"attention.{eps}"})
    heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden // heads or 1)
    for key in {"attention.value_length", TURNING} - {*more}:
        if fields.integer(key, head_dim) != head_dim:
            raise elsewhere(f"{file.path}: '{fields.prefix}{key}' is not the {head_dim} values of a head")
    if FACTORS in file.tensors:
        raise elsewhere(f"{file.path} scales its positions by a tensor, '{FACTORS}', which transformers' code does not")
    rope: Config = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base", 10_000.0)}
    return {
        "model_type": family,
        "vocab_size": file.tensors[EMBEDDING].shape[0],
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number(f"attention.{eps}", 1e-6),
        "rope_parameters": rope | (rope_scaling_of(fields) or {}),
        "tie_word_embeddings": HEAD not in file.tensors,
        "pad_token_id": None,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }


def experts_config(file: GgufFile, family: str) -> Config:
    """`usual_config` of a mixture of experts."""
    config, fields = usual_config(file, family, EXPERT_KEYS), GgufFields(file)
    return config | {
        "num_experts": fields.integer("expert_count"),
        "num_local_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
    }


def mixtral_config(file: GgufFile) -> Config:
    return experts_config(file, "mixtral") | {"sliding_window": None}


def qwen_moe_config(file: GgufFile, family: str, *, normalised: bool) -> Config:
    """`normalised`: the shares of the chosen experts sum to one, as llama.cpp has it for the family."""
    fields, config = GgufFields(file), experts_config(file, family)
    inner = fields.integer("expert_feed_forward_length", config["intermediate_size"])
    shared = file.tensors.get("blk.0.ffn_up_shexp.weight")
    return config | {
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner if shared is None else shared.shape[0],
        "norm_topk_prob": normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


def phi3_config(file: GgufFile) -> Config:
    """Long contexts have two tensors of factors, as transformers' LongRoPE has them (Ding et al. 2024)."""
    fields = GgufFields(file)
    config = usual_config(file, "phi3", key_set(f"{TURNING} attention.sliding_window rope.scaling.attn_factor"))
    window, factor = "attention.sliding_window", "rope.scaling.attn_factor"
    rope, head_dim = config["rope_parameters"], config.pop("head_dim")
    rope["partial_rotary_factor"] = fields.integer(TURNING, head_dim) / head_dim
    factors = {end: file.tensors.get(f"{LONG_FACTORS}{end}.weight") for end in ("long", "short")}
    if any(one is not None for one in factors.values()):
        original = fields.integer("rope.scaling.original_context_length")
        config["original_max_position_embeddings"] = original
        rope |= {f"{end}_factor": _floats(file, f"{LONG_FACTORS}{end}.weight", one) for end, one in factors.items()}
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        if fields.has(factor):
            rope["attention_factor"] = fields.number(factor)
    return config | {
        "rope_parameters": rope,
        "sliding_window": fields.integer(window, least=0) or None if fields.has(window) else None,
    }


def starcoder2_config(file: GgufFile) -> Config:
    config = usual_config(file, "starcoder2", eps="layer_norm_epsilon")
    biases = "blk.0.attn_q.bias" in file.tensors
    return config | {"norm_epsilon": config.pop("rms_norm_eps"), "use_bias": biases, "sliding_window": None}


GRANITE = {  # in the file → of transformers
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def granite_config(file: GgufFile) -> Config:
    config, fields = usual_config(file, "granite", GRANITE), GgufFields(file)
    given = {own: fields.number(key) for key, own in GRANITE.items() if fields.has(key)}
    return config | {"attention_multiplier": config["head_dim"] ** -0.5, **given}


def olmo2_config(file: GgufFile) -> Config:
    return usual_config(file, "olmo2")


GEMMA2_LAYERS_27B, GEMMA3_LAYERS_27B, GEMMA3_PATTERN = 46, 62, 6  # Gemma team 2024, 2025, and their published configs
GEMMA3_LOCAL_BASE = 10_000.0


def gemma_config(file: GgufFile, family: str, more: str, *, large: int, cap: float) -> Config:
    """`large`: layers of the model whose queries are scaled by a head's share of the row; `cap`: of logits where the
    file says none, 0 for no cap.
    """
    fields = GgufFields(file)
    config = usual_config(file, family, key_set(f"attention.sliding_window final_logit_softcapping {more}"))
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = fields.integer("attention.key_length", 256)
    return config | {
        "head_dim": head_dim,
        "query_pre_attn_scalar": hidden // heads if config["num_hidden_layers"] == large else head_dim,
        "sliding_window": fields.integer("attention.sliding_window"),
        "final_logit_softcapping": fields.number("final_logit_softcapping", cap, above=-1.0) or None,
    }


def gemma2_config(file: GgufFile) -> Config:
    config = gemma_config(file, "gemma2", "attn_logit_softcapping", large=GEMMA2_LAYERS_27B, cap=30.0)
    cap = GgufFields(file).number("attn_logit_softcapping", 50.0, above=-1.0) or None
    return config | {"attn_logit_softcapping": cap}


def gemma3_config(file: GgufFile) -> Config:
    """Each sixth layer attends to all positions, the others to a window, with angles of their own."""
    fields = GgufFields(file)
    config = gemma_config(file, "gemma3_text", "rope.freq_base_swa", large=GEMMA3_LAYERS_27B, cap=0.0)
    whole: Config = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base", 1_000_000.0)}
    if fields.text("rope.scaling.type", "none") == "linear":
        whole |= {"rope_type": "linear", "factor": fields.number("rope.scaling.factor")}
    local = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", GEMMA3_LOCAL_BASE)}
    full = [(layer + 1) % GEMMA3_PATTERN == 0 for layer in range(config["num_hidden_layers"])]
    return config | {
        "layer_types": ["full_attention" if one else "sliding_attention" for one in full],
        "rope_parameters": {"full_attention": whole, "sliding_attention": local},
    }


def native_config(file: GgufFile) -> Config:
    """Of a family that a decoder of ours is for too."""
    if FACTORS in file.tensors:
        raise elsewhere(f"{file.path} scales its positions by a tensor, '{FACTORS}', which transformers' code does not")
    config = config_of_gguf(file)
    rope: Config = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    return config | {"rope_parameters": rope | config.pop("rope_scaling", {})}


@dataclass(frozen=True)
class GgufArchitecture:
    """`config`: transformers' configuration of a file. `raised`: norms are stored plus one; `turned`: rows of queries
    and keys are stored by the pairs that turn together, as llama.cpp's converter writes Llama's.
    """

    config: Callable[[GgufFile], Config]
    raised: bool = False
    turned: bool = False


MIXTURE = "llama with experts"
ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "gemma2": GgufArchitecture(gemma2_config, raised=True),
    "gemma3": GgufArchitecture(gemma3_config, raised=True),
    "granite": GgufArchitecture(granite_config, turned=True),
    "llama": GgufArchitecture(native_config, turned=True),
    MIXTURE: GgufArchitecture(mixtral_config, turned=True),
    "olmo2": GgufArchitecture(olmo2_config),
    "phi3": GgufArchitecture(phi3_config),
    "qwen2": GgufArchitecture(native_config),
    "qwen2moe": GgufArchitecture(partial(qwen_moe_config, family="qwen2_moe", normalised=False)),
    "qwen3": GgufArchitecture(native_config),
    "qwen3moe": GgufArchitecture(partial(qwen_moe_config, family="qwen3_moe", normalised=True)),
    "starcoder2": GgufArchitecture(starcoder2_config),
}


def kind_of_gguf(file: GgufFile) -> str:
    """As in `ARCHITECTURES`: the architecture, or Llama's structure with experts."""
    mixed = file.architecture == "llama" and not is_native_gguf(file)
    return MIXTURE if mixed else file.architecture


def _floats(file: GgufFile, name: str, place: GgufTensor | None) -> list[float]:
    if place is None or place.kind not in FLOATS:
        raise damaged_gguf(file.path, f"tensor '{name}' is missing, or holds no numbers")
    found: list[float] = torch.from_numpy(place.raw()).view(FLOATS[place.kind]).tolist()
    return found


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
    kind = kind_of_gguf(file)
    if kind not in ARCHITECTURES:
        raise UsageError(
            f"{file.path} is a model of architecture '{shown_architecture(file)}', which is not read from GGUF files "
            f"here ({', '.join(sorted(ARCHITECTURES))} are). Give the original Hugging Face folder: its family may be "
            "known."
        )
    if EMBEDDING not in file.tensors:
        raise damaged_gguf(file.path, f"it has no tensor '{EMBEDDING}'")
    values = ARCHITECTURES[kind].config(file)
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

    Raises `UsageError` for tensors that are missing, of another shape, or not the model's.
    """
    from transformers import AutoModelForCausalLM

    make: Any = AutoModelForCausalLM
    own = ARCHITECTURES[kind_of_gguf(file)]
    with quiet(), torch.device("meta"):
        wanted = make.from_config(config).state_dict()
    if config.tie_word_embeddings:
        wanted.pop("lm_head.weight", None)
    names, found = _names_in_file(file, wanted, config.num_hidden_layers), dict[str, Tensor]()
    read = {part for parts in names.values() for part in parts}
    if spare := sorted(name for name in file.tensors.keys() - read if not name.startswith(LONG_FACTORS)):
        raise elsewhere(f"{file.path}: tensor '{spare[0][:80]}' is not part of a {config.model_type} model")
    for name, empty in wanted.items():
        stem, _, _ = name.rpartition(".")
        parts, whole = names[name], own.raised and stem.endswith("norm")
        places = [_place_of(file, part, (*empty.shape[:-2], *_share(empty, len(parts)))) for part in parts]
        into = torch.empty(empty.shape, dtype=torch.float32 if whole else dtype)
        if len(places) == 1:
            fill_dequantised(places[0], into.view(-1, into.shape[-1]), file.path)
        else:  # of each expert, what goes into its gate and what is multiplied with that
            for place, half in zip(places, into.chunk(len(places), dim=-2), strict=True):
                one = torch.empty(place.shape, dtype=dtype)
                fill_dequantised(place, one.view(-1, one.shape[-1]), file.path)
                half.copy_(one)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(stem.split(".")[-1])
        if own.turned and heads:
            into = halves_together(into, heads)
        found[name] = (into - 1.0).to(dtype) if whole else into
    return found


GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
OF_EXPERTS = {GATE_UP: ("ffn_gate_exps", "ffn_up_exps"), DOWN: ("ffn_down_exps",)}  # all experts in one tensor


def _names_in_file(file: GgufFile, names: Collection[str], layers: int) -> dict[str, list[str]]:
    """The tensors that a tensor of transformers' is made of: one, or two that are joined."""
    gguf = gguf_library()
    [architecture] = [one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture]
    known = gguf.get_tensor_name_map(architecture, layers)
    found = {}
    for name in names:
        stem, _, ending = name.rpartition(".")
        prefix, _, rest = name.removeprefix("model.layers.").partition(".")
        parts = OF_EXPERTS.get(rest)
        found[name] = (
            [f"{known.get_name(stem)}.{ending}"] if parts is None else [f"blk.{prefix}.{one}.weight" for one in parts]
        )
    return found


def _share(tensor: Tensor, parts: int) -> tuple[int, ...]:
    """The last two sizes of one of so many equal parts, which are joined in the last but one."""
    rows = tuple(tensor.shape[-2:])
    return rows if parts == 1 else (rows[0] // parts, rows[1])


def _place_of(file: GgufFile, name: str, shape: tuple[int, ...]) -> GgufTensor:
    place = file.tensors.get(name)
    flat = (1, *place.shape) if place is not None and len(place.shape) + 1 == len(shape) else None  # a lone row
    if place is None or shape not in (place.shape, flat):
        shown = "is missing" if place is None else f"is {list(place.shape)}"
        raise damaged_gguf(file.path, f"tensor '{name}' {shown}, where its header makes it {list(shape)}")
    return place

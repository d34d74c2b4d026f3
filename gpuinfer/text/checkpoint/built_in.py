"""Models without files: "tiny", "tiny-llada" and others, whose weights are drawn, and "null", which computes nothing.

Built-in models and models in training can be written as Hugging Face folders for other programs.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.checkpoint import Checkpoint, LanguageFiles
from gpuinfer.text.checkpoint.config_keys import MASKED, ConfigFields
from gpuinfer.text.checkpoint.gguf_model import config_of_gguf
from gpuinfer.text.checkpoint.model_family import Biases, masking_of, shape_of
from gpuinfer.text.checkpoint.rotary_family import rope_of
from gpuinfer.text.checkpoint.tensor_layout import RotaryLayout, StoredTensor, names_of, tensor_parts
from gpuinfer.text.transformer import Experts, Shape


@dataclass(frozen=True)
class Recipe:
    """How weights are drawn: standard deviations of normal distributions, and the logit offset of silent tokens."""

    embedding: float = 0.5  # large beside the layers' output: the last token matters most, answers do not repeat
    layers: float = 0.05
    looks: float | None = None  # of queries and keys: how uneven attention is; None: as the layers
    head: float = 0.1  # logits some 1.5 apart
    silence: float = -128.0


class DrawnStore:
    """Norms are ones, biases zeros, matrices normal.

    The first hidden value is one in every embedding, and no layer writes to it. Through it the head gives all tokens
    but the `speakable` ones a very low logit, for any prompt.
    """

    def __init__(
        self, where: str, layout: RotaryLayout, speakable: Sequence[int], recipe: Recipe | None = None
    ) -> None:
        self.where, self._speakable = where, list(speakable)
        self._recipe, self._names = recipe or Recipe(), layout.names
        self.tensors = {part.name: StoredTensor(part.shape, torch.float32) for part in tensor_parts(layout)}

    def read(self, name: str, into: Tensor) -> None:
        if into.dim() == 1:
            into.fill_(0.0 if name.endswith("bias") else 1.0)
            return
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))  # values do not depend on the read order
        drawn, names, recipe = torch.empty(tuple(into.shape)), self._names, self._recipe
        if name == names.embedding_of(names.prefix):
            drawn.normal_(0.0, recipe.embedding, generator=generator)[:, 0] = 1.0
        elif name == names.head_of(names.prefix):
            drawn.normal_(0.0, recipe.head, generator=generator)[:, 0] = recipe.silence
            drawn[self._speakable, 0] = 0.0
        else:
            attends = recipe.looks is not None and name.endswith(tuple(f"{one}.weight" for one in names.qkv[:-1]))
            drawn.normal_(0.0, (attends and recipe.looks) or recipe.layers, generator=generator)
            if name.endswith((f"{names.out}.weight", f"{names.down}.weight")):
                drawn[0] = 0.0
        into.copy_(drawn)

    def digests(self, names: Collection[str]) -> dict[str, bytes]:
        """Digests of the recipe, whose names of fields are part of them, not of the values."""
        return dict.fromkeys(names, f"drawn by torch {torch.__version__}, {self._speakable}, {self._recipe}".encode())


END = 256  # tokens 0 to 255 are bytes
SPEAKABLE = (ord("\n"), *range(ord(" "), 127), END)  # tokens of answers, unless a constraint allows only others
TINY_POSITIONS = 2048
TEMPLATE = (  # of chats: a line for each message
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_shape() -> Shape:
    """The vocabulary is larger than the bytes, as a tokenizer's would be; the other tokens are never drawn."""
    return Shape(
        family="qwen2",
        vocabulary=1024,
        hidden=256,
        layers=6,
        heads=8,
        kv_heads=4,
        head_dim=32,
        intermediate=768,
        positions=TINY_POSITIONS,
        rope=rope_of(ConfigFields({}), 32, TINY_POSITIONS)[0],
        end_tokens=(END,),
    )


def tiny_masked_shape(family: str, **more: Any) -> Shape:
    """A diffusion model of this family: small, as each step may compute a whole answer."""
    shape = Shape(
        family=family,
        vocabulary=384,
        hidden=128,
        layers=2,
        heads=4,
        kv_heads=4,
        head_dim=32,
        intermediate=256,
        positions=1024,
        qk_norm=family in ("llada-moe", "llada2", "sdar"),
        rope=rope_of(ConfigFields({}), 32, 1024)[0],
        end_tokens=(END,),
        masking=masking_of(family, END + 1),
    )
    return replace(shape, **more)


def tiny_llada2_shape() -> Shape:
    """The first layer is dense, the others have a shared expert; half of each head is rotated."""
    rope = rope_of(ConfigFields({"partial_rotary_factor": 0.5}), 32, 1024, partial=True)[0]
    experts = Experts(8, 2, 64, 64, (0,), "sigmoid", normalised=True, scale=2.5, groups=4, groups_chosen=2)
    return tiny_masked_shape("llada2", layers=3, kv_heads=2, rope=rope, experts=experts)


BUILT_IN: Mapping[str, Callable[[], Shape]] = {
    "tiny": tiny_shape,
    "tiny-llada": lambda: tiny_masked_shape("llada"),
    "tiny-llada-moe": lambda: tiny_masked_shape("llada-moe", experts=Experts(count=8, chosen=2, intermediate=64)),
    "tiny-llada2": tiny_llada2_shape,
    "tiny-dream": lambda: tiny_masked_shape("dream"),
    "tiny-sdar": lambda: tiny_masked_shape("sdar", kv_heads=2),
    "null": lambda: Shape(
        "null", END + 1, 1, 0, 1, 1, 1, 1, 1 << 17, tied=True, end_tokens=(END,)
    ),  # no layer to cache
}
MASKED_RECIPE = Recipe(layers=0.2, looks=0.12, head=0.55, silence=-512.0)
"""Layers with a larger output, so that masks, whose embeddings are equal, become different tokens; attention not so
uneven that float32 lacks digits; a head so steep that some steps are sure of several tokens.
"""


def open_builtin(name: str) -> Checkpoint:
    """`name` is one of BUILT_IN. The weights are drawn, the same in every process."""
    shape = BUILT_IN[name]()
    names = names_of(shape.family)
    layout = RotaryLayout(shape, Biases(qkv=shape.family in ("qwen2", "dream")), names.prefix, None, names)
    store = DrawnStore(name, layout, SPEAKABLE, None if shape.masking is None else MASKED_RECIPE)
    return Checkpoint(
        name=name,
        shape=layout.shape,
        folder=None,
        dtype="float32",
        layout=layout,
        store=store,
        language=LanguageFiles(bytes=True, template=TEMPLATE),
    )


def save_folder(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write config.json, generation_config.json and model.safetensors: of a built-in model without a tokenizer, as
    prompts are sent as tokens; of a model in training with all settings of its base model; of a GGUF file dequantised,
    without its tokenizer.

    Raises `UsageError` for any other model.
    """
    shape, base = checkpoint.shape, checkpoint.language.folder
    in_training = checkpoint.folder is None and base is not None and shape.family != "nanogpt"
    file = checkpoint.language.gguf
    if file is not None:
        config = config_of_gguf(file)
        if shape_of(config).rope != shape.rope:
            raise UsageError(
                f"{file.path} turns positions in a way that no config.json can say. Use the original folder."
            )
    elif not in_training and (checkpoint.folder is not None or shape.family not in CONFIGS):
        raise UsageError(f"model '{checkpoint.name}' is not one that can be written out. Use 'tiny'.")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for part in tensor_parts(checkpoint.layout):
        tensors[part.name] = torch.empty(part.shape, dtype=dtype)
        checkpoint.store.read(part.name, tensors[part.name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if in_training:
        for path in checkpoint.settings:
            shutil.copyfile(path, folder / path.name)
        return
    written = config_of(checkpoint, dtype) if file is None else config
    (folder / "config.json").write_text(json.dumps(written, indent=2))
    ends = {"eos_token_id": list(checkpoint.shape.end_tokens)}
    (folder / "generation_config.json").write_text(json.dumps(ends))


def config_of(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Any]:
    shape = checkpoint.shape
    config = {
        "vocab_size": shape.vocabulary,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": 10_000.0,
        "eos_token_id": shape.end_tokens[0],
        "bos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **CONFIGS[shape.family](shape),
    }
    if shape.masking is None:
        return {"model_type": shape.family, "architectures": ["Qwen2ForCausalLM"], **config}
    own = MASKED[shape.family]
    masked = {
        "model_type": own.types[0],
        "architectures": [own.architecture],
        "mask_token_id": shape.masking.mask_token,
    }
    return {**masked, **config}


def _usual(shape: Shape, intermediate: str = "intermediate_size") -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        intermediate: shape.intermediate,
        "max_position_embeddings": shape.positions,
        "hidden_act": shape.activation,
        "tie_word_embeddings": shape.tied,
    }


def _llada(shape: Shape) -> dict[str, Any]:
    return {
        "d_model": shape.hidden,
        "n_layers": shape.layers,
        "n_heads": shape.heads,
        "n_kv_heads": shape.kv_heads,
        "mlp_hidden_size": shape.intermediate,
        "embedding_size": shape.vocabulary,
        "max_sequence_length": shape.positions,
        "activation_type": shape.activation,
        "block_type": "llama",
        "layer_norm_type": "rms",
        "include_bias": False,
        "weight_tying": shape.tied,
    }


def _llada_moe(shape: Shape) -> dict[str, Any]:
    experts = shape.experts or Experts(0, 0, 0)
    return {
        **_usual(shape, "dense_intermediate_size"),
        "head_dim": shape.head_dim,
        "qk_layernorm": shape.qk_norm,
        "expert_intermediate_size": experts.intermediate,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "moe_layer_freq": [int(layer not in experts.dense) for layer in range(shape.layers)],
    }


def _llada2(shape: Shape) -> dict[str, Any]:
    experts = shape.experts or Experts(0, 0, 0)
    turned = 2 * len(shape.rope.inverse_frequencies) if shape.rope else 0
    return {
        **_usual(shape),
        "head_dim": shape.head_dim,
        "partial_rotary_factor": turned / shape.head_dim,
        "rotary_dim": turned,
        "use_bias": False,
        "moe_intermediate_size": experts.intermediate,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "num_shared_experts": experts.shared // experts.intermediate,
        "first_k_dense_replace": len(experts.dense),
        "n_group": experts.groups,
        "topk_group": experts.groups_chosen,
        "routed_scaling_factor": experts.scale,
        "score_function": "sigmoid",
        "norm_topk_prob": True,
        "use_qk_norm": True,
    }


CONFIGS: Mapping[str, Callable[[Shape], dict[str, Any]]] = {
    "qwen2": _usual,
    "llada": _llada,
    "llada-moe": _llada_moe,
    "llada2": _llada2,
    "dream": _usual,
    "sdar": lambda shape: {
        **_usual(shape),
        "head_dim": shape.head_dim,
        "block_size": shape.masking and shape.masking.block,
    },
}

"""Models that are not for this backend: what they are, and where they do run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuinfer.errors import UsageError
from gpuinfer.models.text.checkpoint.fields import Fields

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
ALIASES = {"ministral": "mistral"}  # what transformers calls a Mistral whose layers are of two kinds
GENERATORS = ("ForCausalLM", "LMHeadModel", "Model")  # how transformers ends the names of what can generate


def elsewhere(what: str) -> UsageError:
    return UsageError(f"{what}, which the inprocess and central backends do not do. Use --backend vllm.")


def refuse_remote_code(settings: Mapping[str, Any], where: str) -> None:
    """Code of a model's own never runs here, whoever trusts it."""
    if settings.get("auto_map"):
        raise UsageError(
            f"{where} asks to run code of its own (auto_map), which is refused. If you trust it: "
            "--backend vllm --trust-remote-code."
        )


def family_of(kind: str) -> str:
    """The family that a model_type is of."""
    return ALIASES.get(kind, kind)


def refuse_unknown(config: Fields) -> str:
    """The family's name. Raises `UsageError` for a model that is none of ours."""
    refuse_remote_code(config.values, config.where)
    kind = config.values.get("model_type")
    if not isinstance(kind, str):
        raise UsageError(
            f"{config.where} does not say its model_type. Save the model again with transformers "
            f"(save_pretrained); these run here: {', '.join(FAMILIES)}."
        )
    if family_of(kind) not in FAMILIES:
        raise elsewhere(f"the model is of type '{kind[:40]}' ({', '.join(FAMILIES)} run here)")
    if config.has("quantization_config"):
        method = config.mapping("quantization_config").get("quant_method", "an unnamed method")
        raise elsewhere(f"the weights are quantised ({str(method)[:40]})")
    if any(config.values.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise elsewhere("the model is a mixture of experts")
    for name in config.texts("architectures"):
        if not name.endswith(GENERATORS):
            raise elsewhere(f"the model is a {name[:60]}, not a plain generator of text")
    return family_of(kind)

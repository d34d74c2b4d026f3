"""How far back each layer looks."""

from __future__ import annotations

from gpuinfer.errors import UsageError
from gpuinfer.models.text.checkpoint.fields import Fields
from gpuinfer.models.text.checkpoint.refusals import elsewhere

FULL, SLIDING = "full_attention", "sliding_attention"


def windows_of(family: str, config: Fields, layers: int) -> tuple[int | None, ...]:
    """For each layer the number of positions that it sees, itself included; None: all. Empty: all layers see all."""
    if family == "mistral":
        window = config.integer("sliding_window", 4096) if config.values.get("sliding_window", 4096) else None
        return () if window is None else (window,) * layers
    if family not in ("qwen2", "qwen3"):
        return ()
    window = config.integer("sliding_window", 4096) if config.flag("use_sliding_window", False) else None
    if window is None and SLIDING in config.texts("layer_types"):
        raise UsageError(
            f"{config.where}: layer_types names sliding layers, but use_sliding_window is false. Mend one of them."
        )
    kinds = _kinds(config, layers)
    windows = tuple(window if kind == SLIDING else None for kind in kinds)
    return windows if any(windows) else ()


def _kinds(config: Fields, layers: int) -> tuple[str, ...]:
    """Each layer's kind: as listed, or sliding from layer `max_window_layers` on."""
    if listed := config.texts("layer_types"):
        if len(listed) != layers:
            raise UsageError(
                f"{config.where}: layer_types names {len(listed)} layers, num_hidden_layers says {layers}. "
                "Mend one of them."
            )
        if strange := set(listed) - {FULL, SLIDING}:
            raise elsewhere(f"layers of kind '{min(strange)[:40]}' are asked for")
        return listed
    first = config.integer("max_window_layers", 28, least=0)
    return tuple(SLIDING if layer >= first else FULL for layer in range(layers))

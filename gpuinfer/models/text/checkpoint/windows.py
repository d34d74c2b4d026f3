"""How far back each layer looks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpuinfer.errors import UsageError
from gpuinfer.models.text.checkpoint.fields import Fields
from gpuinfer.models.text.checkpoint.refusals import elsewhere

FULL, SLIDING = "full_attention", "sliding_attention"


def windows_of(family: str, config: Fields, layers: int) -> tuple[int | None, ...]:
    """For each layer the number of positions that it sees, itself included; None: all. Empty: all layers see all."""
    if family not in SLIDES:
        return ()
    window = SLIDES[family](config)
    kinds = _listed(config, layers) or _unlisted(family, config, layers, window)
    if window is None and SLIDING in kinds:
        raise UsageError(
            f"{config.where}: layer_types names sliding layers, but there is no sliding_window, or use_sliding_window "
            "is false. Mend one of them."
        )
    windows = tuple(window if kind == SLIDING else None for kind in kinds)
    return windows if any(windows) else ()


def _mistral(config: Fields) -> int | None:
    """Absent: transformers' default; null or 0: none."""
    return config.integer("sliding_window", 4096) if config.values.get("sliding_window", 4096) else None


def _qwen(config: Fields) -> int | None:
    return config.integer("sliding_window", 4096) if config.flag("use_sliding_window", False) else None


SLIDES: Mapping[str, Callable[[Fields], int | None]] = {"mistral": _mistral, "qwen2": _qwen, "qwen3": _qwen}


def _listed(config: Fields, layers: int) -> tuple[str, ...]:
    listed = config.texts("layer_types")
    if listed and len(listed) != layers:
        raise UsageError(
            f"{config.where}: layer_types names {len(listed)} layers, num_hidden_layers says {layers}. "
            "Mend one of them."
        )
    if strange := set(listed) - {FULL, SLIDING}:
        raise elsewhere(f"layers of kind '{min(strange)[:40]}' are asked for")
    return listed


def _unlisted(family: str, config: Fields, layers: int, window: int | None) -> tuple[str, ...]:
    """Each layer's kind where no list says it: Mistral's are alike, Qwen's slide from `max_window_layers` on."""
    first = 0 if family == "mistral" else config.integer("max_window_layers", 28, least=0)
    return tuple(SLIDING if window is not None and layer >= first else FULL for layer in range(layers))

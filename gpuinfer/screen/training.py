"""What people see of a network's training: in the final panel, and while it goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpuinfer.screen.rows import PanelRow
from gpuinfer.units import number, short, whole


def rows(found: Mapping[str, Any] | None) -> Iterator[PanelRow]:
    """Of the report's `training`; none where there is none."""
    if not found:
        return
    if found["loss"]:
        from_first = "" if found["first_loss"] is None else f", {found['first_loss']:.4g} at first"
        yield PanelRow("loss", f"{_loss(found['loss'])}{from_first}", "strong")
    if found["validation"]:
        yield PanelRow(
            "validation", f"{_loss(found['validation'])}, on {whole(found['validation_positions'])} positions"
        )
    yield PanelRow("trained on", f"{whole(found['positions'])} positions, {found['epochs']:.1f} epochs")
    spent = [
        f"{name} {short(found[f'{name}_s'])}" for name in ("forward", "backward", "optimizer") if found[f"{name}_s"]
    ]
    if found["activation_mb"]:
        spent.append(f"{number(found['activation_mb'] * 2**20)}B of activations")
    if spent:
        yield PanelRow("gradients", ", ".join(spent))


def live(facts: Mapping[str, float]) -> list[str]:
    """How it goes; nothing where nothing is trained."""
    if "training_steps" not in facts:
        return []
    told = [f"{name} {facts[name]:.4g}" for name in ("loss", "validation") if name in facts]
    return [*told, f"epoch {facts['epochs']:.1f}"]


def _loss(found: Mapping[str, float]) -> str:
    parts = ", ".join(f"{name} {value:.4g}" for name, value in found.items() if name != "total")
    return f"{found['total']:.4g}" + (f" ({parts})" if parts else "")

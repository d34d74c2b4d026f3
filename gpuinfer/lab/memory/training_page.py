"""Training with all activations and with those of segments of its layers alone, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuinfer.lab.presenter import Note, Page, Table
from gpuinfer.units import memory


def ways_of(device: Mapping[str, Any]) -> str:
    """How activations are kept."""
    segments = device["checkpoint_segments"]
    return "all activations kept" if segments is None else f"checkpoint_segments={segments}"


def training_page(document: Mapping[str, Any]) -> Page:
    """What a step takes and the largest batch, a column for each way."""
    devices, facts = document["devices"], document["facts"]
    at = devices[0]["batch"]["batch"]
    rows: list[tuple[str, ...]] = []
    for name, key in (
        ("weights", "weights_bytes"),
        ("gradients", "gradients_bytes"),
        ("optimizer", "optimizer_bytes"),
        (f"activations at {at:,} rows", "activations_bytes"),
    ):
        rows.append((name, *(memory(device["batch"][key]) for device in devices)))
    rows.append(("activations of a row", *(memory(device["activation_row_bytes"]) for device in devices)))
    largest = [device["largest"]["batch"] for device in devices]
    rows.append(("largest batch", *(f"{batch:,}" for batch in largest)))
    notes: list[Note] = [("loss", f"{facts['loss']}, on made-up rows")]
    verdict = f"{largest[0]:,} rows in a step"
    if len(devices) > 1:
        times = f"{largest[1] / largest[0]:.1f} times as many" if largest[0] else "where not one row fits without"
        verdict += f", {largest[1]:,} with -B checkpoint_segments={devices[1]['checkpoint_segments']}: {times}"
        notes.append(("what it costs", "layers go forward once more on the way back: about a third more time a step"))
    elif why := facts.get("not_divided"):
        notes.append(("checkpointing", why))
    notes.append(("a run", "takes 65,536 rows at once (gpuinfer train --batch-size), or what -B max_rows says"))
    notes.append(("largest batch", verdict))
    return Page(
        "training · with and without checkpointing",
        verdict,
        None,
        Table(["", *map(ways_of, devices)], rows),
        notes=notes,
    )

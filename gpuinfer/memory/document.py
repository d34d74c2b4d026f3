"""`gpuinfer.memory/1` as people see it: a column a batch, and what there is to say below."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpuinfer.memory.probing import rows_of
from gpuinfer.units import memory

PARTS = {
    "process": "process",
    "weights": "weights",
    "cache": "caches",
    "activations": "activations",
    "working": "working",
}
NOTHING = "–"
MOST_OTHERS = 5


def heading(document: Mapping[str, Any], device: Mapping[str, Any]) -> str:
    context = f", a context of {document['facts']['context']:,}" if "context" in document["facts"] else ""
    copies = f", {device['copies']} copies in one memory" if device["copies"] > 1 else ""
    return f"memory · {document['model']} · {document['dtype']} on {device['device']}{copies}{context}"


def columns(document: Mapping[str, Any], device: Mapping[str, Any]) -> list[str]:
    """One for each batch."""
    return [rows_of(document), *(f"{one['batch']:,}" for one in _batches(device))]


def rows(device: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The parts, what they add up to, and what was measured: of each batch."""
    batches = _batches(device)
    found = [
        (shown, *(memory(one[f"{part}_bytes"]) for one in batches))
        for part, shown in PARTS.items()
        if _any(batches, part)
    ]
    found.append(("estimated", *(memory(one["estimated_bytes"]) for one in batches)))
    if device["tried"]:
        measured = [one.get("measured_bytes") for one in batches]
        found.append(("measured", *(NOTHING if size is None else memory(size) for size in measured)))
        found.append(("ratio", *(f"{one['ratio']:.2f}" if one.get("ratio") else NOTHING for one in batches)))
    return found


def _any(batches: Sequence[Mapping[str, Any]], part: str) -> bool:
    return any(one[f"{part}_bytes"] for one in batches)


def _batches(device: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Those that were asked for, or the usual one; those that were tried; the largest. Each once, ascending."""
    known = [device["batch"], *device["also"], device["estimated"], *device["tried"]]
    found = {one["batch"]: one for one in known if one is not None}
    return [found[batch] for batch in sorted(found)]


def notes(document: Mapping[str, Any], device: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    largest, noun = device["largest"], rows_of(document)
    free, room = memory(device["free_bytes"]), memory(device["room_bytes"])
    yield "free", f"{free}, of which {room} are counted with: the rest of the program grows too"
    yield "largest batch", _largest(device, noun)
    if document["kind"] == "rows" and device["device"] == "cpu":
        yield "", "in one piece: a run takes larger batches in portions of 1,024 rows, unless -B chunk_rows says more"
    if largest["by_measurement"] is not None:
        yield "", f"{largest['by_estimate']:,} by the estimate, {largest['by_measurement']:,} by what was measured"
    if device["not_tried"]:
        yield "not tried", device["not_tried"]
    others = device["others"]
    for one in others[:MOST_OTHERS]:
        held = "memory that the driver does not tell" if one["mb"] is None else memory(one["mb"] * 2**20)
        yield "beside us", f"{one['name'] or 'a process'} (pid {one['pid']}) holds {held} of this device"
    if len(others) > MOST_OTHERS:
        yield "", f"and {len(others) - MOST_OTHERS} more: see --json"


def _largest(device: Mapping[str, Any], noun: str) -> str:
    largest = device["largest"]
    each = f" in each of the {device['copies']} copies" if device["copies"] > 1 else ""
    if largest["bound"] == "limit":
        return f"{largest['batch']:,} {noun}{each}, the most that there may be; memory would have room for more"
    return f"{largest['batch']:,} {noun}{each}"

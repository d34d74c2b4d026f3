"""The parent: a child process looks at the model, and whatever becomes of it is a document, `gpuinfer.memory/1`, with
its tables: a column a batch, and notes below.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib import resources
from typing import Any

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host import children
from gpuinfer.host.error_text import error_from_wire
from gpuinfer.lab.memory.memory_options import MemoryOptions
from gpuinfer.units import memory

CHILD = "gpuinfer.lab.memory.probe_child"
LIMIT_S = 900.0  # for a large model to be read from a slow disk, and for a machine that others keep busy
SCHEMA = "gpuinfer.memory/1"


def probe_memory(
    spec: ModelSpec, setup: Setup, options: MemoryOptions, backend_options: Mapping[str, Any]
) -> dict[str, Any]:
    """`gpuinfer.memory/1`: what the model takes at a batch, and the largest that fits, on each device.

    Raises `UsageError` for a model that cannot be had and for a batch size that does not fit, which is told with the
    largest that does; `WorkError` when the child ends without a word.
    """
    asked = {
        "spec": asdict(spec),
        "devices": setup.devices,
        "dtype": setup.dtype,
        "seed": setup.seed,
        "options": dict(backend_options),
        "batch_size": sorted(set(options.batch_size or ())),
        "context": options.context,
        "free": options.free,
        "probe": options.probe,
    }
    request_line = json.dumps(asked, default=str).encode()
    environment = children.with_our_path(OMP_WAIT_POLICY="passive")  # what counts is memory, not time
    child = children.run_program([sys.executable, "-m", CHILD], LIMIT_S, request_line, environment)
    lines = child.out.split(b"\n")[:-1]  # what follows the last is not whole
    document: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if "error" in document:
        raise error_from_wire(document["error"])
    if not document:
        cure = f"Try --no-probe, which estimates alone; {CURE}" if options.probe else CURE
        raise WorkError(f"the process that looked at the model ended at once: {_ending(child)}. {cure}")
    if options.probe:
        for place, device in enumerate(document["devices"]):
            if place >= len(lines) - 1:  # a line for the estimates, and one for each device that was tried
                device["not_tried"] = f"the process that tried it ended: {_ending(child)}"
    document = {"schema": SCHEMA, **document}
    _refuse_unfit(document)
    return document


CURE = "`gpuinfer doctor` tells what works here."


def memory_schema() -> dict[str, Any]:
    """The JSON Schema of the document."""
    text = resources.files("gpuinfer").joinpath("memory.schema.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def _ending(child: children.FinishedProgram) -> str:
    if child.code is None:
        return f"it took longer than {LIMIT_S:.0f} s"
    if child.code < 0:
        return f"it was killed by signal {-child.code}"
    return child.last_words


def _refuse_unfit(document: Mapping[str, Any]) -> None:
    """By the device on which least fits."""
    least = min(document["devices"], key=lambda one: one["largest"]["batch"])
    largest, batch = least["largest"], least["batch"]
    noun = batch_text(document)
    needed, room, free = (memory(size) for size in (batch["estimated_bytes"], least["room_bytes"], least["free_bytes"]))
    where = f" on {least['device']}" if len(document["devices"]) > 1 else ""
    each = f" in each of {least['copies']} copies" if least["copies"] > 1 else ""
    may = f"{room} of the {free} that are free{where} may be taken"
    if largest["batch"] < 1:
        raise UsageError(
            f"model '{document['model']}' does not fit: {needed} for {batch['batch']:,} {noun}{each}, and {may}, which "
            f"is not enough for one. Use {_smaller(document)}, or a device with more memory."
        )
    if document["asked"] is not None and batch["batch"] > largest["batch"]:
        raise UsageError(
            f"--batch-size {batch['batch']}: {batch['batch']:,} {noun}{each} need {needed}, and {may}. "
            f"The largest that fits is --batch-size {largest['batch']}.{_of_shorter(document)}"
        )


def _of_shorter(document: Mapping[str, Any]) -> str:
    """Of text that is not what a run takes at the most."""
    facts = document["facts"]
    if "row_pages" not in facts:
        return ""
    return (
        f" A full row has all {facts['context']:,} tokens of its context, in {facts['row_pages']:,} pages: give a "
        "shorter --context to count shorter ones, of which more fit."
    )


def _smaller(document: Mapping[str, Any]) -> str:
    fewer = ["fewer devices"] if document["devices"][0]["copies"] > 1 else []
    if document["devices"][0]["stages"]:
        fewer = ["a smaller -B micro_batch_rows"]
    narrow = ["--dtype bfloat16"] if document["dtype"] == "float32" else []
    shorter = ["a shorter --context"] if document["kind"] == "text" else []
    return " or ".join([*fewer, *shorter, *narrow, "a smaller model"])


def batch_text(document: Mapping[str, Any]) -> str:
    """What a batch counts."""
    return "full rows" if document["kind"] == "text" and not document["facts"].get("asked_pages") else "rows"


PARTS = {
    "process": "process",
    "weights": "weights",
    "cache": "caches",
    "activations": "activations",
    "working": "working",
}
NOTHING = "–"
MOST_OTHERS = 5


def memory_heading(document: Mapping[str, Any], device: Mapping[str, Any]) -> str:
    context = f", a context of {document['facts']['context']:,}" if "context" in document["facts"] else ""
    copies = f", {device['copies']} copies in one memory" if device["copies"] > 1 else ""
    stages = f", {_stages(document, device)}" if device["stages"] else ""
    return f"memory · {document['model']} · {document['dtype']} on {device['device']}{copies}{stages}{context}"


def _stages(document: Mapping[str, Any], device: Mapping[str, Any]) -> str:
    here, all_of_them = len(device["stages"]), document["facts"]["stages"]
    some = f"{here} of {all_of_them}" if here < all_of_them else f"{here}"
    return f"{some} stages in one memory ({document['facts']['parallel']})"


def memory_columns(document: Mapping[str, Any], device: Mapping[str, Any]) -> list[str]:
    """One for each batch."""
    return [batch_text(document), *(f"{one['batch']:,}" for one in _batches(device))]


def memory_rows(device: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The parts, what they add up to, and what was measured: of each batch."""
    batches = _batches(device)
    found = [
        (shown, *(memory(one[f"{part}_bytes"]) for one in batches))
        for part, shown in PARTS.items()
        if any(one[f"{part}_bytes"] for one in batches)
    ]
    found.append(("estimated", *(memory(one["estimated_bytes"]) for one in batches)))
    if device["tried"]:
        measured = [one.get("measured_bytes") for one in batches]
        found.append(("measured", *(NOTHING if size is None else memory(size) for size in measured)))
        found.append(("ratio", *(f"{one['ratio']:.2f}" if one.get("ratio") else NOTHING for one in batches)))
    return found


def _batches(device: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Those that were asked for, or the usual one; those that were tried; the largest. Each once, ascending."""
    known = [device["batch"], *device["also"], device["estimated"], *device["tried"]]
    found = {one["batch"]: one for one in known if one is not None}
    return [found[batch] for batch in sorted(found)]


def memory_notes(document: Mapping[str, Any], device: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    largest = device["largest"]
    free, room = memory(device["free_bytes"]), memory(device["room_bytes"])
    yield "free", f"{free}, of which {room} are counted with: the rest of the program grows too"
    yield "largest batch", _largest(document, device)
    yield from _pages(document["facts"], device["pages"])
    if document["kind"] == "rows" and device["device"] == "cpu" and not device["stages"]:
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


def _pages(facts: Mapping[str, Any], own: Mapping[str, int] | None) -> Iterator[tuple[str, str]]:
    """What a page is, and how many a run has by itself."""
    if "page_bytes" not in facts:
        return
    tokens, each, row = facts["page_tokens"], memory(facts["page_bytes"]), memory(facts["row_bytes"])
    a_row = f"a row of {facts['context']:,} tokens takes {facts['row_pages']:,} of them, {row}"
    yield "pages", f"of {tokens} tokens, {each} each; {a_row}"
    if own is not None:
        room = f"{own['pages']:,} pages ({memory(own['cache_bytes'])}) for {own['slots']:,} rows at once"
        said = "as -B pages says" if facts["asked_pages"] else "unless -B pages or --batch-size says otherwise"
        yield "", f"a run has {room}, {said}: shorter rows leave room for others"


def _largest(document: Mapping[str, Any], device: Mapping[str, Any]) -> str:
    largest, noun, facts = device["largest"], batch_text(document), document["facts"]
    pages = facts.get("asked_pages")
    each = f" in each of the {device['copies']} copies" if device["copies"] > 1 else ""
    if pages and largest["batch"] == pages:
        full = pages // facts["row_pages"]
        return f"{largest['batch']:,} {noun} at once{each}, of which {full:,} may be full: -B pages allows no more"
    if largest["bound"] == "limit":
        return f"{largest['batch']:,} {noun}{each}, the most that there may be; memory would have room for more"
    return f"{largest['batch']:,} {noun}{each}"


# By stage


def in_stages(document: Mapping[str, Any]) -> bool:
    """Whether the model is in stages: then there is a table of them too."""
    return any(device["stages"] for device in document["devices"])


def stage_heading(document: Mapping[str, Any]) -> str:
    sizes = {device["batch"]["batch"] for device in document["devices"]}
    at = f"at {sizes.pop():,} {batch_text(document)}" if len(sizes) == 1 else "at the first batch of each device"
    return f"by stage · estimated {at}"


def stage_columns(document: Mapping[str, Any]) -> list[str]:
    on = ["on"] if len(document["devices"]) > 1 else []
    return ["stage", *on, *(PARTS[part] for part in _stage_parts(document)), "in all"]


def stage_rows(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """In their order."""
    devices = document["devices"]
    each = [(stage, device["device"]) for device in devices for stage in device["stages"]]
    each.sort(key=lambda one: one[0]["stage"])
    return [
        (
            f"{stage['stage']}, {_layers(*stage['layers'])}",
            *([device] if len(devices) > 1 else []),
            *(memory(stage[f"{part}_bytes"]) for part in _stage_parts(document)),
            memory(stage["estimated_bytes"]),
        )
        for stage, device in each
    ]


def _stage_parts(document: Mapping[str, Any]) -> list[str]:
    """Those that any of them has."""
    each = [stage for device in document["devices"] for stage in device["stages"]]
    return [part for part in PARTS if any(stage.get(f"{part}_bytes") for stage in each)]


def _layers(first: int, last: int) -> str:
    return f"layer {first}" if first == last else f"layers {first} to {last}"


SPLITS = {
    "given": "where -B split_points says",
    "time": "by how long each layer took just now; a run measures that anew: -B split_points={points} keeps it so",
    "weights": "by the weights; a run splits by how long each layer takes: -B split_points={points} makes it so",
}


def stage_notes(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    facts, devices = document["facts"], document["devices"]
    starts = sorted(stage["layers"][0] for device in devices for stage in device["stages"])
    yield "split", SPLITS[facts["split"]].format(points=",".join(map(str, starts[1:])))
    if document["kind"] == "rows":
        flight = f", of {facts['forwards']} batches in flight" if facts["forwards"] > 1 else ", one after the other"
        yield "micro-batches", f"of {facts['micro_batch_rows']:,} rows at most (-B micro_batch_rows){flight}"
    else:
        count = facts["micro_batches"]
        cut = f"a step is cut into {count} at most" if count > 1 else "none: a step goes through as it is"
        yield "micro-batches", f"{cut} (-B micro_batch_rows)"
    if len(devices) > 1:
        yield "free", ", ".join(f"{memory(device['free_bytes'])} on {device['device']}" for device in devices)
    least = min(devices, key=lambda one: one["largest"]["batch"])
    where = f": the least of all, on {least['device']}" if len(devices) > 1 else ": all stages share this memory"
    yield "largest batch", _largest(document, least) + where
    if any(device["tried"] for device in devices):
        yield "measured", "all stages of a memory together, in the table above; those here are reckoned one by one"

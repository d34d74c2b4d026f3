"""The parent: a child process looks at the model, and whatever becomes of it is a document, `gpuinfer.memory/1`, with
its pages: a column a batch, and notes below.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib import resources
from typing import Any

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host.child import Channel, Child, ChildLost, Conversation
from gpuinfer.host.error_text import error_from_wire
from gpuinfer.lab.memory.memory_options import MemoryOptions
from gpuinfer.lab.memory.probe_child import answer_probe
from gpuinfer.lab.memory.training_page import training_page, ways_of
from gpuinfer.lab.presenter import Note, Page, Table
from gpuinfer.units import memory

LIMIT_S = 900.0  # of a finding: for a large model to be read from a slow disk, on a machine that others keep busy
SCHEMA = "gpuinfer.memory/1"
CURE = "`gpuinfer doctor` tells what works here."


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
        "training": options.training,
        "probe": options.probe,
    }
    child = Child(answer_probe, name="gpuinfer memory", daemon=True)
    conversation = Conversation("it", child, Channel(child.end))
    document: dict[str, Any] = {}
    findings = -1  # one for the estimate, and one for each device that was tried
    try:
        message = conversation.ask(json.loads(json.dumps(asked, default=str)), LIMIT_S)
        while "devices" in message:
            document, findings = message, findings + 1
            message = conversation.receive(LIMIT_S)
    except ChildLost as lost:
        message = {"failed": str(lost)}
    finally:
        conversation.close()
    if "error" in message:
        raise error_from_wire(message["error"])
    ending = message["failed"].rstrip(".")
    if not document:
        cure = f"Try --no-probe, which estimates alone; {CURE}" if options.probe else CURE
        raise WorkError(f"the process that looked at the model ended at once: {ending}. {cure}")
    if options.probe:
        for device in document["devices"][findings:]:
            device["not_tried"] = f"the process that tried it ended: {ending}"
    document = {"schema": SCHEMA, **document}
    _refuse_unfit(document)
    return document


def memory_schema() -> dict[str, Any]:
    """The JSON Schema of the document."""
    text = resources.files("gpuinfer").joinpath("memory.schema.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def _refuse_unfit(document: Mapping[str, Any]) -> None:
    """By the device on which least fits; in training, of which both ways were looked at, by that in which more does."""
    choose = max if document["facts"].get("training") else min
    least = choose(document["devices"], key=lambda one: one["largest"]["batch"])
    largest, batch, facts = least["largest"], least["batch"], document["facts"]
    noun = batch_text(document)
    needed, room, free = (memory(size) for size in (batch["estimated_bytes"], least["room_bytes"], least["free_bytes"]))
    where = f" on {least['device']}" if len(document["devices"]) > 1 else ""
    each = f" in each of {least['copies']} copies" if least["copies"] > 1 else ""
    may = f"{room} of the {free} that are free{where} may be taken"
    way = f" with -B checkpoint_segments={least['checkpoint_segments']}" if least.get("checkpoint_segments") else ""
    if largest["batch"] < 1:
        first = document["devices"][0]
        smaller = [
            "fewer devices" if first["copies"] > 1 and not first["stages"] else "",
            "a smaller -B micro_batch_rows" if first["stages"] else "",
            "a shorter --context" if document["kind"] == "text" else "",
            "--dtype bfloat16" if document["dtype"] == "float32" else "",
            "a smaller model",
        ]
        raise UsageError(
            f"model '{document['model']}' does not fit: {needed} for {batch['batch']:,} {noun}{each}, and {may}, which "
            f"is not enough for one. Use {' or '.join(filter(None, smaller))}, or a device with more memory."
        )
    if document["asked"] is not None and batch["batch"] > largest["batch"]:
        shorter = ""
        if "row_pages" in facts:  # text, which does not take that in a run at the most
            shorter = (
                f" A full row has all {facts['context']:,} tokens of its context, in {facts['row_pages']:,} pages: "
            )
            shorter += "give a shorter --context to count shorter ones, of which more fit."
        raise UsageError(
            f"--batch-size {batch['batch']}: {batch['batch']:,} {noun}{each} need {needed}, and {may}. "
            f"The largest that fits is --batch-size {largest['batch']}{way}.{shorter}"
        )


def batch_text(document: Mapping[str, Any]) -> str:
    """What a batch counts."""
    return "full rows" if document["kind"] == "text" and not document["facts"].get("asked_pages") else "rows"


PARTS = {
    "process": "process",
    "weights": "weights",
    "cache": "caches",
    "activations": "activations",
    "working": "working",
    "gradients": "gradients",
    "optimizer": "optimizer",
}
NOTHING = "–"
MOST_OTHERS = 5


def memory_pages(document: Mapping[str, Any]) -> Iterator[Page]:
    """One for each device; for a model in stages one more, of the stages."""
    for device in document["devices"]:
        verdict = _largest(document, device)
        yield Page(
            _heading(document, device),
            verdict,
            None,
            _device_table(document, device),
            notes=list(_device_notes(document, device, verdict)),
        )
    if any(device["stages"] for device in document["devices"]):
        yield _stages_page(document)
    if document["facts"].get("training"):
        yield training_page(document)


def _heading(document: Mapping[str, Any], device: Mapping[str, Any]) -> str:
    facts = document["facts"]
    context = f", a context of {facts['context']:,}" if "context" in facts else ""
    copies = f", {device['copies']} copies in one memory" if device["copies"] > 1 else ""
    stages = ""
    if here := len(device["stages"]):
        some = f"{here} of {facts['stages']}" if here < facts["stages"] else f"{here}"
        stages = f", {some} stages in one memory ({facts['parallel']})"
    how = f", training, {ways_of(device)}" if facts.get("training") else ""
    return f"memory · {document['model']} · {document['dtype']} on {device['device']}{copies}{stages}{context}{how}"


def _device_table(document: Mapping[str, Any], device: Mapping[str, Any]) -> Table:
    """The parts, what they add up to, and what was measured. A column for each batch that was asked for (or the usual
    one) or tried, and for the largest.
    """
    known = [device["batch"], *device["also"], device["estimated"], *device["tried"]]
    by_size = {one["batch"]: one for one in known if one is not None}
    batches = [by_size[batch] for batch in sorted(by_size)]
    rows = [
        (shown, *(memory(one[f"{part}_bytes"]) for one in batches))
        for part, shown in PARTS.items()
        if any(one[f"{part}_bytes"] for one in batches)
    ]
    rows.append(("estimated", *(memory(one["estimated_bytes"]) for one in batches)))
    if device["tried"]:
        measured = [one.get("measured_bytes") for one in batches]
        rows.append(("measured", *(NOTHING if size is None else memory(size) for size in measured)))
        rows.append(("ratio", *(f"{one['ratio']:.2f}" if one.get("ratio") else NOTHING for one in batches)))
    return Table([batch_text(document), *(f"{one['batch']:,}" for one in batches)], rows)


def _device_notes(document: Mapping[str, Any], device: Mapping[str, Any], verdict: str) -> Iterator[Note]:
    largest, facts, own = device["largest"], document["facts"], device["pages"]
    free, room = memory(device["free_bytes"]), memory(device["room_bytes"])
    yield "free", f"{free}, of which {room} are counted with: the rest of the program grows too"
    yield "largest batch", verdict
    if "page_bytes" in facts:
        a_row = f"{facts['row_pages']:,} of them, {memory(facts['row_bytes'])}"
        each = f"of {facts['page_tokens']} tokens, {memory(facts['page_bytes'])} each"
        yield "pages", f"{each}; a row of {facts['context']:,} tokens takes {a_row}"
        if own is not None:
            said = "as -B pages says" if facts["asked_pages"] else "unless -B pages or --batch-size says otherwise"
            has = f"{own['pages']:,} pages ({memory(own['cache_bytes'])}) for {own['slots']:,} rows at once"
            yield "", f"a run has {has}, {said}: shorter rows leave room for others"
    if not facts.get("training") and document["kind"] == "rows" and device["device"] == "cpu" and not device["stages"]:
        yield "", "in one piece: a run takes larger batches in portions of 1,024 rows, unless -B chunk_rows says more"
    if largest["by_measurement"] is not None:
        yield "", f"{largest['by_estimate']:,} by the estimate, {largest['by_measurement']:,} by what was measured"
    if facts.get("training"):
        yield "weights", "twice: those that the model was built with, and those in training"
    if device["not_tried"]:
        yield "not tried", device["not_tried"]
    others = device["others"]
    for one in others[:MOST_OTHERS]:
        held = "memory that the driver does not tell" if one["mb"] is None else memory(one["mb"] * 2**20)
        yield "beside us", f"{one['name'] or 'a process'} (pid {one['pid']}) holds {held} of this device"
    if len(others) > MOST_OTHERS:
        yield "", f"and {len(others) - MOST_OTHERS} more: see --json"


def _largest(document: Mapping[str, Any], device: Mapping[str, Any]) -> str:
    largest, noun, facts = device["largest"], batch_text(document), document["facts"]
    pages = facts.get("asked_pages")
    each = f" in each of the {device['copies']} copies" if device["copies"] > 1 else ""
    if pages and largest["batch"] == pages:
        full = pages // facts["row_pages"]
        return f"{largest['batch']:,} {noun} at once{each}, of which {full:,} may be full: -B pages allows no more"
    more = ", the most that there may be; memory would have room for more" if largest["bound"] == "limit" else ""
    return f"{largest['batch']:,} {noun}{each}{more}"


SPLITS = {
    "given": "where -B split_points or stages says",
    "time": "by how long each layer took just now; a run measures that anew: -B split_points={points} keeps it so",
    "weights": "by the weights; a run splits by how long each layer takes: -B split_points={points} makes it so",
}


def _stages_page(document: Mapping[str, Any]) -> Page:
    """The stages of all devices, in their order."""
    devices, facts = document["devices"], document["facts"]
    each = [(stage, device["device"]) for device in devices for stage in device["stages"]]
    each.sort(key=lambda one: one[0]["stage"])
    parts = [part for part in PARTS if any(stage.get(f"{part}_bytes") for stage, _ in each)]
    several, rows = len(devices) > 1, []
    for stage, device in each:
        first, last = stage["layers"]
        layers = f"layer {first}" if first == last else f"layers {first} to {last}"
        sizes = [memory(stage[f"{part}_bytes"]) for part in (*parts, "estimated")]
        rows.append((f"{stage['stage']}, {layers}", *([device] if several else []), *sizes))
    columns = ["stage", *(["on"] if several else []), *(PARTS[part] for part in parts), "in all"]
    batches = {device["batch"]["batch"] for device in devices}
    at = f"at {batches.pop():,} {batch_text(document)}" if len(batches) == 1 else "at the first batch of each device"
    starts = ",".join(str(stage["layers"][0]) for stage, _ in each[1:])
    notes = [("split", SPLITS[facts["split"]].format(points=starts))]
    if document["kind"] == "rows":
        flight = f", of {facts['forwards']} batches in flight" if facts["forwards"] > 1 else ", one after the other"
        cut = f"of {facts['micro_batch_rows']:,} rows at most (-B micro_batch_rows){flight}"
    else:
        count = facts["micro_batches"]
        cut = f"a step is cut into {count} at most" if count > 1 else "none: a step goes through as it is"
        cut += " (-B micro_batch_rows)"
    notes.append(("micro-batches", cut))
    if several:
        notes.append(("free", ", ".join(f"{memory(one['free_bytes'])} on {one['device']}" for one in devices)))
    least = min(devices, key=lambda one: one["largest"]["batch"])
    where = f": the least of all, on {least['device']}" if several else ": all stages share this memory"
    verdict = _largest(document, least) + where
    notes.append(("largest batch", verdict))
    if any(device["tried"] for device in devices):
        told = "all stages of a memory together, in the table above; those here are reckoned one by one"
        notes.append(("measured", told))
    return Page(f"by stage · estimated {at}", verdict, None, Table(columns, rows), notes=notes)

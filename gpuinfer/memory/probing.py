"""The parent: a child process looks at the model, and whatever becomes of it is told as a document."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
from typing import Any

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host import commands
from gpuinfer.host.error_wire import error_from_wire
from gpuinfer.memory.asked import Options
from gpuinfer.units import memory

CHILD = "gpuinfer.memory.measuring"
LIMIT_S = 900.0  # for a large model to be read from a slow disk, and for a machine that others keep busy
SCHEMA = "gpuinfer.memory/1"


def examined(spec: ModelSpec, setup: Setup, options: Options, backend_options: Mapping[str, Any]) -> dict[str, Any]:
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
    told = json.dumps(asked, default=str).encode()
    environment = commands.with_our_path(OMP_WAIT_POLICY="passive")  # what counts is memory, not time
    child = commands.run([sys.executable, "-m", CHILD], LIMIT_S, told, environment)
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


def schema() -> dict[str, Any]:
    """The JSON Schema of the document."""
    text = resources.files("gpuinfer").joinpath("memory.schema.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def _ending(child: commands.Ended) -> str:
    if child.code is None:
        return f"it took longer than {LIMIT_S:.0f} s"
    if child.code < 0:
        return f"it was killed by signal {-child.code}"
    return child.last_words


def _refuse_unfit(document: Mapping[str, Any]) -> None:
    """By the device on which least fits."""
    least = min(document["devices"], key=lambda one: one["largest"]["batch"])
    largest, batch = least["largest"], least["batch"]
    noun = rows_of(document)
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


def rows_of(document: Mapping[str, Any]) -> str:
    """What a batch counts."""
    return "full rows" if document["kind"] == "text" and not document["facts"].get("asked_pages") else "rows"

"""The parent: a child process looks at the model, and whatever becomes of it is told as a document."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
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
    """`gpuinfer.memory/1`: what the model takes at a batch, and the largest that fits.

    Raises `UsageError` for a model that cannot be had and for a batch size that does not fit, which is told with the
    largest that does; `WorkError` when the child ends without a word.
    """
    asked = {
        "spec": asdict(spec),
        "devices": [setup.device],
        "dtype": setup.dtype,
        "seed": setup.seed,
        "options": dict(backend_options),
        "batch_size": options.batch_size,
        "context": options.context,
        "free": options.free,
        "probe": options.probe,
    }
    told = json.dumps(asked, default=str).encode()
    child = commands.run([sys.executable, "-m", CHILD], LIMIT_S, told, commands.with_our_path())
    lines = child.out.split(b"\n")[:-1]  # what follows the last is not whole
    document: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if "error" in document:
        raise error_from_wire(document["error"])
    if not document:
        raise WorkError(f"the process that looked at the model ended at once: {_ending(child)}. {CURE}")
    if options.probe and "not_tried" not in document:
        document["not_tried"] = f"the process that tried it ended: {_ending(child)}"
    document = {"schema": SCHEMA, **document, "not_tried": document.get("not_tried")}
    _refuse_unfit(document)
    return document


CURE = "Try --no-probe, which estimates alone; `gpuinfer doctor` tells what works here."


def _ending(child: commands.Ended) -> str:
    if child.code is None:
        return f"it took longer than {LIMIT_S:.0f} s"
    if child.code < 0:
        return f"it was killed by signal {-child.code}"
    return child.last_words


def _refuse_unfit(document: Mapping[str, Any]) -> None:
    largest, batch = document["largest"], document["batch"]
    noun = rows_of(document)
    if largest["batch"] < 1:
        raise UsageError(
            f"model '{document['model']}' does not fit: {memory(batch['estimated_bytes'])} for {batch['batch']:,} "
            f"{noun}, and {memory(document['room_bytes'])} of the {memory(document['free_bytes'])} that are free may "
            f"be taken, which is not enough for one. Use {_smaller(document)}, or a device with more memory."
        )
    if document["asked"] and batch["batch"] > largest["batch"]:
        raise UsageError(
            f"--batch-size {batch['batch']}: {batch['batch']:,} {noun} need {memory(batch['estimated_bytes'])}, and "
            f"{memory(document['room_bytes'])} of the {memory(document['free_bytes'])} that are free may be taken. "
            f"The largest that fits is --batch-size {largest['batch']}."
        )


def _smaller(document: Mapping[str, Any]) -> str:
    narrow = ["--dtype bfloat16"] if document["dtype"] == "float32" else []
    shorter = ["a shorter --context"] if document["kind"] == "text" else []
    return " or ".join([*shorter, *narrow, "a smaller model"])


def rows_of(document: Mapping[str, Any]) -> str:
    """What a batch counts."""
    return "slots" if document["kind"] == "text" else "rows"

"""A service model from what a run has left: its report, or its trace, which also tells how much batches differ."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuinfer.api import Limits
from gpuinfer.errors import UsageError
from gpuinfer.service import ServiceModel
from gpuinfer.trace import reading
from gpuinfer.trace.reading import Trace


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a file says of a backend."""

    service: ServiceModel
    limits: Limits | None = None  # as far as the file knows them
    largest: int | None = None  # rows of the largest batch that was measured


def fitted(path: Path) -> Fitted:
    """Read a report (`--json` of a run or of a simulation) or a trace. Raises `UsageError` for any other file."""
    document = _document(path)
    if document is None:
        return of_trace(reading.read(path))
    if document.get("schema") == "gpuinfer.simulation/1" and len(document.get("runs") or []) == 1:
        document = document["runs"][0]
    try:
        service = ServiceModel.of_report(document)
    except UsageError as error:
        raise UsageError(f"--service {path}: {error}") from error
    largest = document["batches"].get("rows_max")
    return Fitted(service, largest=largest if isinstance(largest, int) else None)


def of_trace(trace: Trace) -> Fitted:
    """From each batch that was cut and answered; those whose requests failed count as failures."""
    cuts = {(cut.engine, cut.batch): cut for cut in trace.cuts}
    ran = [(cuts[key].rows, one.seconds) for one in trace.batches if (key := (one.engine, one.batch)) in cuts]
    ends = {(settle.engine, settle.id): settle.outcome for settle in trace.settles}
    failed = sum(all(ends.get((cut.engine, one)) == "failed" for one in cut.ids) for cut in trace.cuts)
    failures = min(failed / len(trace.cuts), 0.99) if trace.cuts else 0.0
    service = ServiceModel.of_batches(ran, failures)
    return Fitted(service, trace.header.limits, max(rows for rows, _ in ran))


def _document(path: Path) -> dict[str, Any] | None:
    """The file as one JSON object; None when it is none, as a trace of many lines is not."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}. Give a report (--json) or a trace (--trace) of a run.") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. Give a file that can.") from error
    except UnicodeDecodeError:  # packed: a trace, or nothing of ours
        return None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        raise UsageError(f"{path} is neither a report nor a trace. Give one that a run has written.")
    return document if "batches" in document or "runs" in document else None

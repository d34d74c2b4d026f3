"""A service model from what a run has left: its report, or its trace, which also tells how much batches differ.

A recorded load: the arrivals of a trace, at the times at which they came.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any

from gpuinfer.api import Limits
from gpuinfer.backends.service_model import ServiceModel
from gpuinfer.engine import trace_reader
from gpuinfer.engine.arrivals import Offer, RecordedArrivals
from gpuinfer.engine.trace_reader import CutRecord, Trace
from gpuinfer.errors import UsageError

WAITED = ("gain", "waited", "deadline", "drain")  # reasons of cuts that something else held up
FEW = 20  # batches say nothing of the engine
USUAL = 0.95  # of the batches; the rest were held up by something else


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
        return of_trace(trace_reader.read(path))
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
    if trace.header.limits is not None and trace.header.limits.in_flight == 1:
        turn_s, turn_request_s = _turns(trace)
        service = replace(service, turn_s=turn_s, turn_request_s=turn_request_s)
    return Fitted(service, trace.header.limits, max(rows for rows, _ in ran))


def _turns(trace: Trace) -> tuple[float, float]:
    """What the engine needs for a batch and for each of its requests, from cuts that nothing but that held up."""
    arrived = {(one.engine, one.id): one for one in trace.arrivals}
    ended = {(one.engine, one.batch): one for one in trace.batches}
    found: list[tuple[float, int]] = []
    engines: dict[int, CutRecord] = {}
    for cut in trace.cuts:
        before = engines.get(cut.engine)
        engines[cut.engine] = cut
        ran = ended.get((before.engine, before.batch)) if before is not None else None
        if before is None or ran is None or cut.reason in WAITED:
            continue
        batch = [arrived[cut.engine, one] for one in cut.ids]
        there = min(one.at for one in batch) < ran.at - ran.seconds / 2  # all the time
        if there and not any(one.client is not None or cut.reason != "free" for one in batch if one.at > ran.at):
            found.append((max(0.0, cut.at - before.at - ran.seconds), len(before.ids)))
    if len(found) < FEW:
        return 0.0, 0.0
    found = sorted(found)[: math.ceil(USUAL * len(found))]  # without the stalls
    sizes, seconds = [size for _, size in found], [spent for spent, _ in found]
    slope = linear_regression(sizes, seconds).slope if len(set(sizes)) > 1 else 0.0
    slope = min(max(0.0, slope), fmean(seconds) / fmean(sizes))
    return fmean(seconds) - slope * fmean(sizes), slope


def _document(path: Path) -> dict[str, Any] | None:
    """The file as one JSON object; None when it is none, as a trace of many lines is not."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for, and a device has no end
            raise UsageError(f"{path} cannot be read: it is no plain file. Give one that a run has written.")
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


def replayed(path: str | Path) -> RecordedArrivals:
    """The load of a trace, all its engines as one. Raises `UsageError` for a file that is none."""
    return RecordedArrivals(
        Offer(
            one.at,
            one.rows,
            one.priority,
            math.inf if one.left_s is None else one.left_s,
            one.client,
            one.group,
        )
        for one in trace_reader.read(path, arrivals_only=True).arrivals
    )

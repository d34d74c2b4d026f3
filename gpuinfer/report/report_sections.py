"""Sections of the report: training, the roofline of a text model, use of the cores, and a line for each of several
models.

The section of a training comes from the facts (`Progress.facts`) of the workload: `training_steps` (done, by earlier
runs too), `batch_size`, `training_positions`, `validation_positions`, `epochs`, `checkpoint` (the step of the last
one), `learning_rate`, `gradient_norm`, `first_loss`, `loss` (a mean over the latest steps), `validation`, and `loss:
PART`, `validation: PART` for the parts of the loss; `activation_bytes`, `forward_s`, `backward_s`, `optimizer_s`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from gpuinfer.api import TextRoofline
from gpuinfer.host import machine
from gpuinfer.host.cpu_contention import CoreTime
from gpuinfer.report.document import (
    CoresSection,
    ErrorCounts,
    FallbackSection,
    ModelLine,
    SpreadSection,
    TrainingSection,
)
from gpuinfer.stats import ERRORS, Snapshot, summarise


def of_learning(facts: Mapping[str, float]) -> TrainingSection | None:
    """The report's `training`; None for a run that trains nothing. Unknown values are null."""
    if "training_steps" not in facts:
        return None
    counts = {name: facts.get(name, 0) for name in ("batch_size", "validation_positions", "checkpoint")}
    known = ("epochs", "learning_rate", "gradient_norm", "first_loss", "forward_s", "backward_s", "optimizer_s")
    losses: dict[str, dict[str, float] | None] = {"loss": None, "validation": None}
    for name in losses.keys() & facts.keys():
        parts = {key.removeprefix(f"{name}: "): facts[key] for key in facts if key.startswith(f"{name}: ")}
        losses[name] = {"total": facts[name], **parts}
    section = {
        "steps": facts["training_steps"],
        **counts,
        "positions": facts.get("training_positions", 0),
        **{name: facts.get(name) for name in known},
        **losses,
        "activation_mb": facts["activation_bytes"] / 2**20 if facts.get("activation_bytes") else None,
    }
    return cast(TrainingSection, section)


ALIKE = 2.0  # times as many rows in a step, or as few: products of others are so much slower or quicker


def against_text_roofline(
    steps: Mapping[str, float], best: TextRoofline, wall_s: float, output_tokens: float, rows: float
) -> dict[str, Any] | None:
    """`{tokens_per_s, at_rows, least_s, flops, bytes, gflops_per_s, gbytes_per_s, efficiency, …}`, as the report has
    it. `rows` are those of a step, on average.

    None where nothing was counted, and of what an earlier run has measured where its steps had fewer than half or more
    than twice as many rows, or where this run took less time than that allows.

    Steps of prompts and of answers are held against the machine apart, since products of more rows are quicker; each
    kind takes as long as its operations or its bytes, whichever is longer.
    """
    flops, read = steps.get("flops", 0.0), steps.get("bytes", 0.0)
    if flops <= 0 or wall_s <= 0:
        return None
    if best.remembered and not best.at_rows / ALIKE <= rows <= best.at_rows * ALIKE:
        return None
    of_prompts, read_by_prompts = steps.get("prefill_flops", 0.0), steps.get("prefill_bytes", 0.0)
    products = of_prompts / best.prompt_flops_per_s, (flops - of_prompts) / best.flops_per_s
    memory = read_by_prompts / best.bytes_per_s, (read - read_by_prompts) / best.bytes_per_s
    least = sum(max(pair) for pair in zip(products, memory, strict=True))
    by_memory = sum(read_s for read_s, product_s in zip(memory, products, strict=True) if read_s > product_s)
    raised = least > wall_s
    if raised and best.remembered:
        return None  # it is of another machine, or of another moment of this one
    least = min(least, wall_s)
    return {
        "tokens_per_s": output_tokens / least,
        "at_rows": best.at_rows,
        "least_s": least,
        "flops": flops,
        "bytes": read,
        "gflops_per_s": best.flops_per_s / 1e9,
        "own_gflops_per_s": best.own_flops_per_s / 1e9,
        "prompt_gflops_per_s": best.prompt_flops_per_s / 1e9,
        "gbytes_per_s": best.bytes_per_s / 1e9,
        "efficiency": least / wall_s,
        "limited_by": "memory" if 2 * by_memory > least else "products",
        "remembered": best.remembered,
        "raised": raised,
    }


COMPUTING = ("forward", "prefill")  # stations in which a forward's other threads compute too


def core_shares(
    snapshot: Snapshot,
    wall_s: float,
    used: CoreTime | None,
    threads_waited_s: float = 0.0,
    count: int | None = None,
) -> CoresSection:
    """`{count, busy_s, waiting_s, others_s, stolen_s, idle_s, stations}` of a stretch of `wall_s` seconds.

    Busy, others, stolen and idle sum to `wall_s` × count. Where the system does not tell of other programs (`used` is
    None), the last three are None.

    `count`: of cores; None: those of this machine. Of a run over nodes all are those of its hosts.

    `waiting_s` is beside that sum: threads of ours that were ready to run and had no core, which somebody else had.
    `stations` share out what is known of `busy_s`; the rest went to threads that are in no lane, event loops above all.
    """
    if snapshot.cluster is not None:
        found: CoresSection = snapshot.cluster.core_shares(wall_s)
        return found
    count = machine.cores() if count is None else count
    all_s = wall_s * count
    others = stolen = idle = None
    busy = min(snapshot.cpu_s if used is None else used.ours, all_s)
    if used is not None:
        others = min(used.others, all_s - busy)
        stolen = min(used.stolen, all_s - busy - others)
        idle = all_s - busy - others - stolen
    return {
        "count": count,
        "busy_s": busy,
        "waiting_s": snapshot.cpu_wait_s,
        "threads_waited_s": threads_waited_s,
        "others_s": others,
        "stolen_s": stolen,
        "idle_s": idle,
        "stations": seconds_on_cores(snapshot, busy),
    }


def seconds_on_cores(snapshot: Snapshot, busy_s: float) -> dict[str, float]:
    """Seconds on a core of each station, over all lanes: `busy_s` at most. A forward of several threads is one lane,
    whose thread knows nothing of the others; they are taken to have run as long as it, as far as that many seconds ran.
    """
    ran: dict[str, float] = {}
    for lane in snapshot.lanes:
        for station, spent in lane.get("ran", {}).items():
            ran[station] = ran.get(station, 0.0) + max(0.0, spent)
    total = math.fsum(ran.values())
    if total > busy_s:
        return {station: spent * busy_s / total for station, spent in ran.items()}
    others = (snapshot.device.get("threads") or 1) - 1
    computed = math.fsum(ran.get(station, 0.0) for station in COMPUTING)
    if others and computed:
        factor = 1 + min(others, (busy_s - total) / computed)
        ran |= {station: factor * ran[station] for station in COMPUTING if station in ran}
    return {station: spent for station, spent in ran.items() if spent}


def of_fallback(snapshot: Snapshot) -> FallbackSection | None:
    """The backend that went on when the server of a remote one was gone; None where the server has stayed."""
    for name, line in snapshot.fallback.items():
        batches = line["batches"]
        return FallbackSection(
            backend=name,
            why=line["why"],
            processes=line["processes"],
            requests=line["requests"],
            rows=line["rows"],
            batches=batches,
            rows_mean=line["rows"] / batches if batches else None,
        )
    return None


def model_lines(snapshot: Snapshot, wall_s: float) -> list[ModelLine]:
    """One line a model where there are several, else none. Times in seconds, sizes in rows.

    `device_share`: of the device time of all models. `share`: its weight while the others have work too.
    `turn_wait_s`: how long its forwards waited while other models computed.
    """
    total = math.fsum(line["device_s"] for line in snapshot.models.values())
    return [_line(name, line, total, wall_s) for name, line in snapshot.models.items()]


def _line(name: str, line: Mapping[str, Any], total: float, wall_s: float) -> ModelLine:
    return {
        "name": name,
        "kind": line["kind"],
        "share": line["share"],
        "requests": line["requests"],
        "rows": line["rows"],
        "rows_per_s": line["rows"] / wall_s if wall_s > 0 else 0.0,
        "input_tokens": line["tokens"].get("input", 0),
        "output_tokens": line["tokens"].get("output", 0),
        "device_s": line["device_s"],
        "device_share": line["device_s"] / total if total else 0.0,
        "turn_wait_s": line["turn_wait_s"],
        "queue_wait_s": cast(SpreadSection, summarise(line["queue_wait"])),
        "latency_s": cast(SpreadSection, summarise(line["latency"])),
        "waiting_rows": line["waiting"],
        "errors": cast(ErrorCounts, {kind: line["errors"].get(kind, 0) for kind in ERRORS}),
    }

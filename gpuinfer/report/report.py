"""The report of a run (`gpuinfer.report/1`): what `--json` writes. `report.document` has its fields."""

from __future__ import annotations

import json
import math
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata, resources
from typing import Any, Final, Literal, cast

from gpuinfer.api import Progress, Reason, Roofline, Setup, TextRoofline
from gpuinfer.config.options import OptionFlag
from gpuinfer.host import error_text, machine
from gpuinfer.host.cpu_contention import CoreTime
from gpuinfer.models.processor import has_bfloat16
from gpuinfer.report import causes_rollouts, game_statistics, report_sections
from gpuinfer.report.causes_devices import of_stages
from gpuinfer.report.causes_text import SHORTAGES
from gpuinfer.report.document import (
    BatchesSection,
    ClassesSection,
    CutReasons,
    DeviceLine,
    DeviceReading,
    DeviceSection,
    EnvironmentSection,
    ErrorCounts,
    FailuresSection,
    MemorySection,
    PagesSection,
    PriorityClass,
    ReportDocument,
    SpeculationSection,
    SpreadSection,
    StationTotals,
    UnmaskingSection,
)
from gpuinfer.report.evidence import Evidence, is_forward, size_classes
from gpuinfer.report.verdict import judge
from gpuinfer.stats import ERRORS, DiffusionCounters, Snapshot, SpeculationCounters, mean_size, percentile, summarise

SCHEMA: Final = "gpuinfer.report/1"
LOST = ("failed", "rejected", "expired")  # of stats.ERRORS: those who asked wanted an answer, and have none


@dataclass(frozen=True, slots=True)
class Run:
    """What a run left behind, when it was done, stopped or failed."""

    workload: str
    backend: str
    strategy: str
    started_at: str  # ISO 8601, UTC
    setup_s: float
    wall_s: float
    status: str  # done, partial or failed
    setup: Setup
    snapshot: Snapshot
    progress: Progress
    counts_before: Mapping[str, float] = field(default_factory=dict)  # when the clock started
    roofline: Roofline | None = None
    text_roofline: TextRoofline | None = None  # of a model of text
    cores: CoreTime | None = None  # while the clock ran; None: not known
    core_count: int | None = None  # that it could use; None: those of this machine
    settings: Mapping[str, Any] = field(default_factory=dict)
    command: str = "gpuinfer"
    max_failures: float = 1.0  # the share that may fail before the run has
    utilisation_mean: float | None = None  # of the device, 0 to 1, while the clock ran; None: not known


def schema() -> dict[str, Any]:
    """The JSON Schema of a report."""
    text = resources.files("gpuinfer").joinpath("report.schema.json").read_text("utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def build(run: Run) -> dict[str, Any]:
    """The report, in plain values."""
    snapshot, progress, told = run.snapshot, run.progress, evidence(run)
    steps = snapshot.device.get("steps") or {}
    document: ReportDocument = {
        "schema": SCHEMA,
        "workload": run.workload,
        "backend": run.backend,
        "strategy": run.strategy,
        "started_at": run.started_at,
        "setup_s": run.setup_s,
        "wall_s": run.wall_s,
        "settings": json.loads(json.dumps(dict(run.settings), default=error_text.safe_str)),
        "status": cast(Literal["done", "partial", "failed"], run.status),
        "progress": {"done": progress.done, "total": progress.total, "unit": progress.unit, "before": progress.before},
        "environment": environment(run.setup, snapshot.device),
        "throughput": rates_section(run),
        "batches": batches_section(snapshot),
        "unmasking": unmasking(snapshot),
        "speculation": speculation(snapshot),
        "pages": cast(PagesSection, {name: steps.get(name, 0) for name in SHORTAGES})
        if "preempted_rows" in steps
        else None,
        "stages": of_stages(snapshot, run.wall_s),
        "latency_s": spread_section(snapshot.latency),
        "queue_wait_s": spread_section(snapshot.queue_wait),
        "first_token_s": spread_section(snapshot.first_token),
        "between_tokens_s": spread_section(snapshot.between_tokens),
        "classes": cast(ClassesSection, {name: of_class(count) for name, count in snapshot.classes.items()}),
        "time_s": time_s(snapshot.lanes, run.wall_s),
        "lanes": len(snapshot.lanes),
        "cores": report_sections.core_shares(snapshot, run.wall_s, run.cores, told.threads_waited_s),
        "stations": stations(snapshot.lanes, run.wall_s),
        "roofline": against_roofline(run),
        "bottleneck": judge(told),
        "cluster": snapshot.cluster.section if snapshot.cluster is not None else None,
        "rollouts": causes_rollouts.of_training(progress.facts, counted(run), snapshot.lanes, run.wall_s),
        "strength": game_statistics.of_strength(progress.facts),
        "resignation": game_statistics.of_resignation(progress.facts),
        "training": report_sections.of_learning(progress.facts),
        "errors": error_counts(snapshot.errors),
        "failures": failures(progress, snapshot, run.max_failures),
        "memory": memory_section(snapshot),
        "model": dict(snapshot.device["model"]) if "model" in snapshot.device else None,
        "models": report_sections.model_lines(snapshot, run.wall_s),
        "beside": {name: dict(model) for name, model in snapshot.device.get("beside", {}).items()},
        "notices": list(snapshot.notices),
        "fallback": report_sections.of_fallback(snapshot),
        "device": device(snapshot, run.wall_s, run.utilisation_mean),
    }
    return cast(dict[str, Any], document)


def spread_section(counts: Mapping[str, Any]) -> SpreadSection:
    """Mean, percentiles and maximum of a histogram in seconds; empty where it is."""
    return cast(SpreadSection, summarise(counts))


def error_counts(errors: Mapping[str, int]) -> ErrorCounts:
    """How many requests ended in each kind of error."""
    return cast(ErrorCounts, {name: errors.get(name, 0) for name in ERRORS})


def device(snapshot: Snapshot, wall_s: float, utilisation_mean: float | None = None) -> DeviceSection:
    """The device, or all of several together."""
    return {
        **_read(snapshot.device),
        "utilisation_mean": utilisation_mean,
        "copies_hidden": _copies_hidden(snapshot.device.get("transfers") or {}),
        "devices": devices(snapshot, wall_s),
        "others": list(snapshot.device.get("others", ())),
    }


def _copies_hidden(transfers: Mapping[str, float]) -> float | None:
    copied_s = transfers.get("copied_s", 0.0)
    return min(1.0, max(0.0, transfers["hidden_s"] / copied_s)) if copied_s > 0 else None


def devices(snapshot: Snapshot, wall_s: float) -> dict[str, DeviceLine]:
    """Each of several devices, by name; empty where there is one. `busy` is the share of the time in which it had a
    batch, on average over the processes that have a copy of the model there.
    """
    told: dict[str, DeviceLine] = {}
    for name, one in snapshot.device.get("devices", {}).items():
        copies_s = wall_s * one["copies"]
        told[name] = {
            **_read(one),
            "rows": one["rows"],
            "batches": one["batches"],
            "busy": min(1.0, one["busy_s"] / copies_s) if copies_s > 0 else 0.0,
            "failed": one["failed"] or None,
        }
    return told


def _read(reading: Mapping[str, Any]) -> DeviceReading:
    return cast(DeviceReading, {name: reading.get(name) for name in DeviceReading.__annotations__})


def environment(setup: Setup, device: Mapping[str, Any]) -> EnvironmentSection:
    return {
        "gpuinfer": _version("gpuinfer"),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "device": ",".join(setup.devices),
        "device_name": device.get("name"),
        "cpu_count": machine.cores(),
        "dtype": setup.dtype,
        "computes_in": device.get("computes_in") or setup.dtype,
        "compile": (device.get("in_force") or {}).get("compile"),
        "seed": setup.seed,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def rates_section(run: Run) -> dict[str, float]:
    """Rates per second of the run's clock; games per minute. Only of what was counted."""
    counts = counted(run)
    if run.snapshot.rows:
        counts["rows"] = run.snapshot.rows
        counts["requests"] = run.snapshot.requests
        if not run.snapshot.slots and "training_steps" not in run.progress.facts:  # a row is evaluated many times there
            counts.setdefault("evaluations", run.snapshot.rows)
    rates = {name: count / run.wall_s if run.wall_s > 0 else 0.0 for name, count in counts.items()}
    return {
        "games_per_min" if name == "games" else f"{name}_per_s": rate * 60 if name == "games" else rate
        for name, rate in rates.items()
    }


def counted(run: Run) -> dict[str, float]:
    """What the workload counted, since the clock started."""
    return {name: count - run.counts_before.get(name, 0) for name, count in run.progress.counts.items()}


def batches_section(snapshot: Snapshot) -> BatchesSection:
    """Batch sizes in rows; null where no batch ran. With slots the batches are forward steps, the reasons still those
    of what was admitted, and `occupancy` is the mean share of the slots that a step had rows in.
    """
    count = sum(snapshot.batches.values())
    mean = mean_size(snapshot.batches) if count else None
    return {
        "count": count,
        "rows_mean": mean,
        "rows_p50": percentile(snapshot.batches, 0.5) if count else None,
        "rows_max": max(snapshot.batches) if count else None,
        "slots": snapshot.slots or None,
        "occupancy": mean / slots_of_a_lane(snapshot) if mean is not None and snapshot.slots else None,
        "sizes": {str(size): times for size, times in sorted(doublings(snapshot.batches).items())},
        "seconds": {
            str(round(rows / times)): spent / times for times, rows, spent in size_classes(snapshot.batch_s) if times
        },
        "reasons": cast(CutReasons, {reason.value: snapshot.reasons.get(reason.value, 0) for reason in Reason}),
    }


def unmasking(snapshot: Snapshot) -> UnmaskingSection | None:
    """The report's `unmasking`: tokens a forward and computed positions of a diffusion model; None of others."""
    found = DiffusionCounters.of(snapshot.device.get("steps"))
    return cast(UnmaskingSection, found.plain()) if found else None


def speculation(snapshot: Snapshot) -> SpeculationSection | None:
    """The report's `speculation`: what came of proposed tokens; None where none was proposed."""
    found = SpeculationCounters.of(snapshot.device.get("steps"))
    return cast(SpeculationSection, found.plain()) if found else None


def slots_of_a_lane(snapshot: Snapshot) -> float:
    """The most rows of one forward step: each replica has a lane, and slots of its own."""
    return snapshot.slots / max(1, sum(is_forward(lane["name"]) for lane in snapshot.lanes))


def of_class(count: Mapping[str, Any]) -> PriorityClass:
    """The latency of the requests of one class, and what became of them."""
    return {
        **spread_section(count["latency"]),
        "requests": count["requests"],
        "rows": count["rows"],
        "errors": error_counts(count["errors"]),
        "queue_wait_s": spread_section(count["queue_wait"]),
    }


def doublings(sizes: Mapping[int, int]) -> dict[int, int]:
    """How many batches had at most so many rows, and more than half as many: powers of two → batches."""
    counts: Counter[int] = Counter()
    for size, times in sizes.items():
        counts[1 << max(0, size - 1).bit_length()] += times
    return dict(counts)


def time_s(lanes: Sequence[Mapping[str, Any]], wall_s: float) -> dict[str, float]:
    """Seconds in each station over all lanes; they sum to `wall_s` × lanes.

    A lane that opened late or ended early was idle for the rest. One that reported a little after the clock stopped is
    scaled down to it.
    """
    total: dict[str, float] = {"idle": 0.0}
    for lane in lanes:
        seconds = math.fsum(lane["stations"].values())
        scale = min(1.0, wall_s / seconds) if seconds else 1.0
        for station, spent in lane["stations"].items():
            total[station] = total.get(station, 0.0) + spent * scale
        total["idle"] += max(0.0, wall_s - seconds)
    return total


def stations(lanes: Sequence[Mapping[str, Any]], wall_s: float) -> dict[str, StationTotals]:
    """`{visits, busy_s, servers}` of every station but idle: how often it was entered and left, the seconds of all
    lanes in it, and how many lanes were ever in it.
    """
    found: dict[str, StationTotals] = {}
    for lane in lanes:
        for name, spent in time_s([lane], wall_s).items():
            if name == "idle":
                continue
            station = found.setdefault(name, {"visits": 0, "busy_s": 0.0, "servers": 0})
            station["visits"] += lane.get("visits", {}).get(name, 0)
            station["busy_s"] += spent
            station["servers"] += 1
    return found


def against_roofline(run: Run) -> dict[str, Any] | None:
    """The report's `roofline`: rows/s of the bare model, or the least time of a text model's steps."""
    if run.text_roofline is not None:
        device = run.snapshot.device
        drawn = (device.get("tokens") or {}).get("output", 0.0)
        usual = mean_size(run.snapshot.batches)
        return report_sections.against_text_roofline(
            device.get("steps") or {}, run.text_roofline, run.wall_s, drawn, usual
        )
    if run.roofline is None:
        return None
    return {
        "rows_per_s": run.roofline.rows_per_s,
        "at_rows": run.roofline.at_rows,
        "arrangement": run.roofline.arrangement,
        "efficiency": rates_section(run).get("rows_per_s", 0.0) / run.roofline.rows_per_s,
        "measured": list(run.roofline.measured),
        "raised": run.roofline.raised,
    }


def failures(progress: Progress, snapshot: Snapshot, allowed: float) -> FailuresSection | None:
    """`{count, of, share, allowed, first}` of what the workload says has failed, else of the requests whose batch did;
    `first` is what the first one was told. None where nothing has failed.
    """
    count, of = progress.failed, progress.done
    if count is None:
        count = snapshot.errors.get("failed", 0)
        of = snapshot.requests + sum(snapshot.errors.get(kind, 0) for kind in LOST)
    if not count:
        return None
    return {
        "count": count,
        "of": of,
        "share": count / max(of, 1),
        "allowed": allowed,
        "first": progress.failure or snapshot.failure or None,
    }


def memory_section(snapshot: Snapshot) -> MemorySection:
    """`rss_peak_mb` adds up the processes' own peaks, memory that they share counted in each. `fragmentation` is the
    share of what torch's allocator has reserved on the device that no tensor ever filled.
    """
    device, steps = snapshot.device, snapshot.device.get("steps") or {}
    allocated, reserved = device.get("allocated_mb"), device.get("reserved_mb")
    return {
        "rss_peak_mb": snapshot.rss_peak_mb,
        "device_peak_mb": device.get("peak_mb", reserved),
        "fragmentation": max(0.0, 1 - allocated / reserved) if reserved and allocated is not None else None,
        "freed_mb": steps.get("freed_bytes", 0) / 2**20,
        "shortages": steps.get("shortages", 0),
        "resized": steps.get("resized", 0),
    }


def evidence(run: Run) -> Evidence:
    """The run as the verdict sees it; of a run over nodes the one in the middle, with what is known of all."""
    whole, run = run, _typical(run)
    snapshot = run.snapshot
    on_cpu = "reserved_mb" not in snapshot.device
    return Evidence(
        wall_s=run.wall_s,
        lanes=[{**lane, "stations": time_s([lane], run.wall_s)} for lane in snapshot.lanes],
        requests=snapshot.requests,
        lost=sum(snapshot.errors.get(kind, 0) for kind in LOST),
        cancelled=snapshot.errors.get("cancelled", 0) if run.status == "partial" else 0,
        rows_per_s=rates_section(run).get("rows_per_s", 0.0),
        rows_mean=batches_section(snapshot)["rows_mean"] or 0.0,
        batch_s=snapshot.batch_s,
        slots=round(slots_of_a_lane(snapshot)),
        steps=snapshot.device.get("steps", {}),
        pages_given=(run.settings.get("backends", {}).get(run.backend) or {}).get("pages") is not None,
        model=snapshot.device.get("model", {}),
        reasons=snapshot.reasons,
        latency_s=summarise(snapshot.latency).get("mean", 0.0),
        queue_wait_s=summarise(snapshot.queue_wait).get("mean", 0.0),
        longest_wait_s=summarise(snapshot.queue_wait).get("p95", 0.0),
        roofline=run.roofline,
        text_roofline=(against_roofline(run) or {}) if run.text_roofline is not None else {},
        facts=run.progress.facts,
        total=None if whole.progress.total is None else whole.progress.total - whole.progress.before,
        cores=machine.cores() if run.core_count is None else run.core_count,
        cpu_s=snapshot.cpu_s,
        cpu_wait_s=snapshot.cpu_wait_s,
        others_cores=_on_average(run, "others_s"),
        stolen_cores=_on_average(run, "stolen_s"),
        unused_cores=_on_average(run, "idle_s"),
        staged=of_stages(snapshot, run.wall_s) or {},
        on_cpu=on_cpu,
        dtype=run.setup.dtype,
        computes=run.setup.model is not None or run.roofline is not None,
        bfloat16_pays=not on_cpu or has_bfloat16(),
        options=options(run, 0 if whole.snapshot.cluster is None else len(whole.snapshot.cluster.section["nodes"])),
        command=run.command,
        models=report_sections.model_lines(snapshot, run.wall_s),
        cluster=None if whole.snapshot.cluster is None else whole.snapshot.cluster.section,
        stopped=whole.status == "partial",
        node="" if run is whole else whole.snapshot.cluster.typical.name,
    )


def _typical(run: Run) -> Run:
    """The typical node of a run over nodes, as a run of its own; any other run as it is."""
    state = run.snapshot.cluster
    if state is None or state.typical is None:
        return run
    node = state.typical
    return replace(
        run,
        snapshot=node.snapshot,
        wall_s=node.wall_s,
        progress=Progress(0, facts=node.facts),
        roofline=node.roofline,
        text_roofline=node.text_roofline,
        cores=node.cores,
        core_count=node.core_count,
        counts_before={},
    )


def _on_average(run: Run, whose: str) -> float | None:
    """Their cores, averaged over the run."""
    shares: Mapping[str, Any] = report_sections.core_shares(run.snapshot, run.wall_s, run.cores, count=run.core_count)
    seconds: float | None = shares[whose]
    return None if seconds is None or run.wall_s <= 0 else seconds / run.wall_s


def options(run: Run, nodes: int = 0) -> dict[OptionFlag, dict[str, Any]]:
    """The options of the plugins in force with their values, as far as the settings show them, and the number format.

    What was left to a plugin has the value that it took, where that shows: in the backend's `device`, in the facts.
    """
    slots = round(slots_of_a_lane(run.snapshot)) or None
    taken: dict[OptionFlag, Mapping[str, Any]] = {
        "-B": {"slots": slots, **run.snapshot.device.get("in_force", {})},
        "-S": {},
        "-L": {},
        "--": {"batch_size": slots, **run.progress.facts},
    }
    found: dict[OptionFlag, Mapping[str, Any]] = {
        "-B": run.settings.get("backends", {}).get(run.backend) or {},
        "-S": run.settings.get("strategies", {}).get(run.strategy) or {},
        "--": {**(run.settings.get(run.workload) or {}), "dtype": run.setup.dtype},
    }
    if nodes:
        found["-L"] = {"nodes": nodes}
    return {
        flag: {name: taken[flag].get(name) if value is None else value for name, value in values.items()}
        for flag, values in found.items()
    }

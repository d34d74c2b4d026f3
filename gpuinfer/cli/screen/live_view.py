"""What the live view says, as words and numbers; `display` draws it."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuinfer.cli.screen import node_rows, workload_rows
from gpuinfer.host import compile_status
from gpuinfer.report import report_sections
from gpuinfer.report.report import doublings
from gpuinfer.stats import DiffusionCounters, Snapshot, counted_tokens, mean_size, summarise
from gpuinfer.units import MAGNITUDES, duration, left, left_until, number, short, whole

if TYPE_CHECKING:
    from gpuinfer.runtime.run import RunUpdate

WINDOW_S = 5.0  # rates are those of the last seconds, so that a change shows
LINE_EVERY_S = 5.0
FIRST_COUNTS = ("games", "simulations", "evaluations", "output_tokens", "input_tokens")
PER_MINUTE = ("games",)
RATES = 4  # at most, on one line
LEAST_SHARE = 0.005  # of all time: less is not worth a line
REST = "around it"  # event loops, threads that no lane knows of: between the stations
NOT_OURS = ("other programs", "other machines", "idle")  # of the cores' time


class ProgressPace:
    """Rates over the last few seconds, from totals."""

    def __init__(self) -> None:
        self._past: deque[tuple[float, dict[str, float]]] = deque()

    def add(self, update: RunUpdate) -> None:
        if preparing(update):
            return
        if self._past and update.elapsed_s < self._past[-1][0]:  # the clock starts anew after the setup
            self._past.clear()
        snapshot = update.snapshot
        counts = {**update.progress.counts, row_word(snapshot.slots): snapshot.rows, **counted_tokens(snapshot)}
        self._past.append((update.elapsed_s, counts))
        while len(self._past) > 2 and self._past[1][0] <= update.elapsed_s - WINDOW_S:
            self._past.popleft()

    def rates(self) -> dict[str, float]:
        """Per second, by count; those that people look for come first."""
        if len(self._past) < 2 or self._past[-1][0] <= self._past[0][0]:
            return {}
        (start, before), (end, now) = self._past[0], self._past[-1]
        names = [*(name for name in FIRST_COUNTS if name in now), *(name for name in now if name not in FIRST_COUNTS)]
        return {name: max(0.0, now[name] - before.get(name, 0.0)) / (end - start) for name in names}


class ViewLines:
    """Plain progress: a line every few seconds, and one for each new phase."""

    def __init__(self) -> None:
        self._last = -math.inf
        self._note = ""

    def due(self, update: RunUpdate, rates: Mapping[str, float]) -> str:
        """The line to print now, or nothing."""
        if preparing(update):
            changed, self._note = note_of(update) != self._note, note_of(update)
            return f"{self._note} …" if changed and self._note else ""
        if update.elapsed_s - self._last < LINE_EVERY_S:
            return ""
        self._last = update.elapsed_s
        parts = [
            duration(update.elapsed_s),
            done_of(update),
            *rates_of(rates),
            *node_rows.nodes_in_line(nodes_of(update)),
            *batch_texts(update.snapshot),
            *gone_on(update.snapshot),
            *device_shares(update.snapshot),
            *workload_of(update.progress.facts),
            left_of(update),
        ]
        return " · ".join(filter(None, parts))


@dataclass(frozen=True, slots=True)
class Chart:
    """Horizontal bars: label, share of the chart's width (0 to 1), value."""

    title: str
    remark: str
    bars: list[tuple[str, float, str]]


def batch_chart(snapshot: Snapshot, rows: int) -> Chart:
    """How many batches were of which size, in powers of two; the `rows` most common ones."""
    counts = Counter(doublings(snapshot.batches))
    most, total = max(counts.values(), default=0), counts.total()
    common = sorted(size for size, _ in counts.most_common(rows))
    bars = [(f"≤ {whole(size)}", counts[size] / most, f"{counts[size] / total:.0%}") for size in common]
    mean = f"mean {whole(mean_size(snapshot.batches))}" if total else "none yet"
    if snapshot.slots:
        return Chart("rows in a step", f"{mean} of {whole(snapshot.slots)} slots" if total else mean, bars)
    return Chart("rows in a batch", mean, bars)


def time_chart(update: RunUpdate, rows: int) -> Chart:
    """Where the time goes, the `rows` largest parts: of the cores where the model is on them, else of the lanes."""
    snapshot = update.snapshot
    cores = None if "reserved_mb" in snapshot.device else update.cores
    parts: Counter[str] = Counter()
    if cores is not None and cores["stations"]:
        parts.update(on_cores(cores))  # type: ignore[arg-type]  # seconds
        count, of = cores["count"], "core"
    else:
        for lane in snapshot.lanes:
            parts.update(lane["stations"])
        count, of = len(snapshot.lanes), "lane"
    remark = f"{count} {of}{'' if count == 1 else 's'}"
    total = sum(parts.values())
    shares = [
        (name, seconds / total) for name, seconds in parts.most_common(rows) if seconds >= LEAST_SHARE * total > 0
    ]
    bars = [(name, share, f"{share:.0%}") for name, share in shares]
    return Chart("where the time goes", remark if shares else "none yet", bars)


def on_cores(cores: Mapping[str, Any]) -> dict[str, float]:
    """The parts of the cores' time, of a report's `cores`: stations, what else this program ran, and what was not its
    own as far as that is known.
    """
    busy, stations = cores["busy_s"], cores["stations"]
    ours = {**stations, REST: stations.get(REST, 0.0) + max(0.0, busy - math.fsum(stations.values()))}
    theirs = zip(NOT_OURS, (cores["others_s"], cores["stolen_s"], cores["idle_s"]), strict=True)
    return {**ours, **{name: seconds for name, seconds in theirs if seconds}}


def nodes_of(update: RunUpdate) -> Mapping[str, Any] | None:
    """The report's `cluster` as it is now; None of a run that is not over nodes."""
    state = update.snapshot.cluster
    return None if state is None else state.section


def preparing(update: RunUpdate) -> bool:
    return update.progress.setup or update.elapsed_s <= 0 or update.phase in ("starting", compile_status.NOTE)


def note_of(update: RunUpdate) -> str:
    """What is going on, when it is not the work itself."""
    return "" if update.phase == "running" else update.phase


def done_of(update: RunUpdate) -> str:
    progress = update.progress
    total = "" if progress.total is None else f" of {whole(progress.total)}"
    return f"{whole(progress.done)}{total} {progress.unit}"


def left_of(update: RunUpdate, brief: bool = False) -> str:
    """The time left at the average pace and, unless `brief`, when that will be; empty while that is not known, such as
    when no node is there.
    """
    progress = update.progress
    if node_rows.none_there(nodes_of(update)):
        return ""
    worked = progress.done - progress.before + progress.begun
    if not progress.total or worked <= 0 or update.elapsed_s <= 0:
        return ""
    seconds = max(0.0, (progress.total - progress.before - worked) * update.elapsed_s / worked)
    return left(seconds) if brief else left_until(seconds)


def row_word(slots: int) -> str:
    """The name of the model's rows: sequences of text, where a row of a file may ask for several samples, else rows."""
    return "sequences" if slots else "rows"


def rates_of(rates: Mapping[str, float]) -> list[str]:
    """Such as `512 games/min`; rows and cached tokens only when there are some, and nothing says more."""
    quiet = [name for name in ("rows", "sequences", "cached_tokens") if not rates.get(name)]
    quiet += ["rows"] if "evaluations" in rates else []
    named = {name.replace("_", " "): rate for name, rate in rates.items() if name not in quiet}
    texts = [
        f"{number(rate * 60)} {name}/min" if name in PER_MINUTE else f"{number(rate)} {name}/s"
        for name, rate in named.items()
    ]
    return texts[:RATES]


def value_and_unit(rate: str) -> tuple[str, str]:
    """The two parts of a rate such as `1.2 k output tokens/s`."""
    words = rate.split(" ")
    unit_at = 2 if len(words) > 2 and words[1] in MAGNITUDES else 1
    return " ".join(words[:unit_at]), " ".join(words[unit_at:])


def health_of(update: RunUpdate, rates: Mapping[str, float]) -> list[str]:
    """The queue, the device and how near the roofline is."""
    snapshot = update.snapshot
    parts = [
        *gone_on(snapshot),
        f"{whole(snapshot.waiting)} rows waiting",
        *tokens_come(snapshot),
        *device_of(snapshot.device),
    ]
    if several := snapshot.device.get("devices"):
        rows = sum(device["rows"] for device in several.values())
        shares = {name: f"{name} {device['rows'] / max(rows, 1):.0%} of the rows" for name, device in several.items()}
        parts.append(
            ", ".join(f"{name} failed" if several[name]["failed"] else share for name, share in shares.items())
        )
    parts += unmasked_of(snapshot)
    parts += device_shares(snapshot)
    parts += workload_of(update.progress.facts)
    if update.roofline and update.roofline.rows_per_s and (rate := rates.get(row_word(snapshot.slots))):
        share = rate / update.roofline.rows_per_s
        parts.append(f"{share:.0%} of the roofline" if share <= 1 else "above the roofline measured before")
    if update.text_roofline is not None:
        steps = snapshot.device.get("steps") or {}
        usual = mean_size(snapshot.batches)
        if found := report_sections.against_text_roofline(steps, update.text_roofline, update.elapsed_s, 0.0, usual):
            parts.append(f"{found['efficiency']:.0%} of what this machine can do with this model")
    return parts


def gone_on(snapshot: Snapshot) -> Iterator[str]:
    """Which backend goes on since the server is gone, and in how many processes."""
    for name, line in snapshot.fallback.items():
        count = line["processes"]
        yield f"the server is gone: {name} goes on in {count} process{'es' if count > 1 else ''}"


def tokens_come(snapshot: Snapshot) -> Iterator[str]:
    """How the tokens of an answer come, by the medians of those that are complete."""
    if first := summarise(snapshot.first_token):
        between = summarise(snapshot.between_tokens)
        yield f"first token after {short(first['p50'])}" + (f", then every {short(between['p50'])}" if between else "")


def unmasked_of(snapshot: Snapshot) -> Iterator[str]:
    """What comes of a diffusion model's forwards, since the start."""
    if found := DiffusionCounters.of(snapshot.device.get("steps")):
        yield f"{found.tokens_per_forward:.2g} tokens a forward"
        yield f"{found.computed_share:.0%} of positions computed anew"


def device_shares(snapshot: Snapshot) -> Iterator[str]:
    """Of several models, what each has had of the device."""
    had = {name: line["device_s"] for name, line in snapshot.models.items()}
    if total := math.fsum(had.values()):
        yield f"device: {', '.join(f'{name} {seconds / total:.0%}' for name, seconds in had.items())}"


def workload_of(facts: Mapping[str, float]) -> list[str]:
    """What the workload tells of itself, such as how its games stand."""
    parts = (
        workload_rows.rollouts_live,
        workload_rows.strength_live,
        workload_rows.resignation_live,
        workload_rows.training_live,
    )
    return [text for part in parts for text in part(facts)]


def device_of(device: Mapping[str, Any]) -> Iterator[str]:
    if name := device.get("name"):
        busy = device.get("utilisation")
        yield str(name) if busy is None else f"{name} {busy:.0%} busy"
    if device.get("reserved_mb"):
        yield f"{number(device['reserved_mb'] * 2**20)}B on the device"


def with_failed(errors: Mapping[str, int], failed: int | None) -> Mapping[str, int]:
    """These of requests, and what the workload itself counts as failed: more, where rows could not even be asked."""
    return {**errors, "failed": max(failed, errors.get("failed", 0))} if failed else errors


def errors_of(errors: Mapping[str, int] | None) -> str:
    """Such as `3 failed, 1 expired`; empty when there were none."""
    return ", ".join(f"{whole(count)} {name}" for name, count in (errors or {}).items() if count)


def batch_texts(snapshot: Snapshot) -> list[str]:
    if not snapshot.batches:
        return []
    mean = whole(mean_size(snapshot.batches))
    return [f"{mean} of {whole(snapshot.slots)} slots in use" if snapshot.slots else f"{mean} rows a batch"]

"""The figures of a run by its workload's own steps (training steps, games, groups, rows), while it goes on: for
trackers, and for callers of `run` with `on_figures`.

`<workload>/…` are the workload's own: the figures of its steps, and its facts. The others are the engine's, of the
time since the figures before: `throughput/…`, `batch/rows`, `queue/…`, `latency/mean_s`, `time/…` (shares of the lanes'
time by station), `device/…`, `errors/…` (all until now).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gpuinfer.api import Progress
from gpuinfer.host import error_text
from gpuinfer.stats import Snapshot, counted_tokens, mean_size, since

if TYPE_CHECKING:
    from gpuinfer.runtime.run import RunUpdate

EVERY_S = 1.0  # between the engine's figures, at first
POINTS = 500  # later a 500th of the run's time, so that a run of days has a few thousand of them
SETTINGS = ("workers", "blocks", "clients", "threads", "games_in_flight", "rows_outstanding", "offered_rows_per_s")
"""Facts that say how the run was set up (`Progress.facts`): no figures, as are those that do not change."""

OnFigures = Callable[[int, Mapping[str, float]], None]
"""Takes the figures of a step, by name. It is called on a run's event loop, and returns at once."""

log = logging.getLogger(__name__)


class RunFigures:
    """Passes the figures of one run to `on_figures`, which is called no more once it has raised."""

    def __init__(self, workload: str, on_figures: OnFigures | None) -> None:
        self._workload, self._on_figures = workload, on_figures
        self._by_step: set[str] = set()  # figures that the workload has by step: facts of these names are older
        self._before: RunUpdate | None = None

    def add(self, progress: Progress) -> None:
        """The figures of the steps that this progress reports."""
        for step, figures in progress.figures if self._on_figures is not None else ():
            self._by_step.update(figures)
            self._pass_on(step, {self._name(name): value for name, value in figures.items()})

    def look(self, update: RunUpdate, last: bool = False) -> None:
        """The engine's figures and the workload's facts, where it has come further and it is time."""
        if self._on_figures is None or update.progress.setup or update.elapsed_s <= 0:
            return
        before = self._before
        if before is None or update.elapsed_s < before.elapsed_s:  # the clock starts
            self._before = update
            return
        passed_s = update.elapsed_s - before.elapsed_s
        due = last or passed_s >= max(EVERY_S, update.elapsed_s / POINTS)
        if due and passed_s > 0 and update.progress.done > before.progress.done:
            self._before = update
            known = before.progress.facts
            changed = {
                name.replace(": ", "_"): one
                for name, one in update.progress.facts.items()
                if known.get(name, one) != one
            }
            own = {self._name(name): one for name, one in changed.items() if name not in (*SETTINGS, *self._by_step)}
            self._pass_on(update.progress.done, {**own, **dict(_of_engine(before, update, passed_s))})

    def _name(self, name: str) -> str:
        return name if "/" in name else f"{self._workload}/{name}"

    def _pass_on(self, step: int, figures: Mapping[str, Any]) -> None:
        if self._on_figures is None:
            return
        try:
            self._on_figures(step, {name: float(value) for name, value in figures.items()})
        except Exception as error:  # noqa: BLE001 (it is not ours, and no reason to lose a run)
            self._on_figures = None
            log.warning(
                "on_figures raised %s: it is called no more, and the run goes on.",
                error_text.short_message(error),
            )


def _of_engine(before: RunUpdate, now: RunUpdate, passed_s: float) -> Iterator[tuple[str, float]]:
    counted = since(now.snapshot, before.snapshot)
    counts = {name: count - before.progress.counts.get(name, 0.0) for name, count in now.progress.counts.items()}
    tokens, requests = counted_tokens(counted), {"rows": counted.rows, "requests": counted.requests}
    for name, count in {**counts, **(requests if counted.rows else {}), **tokens}.items():
        rate = max(0.0, count) / passed_s
        yield (f"throughput/{name}_per_min", rate * 60) if name == "games" else (f"throughput/{name}_per_s", rate)
    if counted.batches:
        yield "batch/rows", mean_size(counted.batches)
    yield "queue/rows", now.snapshot.waiting
    for name, histogram in (("queue/wait_mean_s", counted.queue_wait), ("latency/mean_s", counted.latency)):
        if times := sum(histogram["counts"].values()):
            yield name, histogram["total"] / times
    yield from _of_lanes(counted)
    if now.roofline is not None and now.roofline.rows_per_s:
        yield "throughput/efficiency", counted.rows / passed_s / now.roofline.rows_per_s
    for name in ("utilisation", "reserved_mb"):
        if (value := now.snapshot.device.get(name)) is not None:
            yield f"device/{name}", value
    yield from ((f"errors/{kind}", count) for kind, count in now.snapshot.errors.items() if count)


def _of_lanes(counted: Snapshot) -> Iterator[tuple[str, float]]:
    seconds: dict[str, float] = {}
    for lane in counted.lanes:
        for station, spent in lane["stations"].items():
            seconds[station] = seconds.get(station, 0.0) + spent
    total = math.fsum(seconds.values())
    yield from ((f"time/{station}", spent / total) for station, spent in seconds.items() if total > 0)

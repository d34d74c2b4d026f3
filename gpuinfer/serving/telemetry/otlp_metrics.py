"""The metrics of `/metrics` over OTLP, at the interval that OTEL_METRIC_EXPORT_INTERVAL says.

A family becomes a metric of the same name (a counter's without `_total`, which Prometheus adds to it again), so that
what was written for `/metrics` finds the same series behind a collector. Counters and histograms are cumulative.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any

from gpuinfer import __version__
from gpuinfer.host import otlp
from gpuinfer.serving.monitoring.metrics import Distribution, Family

log = logging.getLogger(__name__)

INTERVAL_MS = 60_000.0  # where the variable says nothing
COLLECT_S = 5.0  # for the event loop to give its counters
UNITS = {"_seconds": "s", "_bytes": "By", "_ratio": "1"}

Collect = Callable[[], Awaitable[Sequence[Family]]]


class MetricsExport:
    """Exports in a thread of its own, from `start` to `close`."""

    def __init__(self, url: str | None, resource: Any) -> None:
        """`url`: of the collector's route for metrics; None: as the SDK's variables say."""
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        self._exporter, self._resource = OTLPMetricExporter(url), resource
        self._interval_s = _interval_ms() / 1e3
        self._started_ns = time.time_ns()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, collect: Collect) -> None:
        """Export what `collect` gives, which is awaited on the present event loop."""
        loop = asyncio.get_running_loop()
        arguments = (collect, loop)
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True, name="gpuinfer otlp metrics")
        self._thread.start()

    def close(self) -> None:
        """Export once more. Takes as long as the collector does; the event loop has to go on meanwhile."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._exporter.shutdown()

    def _run(self, collect: Collect, loop: asyncio.AbstractEventLoop) -> None:
        while not self._ended.wait(self._interval_s):
            self._export(collect, loop)
        self._export(collect, loop)

    def _export(self, collect: Collect, loop: asyncio.AbstractEventLoop) -> None:
        async def families() -> Sequence[Family]:
            return await collect()

        made = families()
        collecting: Future[Sequence[Family]] | None = None
        try:
            collecting = asyncio.run_coroutine_threadsafe(made, loop)
            found = collecting.result(COLLECT_S)
            self._exporter.export(metrics_data(found, self._resource, self._started_ns, time.time_ns()))
        except Exception as error:  # noqa: BLE001 (a plugin's counters, the SDK, a loop that has ended)
            if collecting is None:
                made.close()
            else:
                collecting.cancel()  # on its loop: it may be under way there
            log.warning("metrics could not be exported over OTLP: %s: %s", type(error).__name__, error)


def _interval_ms() -> float:
    text = otlp.variable("METRIC_EXPORT_INTERVAL")
    try:
        interval_ms = float(text or INTERVAL_MS)
    except ValueError:
        interval_ms = 0.0
    if not 1 <= interval_ms <= 86_400_000:
        log.warning("OTEL_METRIC_EXPORT_INTERVAL=%s: no number of milliseconds. Set it to 10000 or so.", text)
        return INTERVAL_MS
    return interval_ms


def metrics_data(families: Sequence[Family], resource: Any, started_ns: int, now_ns: int) -> Any:
    """The SDK's `MetricsData` of these families, whose counters began at `started_ns`."""
    from opentelemetry.sdk.metrics import export
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    cumulative = export.AggregationTemporality.CUMULATIVE

    def point(labels: Any, value: float | Distribution) -> Any:
        if not isinstance(value, Distribution):
            return export.NumberDataPoint(dict(labels), started_ns, now_ns, float(value), ())
        below = [0, *(count for _, count in value.buckets)]
        return export.HistogramDataPoint(
            attributes=dict(labels),
            start_time_unix_nano=started_ns,
            time_unix_nano=now_ns,
            count=value.count,
            sum=value.total,
            bucket_counts=[after - before for before, after in itertools.pairwise(below)],
            explicit_bounds=[bound for bound, _ in value.buckets[:-1]],
            min=None,  # type: ignore[arg-type]  # which a histogram of counters does not know
            max=None,  # type: ignore[arg-type]
            exemplars=(),
        )

    def data(family: Family) -> Any:
        points = [point(labels, value) for labels, value in family.samples]
        if family.kind == "counter":
            return export.Sum(points, cumulative, is_monotonic=True)
        return export.Gauge(points) if family.kind == "gauge" else export.Histogram(points, cumulative)

    metrics = [
        export.Metric(family.name, family.help, _unit(family.name), data(family))
        for family in families
        if family.samples
    ]
    scope = export.ScopeMetrics(InstrumentationScope("gpuinfer.serving", __version__), metrics, "")
    return export.MetricsData([export.ResourceMetrics(resource, [scope], "")])


def _unit(name: str) -> str:
    """In UCUM, by the name's end."""
    return next((unit for ending, unit in UNITS.items() if name.endswith(ending)), "")

"""All that a server process exports over OTLP, opened and closed together."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from gpuinfer.host import otlp
from gpuinfer.host.extras import missing_extra, require_extra
from gpuinfer.host.otlp import SIGNALS, Signal
from gpuinfer.serving.telemetry.otlp_logs import LogExport, LoggedRecord
from gpuinfer.serving.telemetry.otlp_metrics import MetricsExport
from gpuinfer.serving.telemetry.spans import NO_SPANS, OtelSpans, Spans

log = logging.getLogger(__name__)

FLAG = "--otlp-endpoint"
CLOSE_S = 3.0  # for what is left to reach its collector at the end
SDK_LOG = logging.getLogger("opentelemetry")
WARN_S = 60.0  # from one warning about a collector to the next


@dataclass(frozen=True)
class Telemetry:
    """What is exported. Nothing of it waits for the collector: what finds no room in its queue is dropped."""

    spans: Spans = NO_SPANS
    metrics: MetricsExport | None = None
    logs: LogExport | None = None

    def report(self, message: str) -> None:
        """Export a message for people as a log record."""
        if self.logs is not None:
            self.logs.export(LoggedRecord(time.time(), logging.INFO, "gpuinfer.serve", message))

    def close(self) -> None:
        """Send what is left; returns after `CLOSE_S` at the latest. The event loop has to go on meanwhile."""
        parts = [self.spans.close, *(one.close for one in (self.metrics, self.logs) if one is not None)]
        threads = [threading.Thread(target=close, daemon=True, name="gpuinfer otlp end") for close in parts]
        for thread in threads:
            thread.start()
        until = time.monotonic() + CLOSE_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))


NO_TELEMETRY = Telemetry()


def open_telemetry(endpoint: str | None, facts: Mapping[str, str], signals: tuple[Signal, ...] = SIGNALS) -> Telemetry:
    """Of these signals those that the flag's endpoint or OpenTelemetry's variables ask for. `facts`: attributes of the
    resource.

    Raises `UsageError` for an endpoint that is no URL, and where the flag asks for what is not installed.
    """
    urls = otlp.destinations(FLAG, endpoint, signals)
    if not urls:
        return NO_TELEMETRY
    if endpoint:
        require_extra("otel", FLAG)
    elif (problem := missing_extra("otel", "telemetry, as OTEL_ variables ask for it,")) is not None:
        log.warning("%s", problem)
        return NO_TELEMETRY
    resource = otlp.resource(facts)
    spans = OtelSpans(urls["traces"], resource) if "traces" in urls else NO_SPANS
    metrics = MetricsExport(urls["metrics"], resource) if "metrics" in urls else None
    logs = LogExport(urls["logs"], resource) if "logs" in urls else None
    if logs is not None:
        logs.attach()
    SDK_LOG.handlers, SDK_LOG.propagate = [_CollectorTrouble()], False
    return Telemetry(spans, metrics, logs)


class _CollectorTrouble(logging.Handler):
    """What the SDK says of its collector, in our log: once a minute at most, as it repeats itself for each batch."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._warned_at = -WARN_S

    def emit(self, record: logging.LogRecord) -> None:
        if time.monotonic() - self._warned_at >= WARN_S:
            self._warned_at = time.monotonic()
            why = "telemetry does not reach its collector, and some of it is lost. Check its address. OpenTelemetry: %s"
            log.warning(why, record.getMessage())

"""The thread that exports metrics over OTLP, where the event loop does not give them."""

from __future__ import annotations

import asyncio
import threading

from otlp_receiver import receiving

from gpuinfer.serving.monitoring.metrics import single_sample
from gpuinfer.serving.telemetry import otlp_metrics
from gpuinfer.serving.telemetry.otlp_metrics import MetricsExport

LIMIT_S = 60


async def test_counters_that_come_too_late_are_given_up_on_their_own_loop_and_the_next_are_exported(monkeypatch):
    from opentelemetry.sdk.resources import Resource

    monkeypatch.setattr(otlp_metrics, "COLLECT_S", 0.05)
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "10")
    ended, given_up_on = asyncio.Event(), []

    async def collect():
        if not given_up_on:
            try:
                await asyncio.Event().wait()
            finally:
                given_up_on.append(threading.current_thread())
                monkeypatch.setattr(otlp_metrics, "COLLECT_S", LIMIT_S)
        ended.set()
        return [single_sample("gpuinfer_some", "Some.", "gauge", 1.0)]

    with receiving() as received:
        export = MetricsExport(f"{received.url}/v1/metrics", Resource({}))
        export.start(collect)
        try:
            await asyncio.wait_for(ended.wait(), LIMIT_S)
        finally:
            await asyncio.to_thread(export.close)
        assert given_up_on == [threading.current_thread()]
        assert "gpuinfer_some" in received.latest()

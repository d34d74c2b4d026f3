"""One OpenTelemetry span for each request, exported over OTLP/HTTP in batches by the SDK's own thread; without
OpenTelemetry nothing, at no cost. A span is a child of what the request's `traceparent` names. That of a text answer
has the events `admitted` (to a slot; the time before it was spent in the queue) and `first token` (before it the
prompt was computed, after it the answer).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from gpuinfer import __version__
from gpuinfer.errors import UsageError
from gpuinfer.generation import Generation


class RequestSpan:
    """The span of one request; this one is written nowhere."""

    def generated(self, answers: Generation) -> None:
        """The answer is complete now."""

    def failed(self, why: str) -> None:
        """The request has failed."""

    def end(self) -> None:
        """The request is over."""


class Spans:
    """Begins spans; these are written nowhere. `wanted`: whether spans are exported."""

    wanted = False

    def begin(self, name: str, traceparent: str | None, attributes: Mapping[str, str]) -> RequestSpan:
        """A span, below what `traceparent` names."""
        return NO_SPAN

    def close(self) -> None:
        """Send what is left. Takes as long as the collector does."""


NO_SPAN, NO_SPANS = RequestSpan(), Spans()


log = logging.getLogger(__name__)

VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
EXPORT_S = 5.0  # for a batch to reach its collector
MISSING = "OpenTelemetry is not installed. Run: pip install 'gpuinfer[otel]'"


def open_spans(endpoint: str | None, model: str) -> Spans:
    """To the endpoint that the flag or, without it, OpenTelemetry's own variable names; else none.

    Raises `UsageError` where the flag asks for what is not installed.
    """
    place = endpoint or os.environ.get(VARIABLE)
    if not place:
        return NO_SPANS
    if not place.startswith(("http://", "https://")):
        raise UsageError(f"spans are sent over HTTP, and {place} is no such address. Give http://host:4318.")
    try:
        return OtelSpans(place, model)
    except ImportError as error:
        if endpoint:
            raise UsageError(f"--otlp-endpoint: {MISSING}") from error
        log.warning("%s is set, and %s", VARIABLE, MISSING)
        return NO_SPANS


class OtelSpans(Spans):
    """Spans that are exported over OTLP/HTTP."""

    wanted = True

    def __init__(self, endpoint: str, model: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        url = endpoint if endpoint.endswith("/v1/traces") else f"{endpoint.rstrip('/')}/v1/traces"
        about = {"service.name": "gpuinfer", "service.version": __version__, "gen_ai.request.model": model}
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, timeout=EXPORT_S)))
        self._tracer = self._provider.get_tracer("gpuinfer.serving", __version__)
        self._extract, self._kind = TraceContextTextMapPropagator().extract, SpanKind.SERVER

    def begin(self, name: str, traceparent: str | None, attributes: Mapping[str, str]) -> OtelSpan:
        parent = None if traceparent is None else self._extract({"traceparent": traceparent})
        return OtelSpan(self._tracer.start_span(name, parent, self._kind, attributes))

    def close(self) -> None:
        self._provider.shutdown()


class OtelSpan(RequestSpan):
    """The span of one request."""

    def __init__(self, span: Any) -> None:
        self._span = span

    def generated(self, answers: Generation) -> None:
        now = time.time_ns()
        admitted = now - round(answers.seconds * 1e9)
        self._span.add_event("admitted", timestamp=admitted)
        self._span.add_event("first token", timestamp=admitted + round(answers.first_token_s * 1e9))
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": answers.prompt_tokens,
                "gen_ai.usage.output_tokens": sum(len(one.tokens) for one in answers.completions),
            }
        )

    def failed(self, why: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_status(Status(StatusCode.ERROR, why))

    def end(self) -> None:
        self._span.end()

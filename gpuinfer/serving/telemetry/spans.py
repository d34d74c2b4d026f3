"""One OpenTelemetry span for each request, exported over OTLP/HTTP in batches by the SDK's own thread; without
OpenTelemetry nothing, at no cost. A span is a child of what the request's `traceparent` names. That of a text answer
has the events `admitted` (to a slot; the time before it was spent in the queue) and `first token` (before it the
prompt was computed, after it the answer).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from msgspec import Struct

from gpuinfer import __version__
from gpuinfer.generation import Generation


class RequestSpan:
    """The span of one request; this one is written nowhere."""

    def active(self) -> contextlib.AbstractContextManager[object]:
        """While it is entered, what is logged in this context belongs to the span."""
        return contextlib.nullcontext()

    def ids(self) -> Mapping[str, str]:
        """`trace_id` and `span_id` in hexadecimal; nothing of a span that is not exported."""
        return {}

    def generated(self, answers: Generation) -> None:
        """The answer is complete now."""

    def failed(self, why: str) -> None:
        """The request has failed."""

    def end(self, status: int) -> None:
        """The request is over, and was answered with this HTTP status; 0: with none."""


class FinishedSpan(Struct, frozen=True, array_like=True):
    """A span that another process has recorded. Times in nanoseconds since 1970."""

    name: str
    kind: Literal["server", "client"]
    trace_id: bytes  # 16 bytes
    span_id: bytes  # 8 bytes
    parent_id: bytes  # 8 bytes; empty: it has no parent
    start_ns: int
    end_ns: int
    attributes: dict[str, str | int]
    error: str = ""  # what failed, in a word; empty: nothing


class Spans:
    """Begins spans; these are written nowhere. `wanted`: whether spans are exported."""

    wanted = False

    def begin(self, name: str, traceparent: str | None, attributes: Mapping[str, str]) -> RequestSpan:
        """A span, below what `traceparent` names."""
        return NO_SPAN

    def add(self, finished: Iterable[FinishedSpan]) -> None:
        """Export spans that another process has recorded. Returns at once."""

    def close(self) -> None:
        """Send what is left. Takes as long as the collector does."""


NO_SPAN, NO_SPANS = RequestSpan(), Spans()


class OtelSpans(Spans):
    """Spans that are exported over OTLP/HTTP."""

    wanted = True

    def __init__(self, url: str | None, resource: Any) -> None:
        """`url`: of the collector's route for traces; None: as the SDK's variables say."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(OTLPSpanExporter(url))
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("gpuinfer.serving", __version__)
        self._routed = InstrumentationScope("gpuinfer.router", __version__)
        self._extract, self._kinds = TraceContextTextMapPropagator().extract, SpanKind

    def begin(self, name: str, traceparent: str | None, attributes: Mapping[str, str]) -> OtelSpan:
        parent = None if traceparent is None else self._extract({"traceparent": traceparent})
        return OtelSpan(self._tracer.start_span(name, parent, self._kinds.SERVER, attributes))

    def add(self, finished: Iterable[FinishedSpan]) -> None:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

        sampled = TraceFlags(TraceFlags.SAMPLED)
        for one in finished:
            trace = int.from_bytes(one.trace_id)
            parent = SpanContext(trace, int.from_bytes(one.parent_id), True, sampled) if one.parent_id else None
            span = ReadableSpan(
                one.name,
                SpanContext(trace, int.from_bytes(one.span_id), False, sampled),
                parent,
                self._provider.resource,
                one.attributes,
                kind=self._kinds.SERVER if one.kind == "server" else self._kinds.CLIENT,
                status=Status(StatusCode.ERROR, one.error) if one.error else Status(),
                start_time=one.start_ns,
                end_time=one.end_ns,
                instrumentation_scope=self._routed,
            )
            self._processor.on_end(span)

    def close(self) -> None:
        self._provider.shutdown()


class OtelSpan(RequestSpan):
    """The span of one request."""

    def __init__(self, span: Any) -> None:
        self._span = span

    def active(self) -> contextlib.AbstractContextManager[object]:
        from opentelemetry.trace import use_span

        active: contextlib.AbstractContextManager[object]
        active = use_span(self._span, record_exception=False, set_status_on_exception=False)
        return active

    def ids(self) -> Mapping[str, str]:
        context = self._span.get_span_context()
        if not context.trace_flags.sampled:
            return {}
        return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}

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

    def end(self, status: int) -> None:
        if status:
            self._span.set_attribute("http.response.status_code", status)
        self._span.end()

"""A span for each request, where OpenTelemetry is wanted (`otel`); else nothing, at no cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from gpuinfer.generation import Generation

if TYPE_CHECKING:
    from gpuinfer.http.exchange import Exchange
    from gpuinfer.serving.asking import Asking


class Span(Protocol):
    """One request's."""

    def generated(self, answers: Generation) -> None: ...
    def failed(self, why: str) -> None: ...
    def end(self) -> None: ...


class Spans(Protocol):
    """Where spans begin."""

    def begin(self, exchange: Exchange, asking: Asking) -> Span: ...
    def close(self) -> None: ...


class _NoSpan:
    def generated(self, answers: Generation) -> None: ...
    def failed(self, why: str) -> None: ...
    def end(self) -> None: ...


class _NoSpans:
    def begin(self, exchange: Exchange, asking: Asking) -> Span:
        return NO_SPAN

    def close(self) -> None: ...


NO_SPAN: Span = _NoSpan()
NO_SPANS: Spans = _NoSpans()

"""A span for each request, where OpenTelemetry is wanted; else nothing, at no cost."""

from __future__ import annotations

from typing import Protocol

from gpuinfer.generation import Generation
from gpuinfer.http.exchange import Exchange
from gpuinfer.serving.asking import Asking


class Span(Protocol):
    """One request's."""

    def event(self, name: str, seconds: float | None = None) -> None: ...
    def generated(self, answers: Generation) -> None: ...
    def failed(self, why: str) -> None: ...
    def end(self) -> None: ...


class Spans(Protocol):
    """Where spans begin."""

    def begin(self, exchange: Exchange, asking: Asking) -> Span: ...
    def close(self) -> None: ...


class _NoSpan:
    def event(self, name: str, seconds: float | None = None) -> None: ...
    def generated(self, answers: Generation) -> None: ...
    def failed(self, why: str) -> None: ...
    def end(self) -> None: ...


class _NoSpans:
    _span = _NoSpan()

    def begin(self, exchange: Exchange, asking: Asking) -> Span:
        return self._span

    def close(self) -> None: ...


NO_SPANS: Spans = _NoSpans()

"""A span for each request, where OpenTelemetry is wanted (`otel`); else nothing, at no cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from gpuinfer.generation import Generation


class Span(Protocol):
    """One request's."""

    def generated(self, answers: Generation) -> None: ...
    def failed(self, why: str) -> None: ...
    def end(self) -> None: ...


class Spans(Protocol):
    """Where spans begin. `wanted`: whether anybody gets them."""

    wanted: bool

    def begin(self, name: str, traceparent: str | None, attributes: Mapping[str, str]) -> Span: ...
    def close(self) -> None: ...


class _NoSpan:
    def generated(self, answers: Generation) -> None: ...
    def failed(self, why: str) -> None: ...
    def end(self) -> None: ...


class _NoSpans:
    wanted = False

    def begin(self, name: str, traceparent: str | None, attributes: Mapping[str, str]) -> Span:
        return NO_SPAN

    def close(self) -> None: ...


NO_SPAN: Span = _NoSpan()
NO_SPANS: Spans = _NoSpans()

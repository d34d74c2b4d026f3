"""Which weights drew which tokens of an answer: spans (token, version), each up to where the next begins."""

from __future__ import annotations

Spans = tuple[tuple[int, str], ...]

START: Spans = ((0, ""),)
"""All by the weights of the start, which stands for no span at all as well."""


def then(spans: Spans, at: int, version: str) -> Spans:
    """The spans, where from token `at` on it is `version`."""
    kept = tuple(span for span in spans if span[0] < at)
    if not kept:
        kept = ((0, ""),) if at else ()
    return kept if kept and kept[-1][1] == version else (*kept, (at, version))


def until(spans: Spans, count: int) -> Spans:
    """Those of the first `count` tokens; one at least."""
    kept = tuple(span for span in spans if span[0] < max(count, 1))
    return kept if kept and not kept[0][0] else (START[0], *kept)


def begun_in(spans: Spans, start: int, end: int | None = None) -> Spans:
    """What a `Part` with the tokens from `start` to before `end` says of them; None: its sample's last part."""
    return tuple(span for span in spans if span != START[0] and start <= span[0] and (end is None or span[0] < end))

"""A snapshot as Prometheus reads it: the text that `/metrics` answers with.

Names and units follow https://prometheus.io/docs/practices/naming/: base units (seconds, bytes), `_total` for what only
grows, one meaning for each name. docs/monitoring.md lists them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from gpuinfer.monitoring.families import Distribution, Family, Labels, Value
from gpuinfer.monitoring.measured import measured
from gpuinfer.stats import Snapshot

if TYPE_CHECKING:
    from prometheus_client import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Floor: TypeAlias = dict[tuple[str, ...], float]
"""Of counters, what was told before. A server keeps one, and gives it to each call."""


def exposition(snapshot: Snapshot, more: Sequence[Family] = (), floor: Floor | None = None) -> bytes:
    """Prometheus' text format, to be served as CONTENT_TYPE; `more` are families beside those of the snapshot.

    Takes some milliseconds of a core: a server with little patience calls it in a thread. Counters rise from call to
    call as long as those of the snapshot do: `stats.merge` of replicas of which one has died does not, and
    `monitoring.lives.Lives` does. A lane that is just changing its station may be told a few microseconds too much;
    with `floor` such a second is not taken back, which Prometheus would take for a new start from zero.
    """
    from prometheus_client import CollectorRegistry, generate_latest

    families = list(measured(snapshot))
    if floor is not None:
        families = [_risen(family, floor) if family.kind == "counter" else family for family in families]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector([*families, *more]))
    return generate_latest(registry)


def _risen(family: Family, floor: Floor) -> Family:
    samples: list[tuple[Labels, Value]] = []
    for labels, value in family.samples:
        key = (family.name, *labels.values())
        if not isinstance(value, Distribution):
            value = floor[key] = max(value, floor.get(key, 0.0))
        samples.append((labels, value))
    return replace(family, samples=samples)


class _Collector:
    """Hands the families to a registry in the library's own form."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return map(_metric, self._families)


def _metric(family: Family) -> Metric:
    from prometheus_client import core

    makers = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
        "summary": core.SummaryMetricFamily,
    }
    names = list(family.samples[0][0]) if family.samples else []
    made: Any = makers[family.kind](family.name, family.help, labels=names)
    for labels, value in family.samples:
        values = [labels[name] for name in names]
        if not isinstance(value, Distribution):
            made.add_metric(values, value)
        elif family.kind == "summary":
            made.add_metric(values, value.count, value.total)
        else:
            made.add_metric(values, [(_bound(bound), times) for bound, times in value.buckets], value.total)
    metric: Metric = made
    return metric


def _bound(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(bound)

"""Metrics in Prometheus' text format: families of samples of a snapshot, of a fleet's replicas and of its router.

Names and units follow https://prometheus.io/docs/practices/naming/: base units (seconds, bytes), `_total` for what only
grows, one meaning for each name; docs/monitoring.md lists them all. Sets of labels are bounded, whatever plugins call
lanes and stations.
"""

from __future__ import annotations

import platform
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from gpuinfer import __version__
from gpuinfer.api import Priority, Reason
from gpuinfer.stats import (
    ERRORS,
    FLOOR,
    SUB_BUCKETS,
    ClassCount,
    DiffusionCounters,
    Snapshot,
    SpeculationCounters,
    counted_tokens,
)

if TYPE_CHECKING:
    from prometheus_client import Metric

Labels: TypeAlias = Mapping[str, str]
Kind: TypeAlias = Literal["counter", "gauge", "histogram", "summary"]

DURATIONS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 300.0),
)
"""Upper bounds in seconds of the buckets of durations: from a small network's forward to the longest timeout."""
SIZES = tuple(float(1 << power) for power in range(13))
"""Upper bounds in rows of the buckets of batch sizes: 1 to 4,096."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram's values: how many were at most each bound (cumulative, the last is infinity), and their sum."""

    buckets: tuple[tuple[float, int], ...]
    total: float

    @property
    def count(self) -> int:
        return self.buckets[-1][1]


Value: TypeAlias = float | Distribution


@dataclass(frozen=True, slots=True)
class Family:
    """The samples of one metric, each with the same names of labels. A counter's name is given without `_total`."""

    name: str
    help: str
    kind: Kind
    samples: Sequence[tuple[Labels, Value]]


def single_sample(name: str, help: str, kind: Kind, value: Value) -> Family:
    """A family of one sample without labels."""
    return Family(name, help, kind, [({}, value)])


def durations(wire: Mapping[str, Any]) -> Distribution:
    """A `stats.Histogram` in its wire form, in the coarser buckets of DURATIONS.

    One of its own buckets that a bound cuts in two counts where its middle is: an edge is off by 0.6 % at most.
    """
    counted = {FLOOR * 2 ** ((int(bucket) + 0.5) / SUB_BUCKETS): times for bucket, times in wire["counts"].items()}
    return distribution(counted, DURATIONS, wire["total"])


def sizes(counted: Mapping[int, int]) -> Distribution:
    """Batch sizes in rows → how many batches, in the buckets of SIZES."""
    return distribution(counted, SIZES, float(sum(size * times for size, times in counted.items())))


def distribution(
    counted: Mapping[float, int] | Mapping[int, int], bounds: Sequence[float], total: float
) -> Distribution:
    """Values → how often each occurred, as what is at most each of the ascending bounds, and at most infinity."""
    counts = [0] * (len(bounds) + 1)
    for value, times in counted.items():
        counts[bisect_left(bounds, value)] += times
    return Distribution(tuple(zip((*bounds, float("inf")), accumulate(counts), strict=True)), total)


MEGABYTE = 1 << 20
MOST_LANES, MOST_STATIONS = 16, 24  # kinds of lanes, and stations of each: what comes after them is `other`
MOST_MODELS = 32
OTHER = "other"
NAME = 100  # characters of a name from outside


def _models(snapshot: Snapshot) -> Iterator[Family]:
    """The counters of each model, where there are several."""
    lines = {short_name(name): line for name, line in list(snapshot.models.items())[:MOST_MODELS]}
    if not lines:
        return

    def by_model(what: str) -> list[tuple[dict[str, str], float]]:
        return [({"model": name}, line[what]) for name, line in lines.items()]

    for name, help_text in (
        ("requests", "Of several models in one server: requests that a model answered."),
        ("rows", "Rows of these."),
    ):
        yield Family(f"gpuinfer_model_{name}", help_text, "counter", by_model(name))
    for way, help_text in (("input", "Tokens of a model's prompts."), ("output", "Tokens of its answers.")):
        tokens = [({"model": name}, line["tokens"].get(way, 0)) for name, line in lines.items()]
        yield Family(f"gpuinfer_model_{way}_tokens", help_text, "counter", tokens)
    errors = [
        ({"model": name, "kind": kind}, line["errors"].get(kind, 0)) for name, line in lines.items() for kind in ERRORS
    ]
    yield Family("gpuinfer_model_errors", "As gpuinfer_errors, of each model.", "counter", errors)
    help_text = "Device time that it had, of all of the device."
    yield Family("gpuinfer_model_device_seconds", help_text, "counter", by_model("device_s"))
    help_text = "For how long its forwards waited while others had the device."
    yield Family("gpuinfer_model_turn_wait_seconds", help_text, "counter", by_model("turn_wait_s"))
    yield Family("gpuinfer_model_waiting_rows", "Rows that wait in its queue now.", "gauge", by_model("waiting"))
    waited: list[tuple[dict[str, str], Distribution]] = [
        ({"model": name}, durations(line["queue_wait"])) for name, line in lines.items()
    ]
    help_text = "From a request's arrival to its batch."
    yield Family("gpuinfer_model_queue_wait_seconds", help_text, "histogram", waited)


def _requests(snapshot: Snapshot) -> Iterator[Family]:
    # all classes that there may be, so that a counter is there before it first counts
    known = [priority.name.lower() for priority in Priority]
    names = [*known, *(name for name in snapshot.classes if name not in known)]
    classes = {name: snapshot.classes.get(name) or ClassCount().to_wire() for name in names}

    def by_class(what: str) -> list[tuple[dict[str, str], float]]:
        return [({"class": name}, count[what]) for name, count in classes.items()]

    def times(what: str) -> list[tuple[dict[str, str], Distribution]]:
        return [({"class": name}, durations(count[what])) for name, count in classes.items()]

    errors = [({"kind": kind}, snapshot.errors.get(kind, 0)) for kind in ERRORS]
    yield Family("gpuinfer_requests", "Requests that were answered.", "counter", by_class("requests"))
    yield Family("gpuinfer_rows", "Rows of the requests that were answered.", "counter", by_class("rows"))
    yield Family("gpuinfer_errors", "Requests without an answer, and repeated ones (retried).", "counter", errors)
    duration = "From a request's arrival to its answer."
    yield Family("gpuinfer_request_duration_seconds", duration, "histogram", times("latency"))
    waited = "From a request's arrival to its batch."
    yield Family("gpuinfer_queue_wait_seconds", waited, "histogram", times("queue_wait"))
    yield single_sample("gpuinfer_waiting_rows", "Rows that wait in the queue now.", "gauge", snapshot.waiting)


def _text(snapshot: Snapshot) -> Iterator[Family]:
    first, between = durations(snapshot.first_token), durations(snapshot.between_tokens)
    help_text = "From a prompt's arrival to its first token."
    yield single_sample("gpuinfer_time_to_first_token_seconds", help_text, "histogram", first)
    help_text = "From one token of an answer to its next: the mean of each answer."
    yield single_sample("gpuinfer_time_between_tokens_seconds", help_text, "histogram", between)
    tokens = counted_tokens(snapshot)
    for name, help_text in (
        ("input_tokens", "Tokens of prompts that were taken in."),
        ("output_tokens", "Tokens drawn."),
    ):
        if name in tokens:
            yield single_sample(f"gpuinfer_{name}", help_text, "counter", tokens[name])


def _unmasking(snapshot: Snapshot) -> Iterator[Family]:
    """The counters of diffusion models. Shares and tokens a forward are computed by queries over a time range."""
    if (found := DiffusionCounters.of(snapshot.device.get("steps"))) is None:
        return
    for name, help_text, value in (
        (
            "forwards",
            "Rows of all steps of a diffusion model: output tokens are to be seen beside them.",
            found.forwards,
        ),
        ("idle_forwards", "Of these, those that committed no token.", found.idle),
        ("committed_tokens", "Masks that became tokens, also those that no answer has in the end.", found.committed),
        ("canvas_positions", "Positions of the canvases of all forwards.", found.positions),
        ("computed_positions", "Of these, those that were computed anew.", found.computed),
    ):
        yield single_sample(f"gpuinfer_{name}", help_text, "counter", value)


def _speculation(snapshot: Snapshot) -> Iterator[Family]:
    """Tokens that were proposed to come next. Their share that is accepted is computed over a time range."""
    if (found := SpeculationCounters.of(snapshot.device.get("steps"))) is None:
        return
    for name, help_text, value in (
        ("proposed_tokens", "Tokens that were proposed to come next, and computed at once.", found.proposed),
        ("accepted_tokens", "Of these, those that were drawn.", found.accepted),
    ):
        yield single_sample(f"gpuinfer_{name}", help_text, "counter", value)


def _released_memory(snapshot: Snapshot) -> Iterator[Family]:
    """What a model of text has left to others on its device."""
    steps = snapshot.device.get("steps") or {}
    for name, field, help_text in (
        ("memory_freed_bytes", "freed_bytes", "Bytes of memory given back, as they were not in use."),
        ("memory_shortages", "shortages", "Times that the device had less free than -B keep_free."),
        ("slots_resized", "resized", "Times that there were fewer slots and pages for it, or more again."),
    ):
        if field in steps:
            yield single_sample(f"gpuinfer_{name}", help_text, "counter", steps[field])


def _batches(snapshot: Snapshot) -> Iterator[Family]:
    yield single_sample(
        "gpuinfer_batch_rows", "Rows of each batch; of text: of each step.", "histogram", sizes(snapshot.batches)
    )
    count = sum(int(times) for times, _ in snapshot.batch_s.values())
    seconds = sum(spent for _, spent in snapshot.batch_s.values())
    took = Distribution(((float("inf"), count),), seconds)
    yield single_sample("gpuinfer_batch_duration_seconds", "What the model took for a batch or step.", "summary", took)
    known = [reason.value for reason in Reason]
    reasons = [*known, *(reason for reason in snapshot.reasons if reason not in known)]
    cuts = [({"reason": reason}, snapshot.reasons.get(reason, 0)) for reason in reasons]
    yield Family("gpuinfer_batches", "Batches cut from the queue, by what was the reason.", "counter", cuts)
    yield single_sample("gpuinfer_slots", "Rows of text that may be under way at once.", "gauge", snapshot.slots)


def _lanes(snapshot: Snapshot) -> Iterator[Family]:
    seconds: dict[tuple[str, str], float] = {}
    for lane in snapshot.lanes:
        kind = lane_kind(lane["name"])
        kinds = {known for known, _ in seconds}
        kind = kind if kind in kinds or len(kinds) < MOST_LANES else OTHER
        for station, spent in lane["stations"].items():
            station = short_name(station)
            if (kind, station) not in seconds and sum(lane == kind for lane, _ in seconds) >= MOST_STATIONS:
                station = OTHER
            seconds[kind, station] = seconds.get((kind, station), 0.0) + spent
    samples = [({"lane": lane, "station": station}, spent) for (lane, station), spent in seconds.items()]
    help_text = "Where the time of the lanes (forward slots, worker threads) went, by kind of lane and station."
    yield Family("gpuinfer_lane_seconds", help_text, "counter", samples)


def lane_kind(lane: str) -> str:
    """`forward` of `forward 3`: a name without its number."""
    words = lane.split()
    return short_name(" ".join(words[:-1] if len(words) > 1 and words[-1].isdigit() else words)) or OTHER


def _machine(snapshot: Snapshot) -> Iterator[Family]:
    device = snapshot.device
    peak = "The most memory that the processes have had, added up."
    yield single_sample("gpuinfer_memory_peak_bytes", peak, "gauge", snapshot.rss_peak_mb * MEGABYTE)
    for name in ("allocated", "reserved"):
        if (taken := device.get(f"{name}_mb")) is not None:
            help_text = f"Memory of the device that is {name}."
            yield single_sample(f"gpuinfer_device_memory_{name}_bytes", help_text, "gauge", taken * MEGABYTE)
    if (busy := device.get("utilisation")) is not None:
        yield single_sample(
            "gpuinfer_device_utilization_ratio", "How busy the device says it is, 0 to 1.", "gauge", busy
        )
    if several := device.get("devices"):
        rows = [({"device": short_name(name)}, one["rows"]) for name, one in several.items()]
        lost = [({"device": short_name(name)}, float(bool(one["failed"]))) for name, one in several.items()]
        yield Family("gpuinfer_each_device_rows", "Rows that each of several devices has answered.", "counter", rows)
        yield Family("gpuinfer_each_device_failed", "Whether each of several was given up, 0 or 1.", "gauge", lost)
    yield _info("gpuinfer_device_info", "The device that computes.", {"name": device.get("name")})
    versions = {"version": __version__, "python": platform.python_version()}
    yield _info("gpuinfer_build_info", "What is running.", versions)


def served_models_family(models: Sequence[str]) -> Family:
    """The names of the models of a server, which its snapshot does not have."""
    samples = [({"name": short_name(model)}, 1.0) for model in models]
    return Family("gpuinfer_model_info", "The models that are served.", "gauge", samples)


def models_up_family(models: Mapping[str, bool]) -> Family:
    """Which of the models would answer now."""
    samples = [({"model": short_name(name)}, float(ready)) for name, ready in list(models.items())[:MOST_MODELS]]
    return Family("gpuinfer_model_up", "Whether a model answers now, 0 or 1.", "gauge", samples)


def _info(name: str, help: str, facts: Mapping[str, Any]) -> Family:
    return Family(name, help, "gauge", [({key: short_name(value or "unknown") for key, value in facts.items()}, 1.0)])


def short_name(name: object) -> str:
    """A name from outside, bounded in length."""
    return str(name)[:NAME]


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Floor: TypeAlias = dict[tuple[str, ...], float]
"""The last values of counters. A server keeps one, and passes it to each call."""


def snapshot_families(snapshot: Snapshot, floor: Floor | None = None) -> list[Family]:
    """The families of a snapshot, always in the same order.

    Counters rise from call to call as long as those of the snapshot do: a merge of replicas of which one has died does
    not, `MonotonicCounters` of the fleet does. A lane that is just changing its station may be counted a few
    microseconds too long; with `floor` a counter never falls, which would look like a new start from zero.
    """
    parts = (
        *(_requests, _text, _unmasking, _speculation, _released_memory),
        *(_batches, _lanes, _machine, _models),
    )
    families = [family for part in parts for family in part(snapshot)]
    if floor is None:
        return families
    for place, family in enumerate(families):
        samples = list(family.samples)
        for at, (labels, value) in enumerate(samples if family.kind == "counter" else ()):
            key = (family.name, *labels.values())
            if not isinstance(value, Distribution):
                floor[key] = max(value, floor.get(key, 0.0))
                samples[at] = labels, floor[key]
        families[place] = replace(family, samples=samples)
    return families


def exposition(families: Sequence[Family]) -> bytes:
    """Prometheus' text format, to be served as CONTENT_TYPE. Takes some milliseconds of a core: a server calls it in a
    thread.
    """
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(families))
    return generate_latest(registry)


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
            bounds = ["+Inf" if bound == float("inf") else repr(bound) for bound, _ in value.buckets]
            counts = [times for _, times in value.buckets]
            made.add_metric(values, list(zip(bounds, counts, strict=True)), value.total)
    metric: Metric = made
    return metric


ROUTER_COUNTERS = (
    ("requests", "Requests of clients."),
    ("unrouted", "Requests that no replica could take: answered with 503."),
    ("timeouts", "Requests that no replica has answered in time."),
    ("client_gone", "Requests whose client went away before the answer."),
    ("broken_off", "Answers that had begun and could not be brought to their end."),
    ("queue_taken", "Requests that have waited in the router, and were sent to a replica."),
    ("queue_full", "Requests for which no replica had room and the router no place to wait: answered with 429."),
    ("queue_expired", "Requests whose deadline passed while they waited in the router."),
    ("policy_faults", "Choices that the routing policy did not make: the least loaded replica was taken."),
    ("restarts", "Router processes that were started anew."),
)


def router_families(totals: Mapping[str, float]) -> Iterator[Family]:
    """The counters of all router processes; `totals` has the names in ROUTER_COUNTERS, and connections."""
    open_now = "Connections of clients that are open now."
    yield single_sample("gpuinfer_router_connections", open_now, "gauge", totals.get("connections", 0))
    queued = "Requests that wait in the router for room at a replica."
    yield single_sample("gpuinfer_router_queue_length", queued, "gauge", totals.get("queued", 0))
    waited = "Seconds that requests have waited in the router before they were sent, together."
    yield single_sample("gpuinfer_router_queue_wait_seconds", waited, "counter", totals.get("queue_wait_us", 0) / 1e6)
    for name, help_text in ROUTER_COUNTERS:
        yield single_sample(f"gpuinfer_router_{name}", help_text, "counter", totals.get(name, 0))


BREAKER = ("closed", "half-open", "open")
WORKER_COUNTERS = (
    ("requests", "requests_served", "Requests that a replica has answered through the router."),
    ("errors", "errors", "Requests at which a replica itself has failed."),
    ("retried", "retried", "Requests that were sent elsewhere after this replica failed them."),
    ("resumed", "resumed", "Streams that were taken up elsewhere after this replica broke off."),
    ("restarts", "restarts", "How often a replica was started again."),
)


def worker_families(workers: Sequence[Mapping[str, Any]]) -> Iterator[Family]:
    """Families of a fleet's replicas, each labelled `worker` with its `id`.

    `workers` are those of `/stats`: {index or id, url, healthy, requests_served, errors, in_flight} and, where they
    are known, {breaker, restarts, retried, resumed}. There is one series for each replica that is there now.
    """
    named = [({"worker": worker_name(worker)}, worker) for worker in workers]
    up: list[tuple[Labels, Value]] = [(labels, float(bool(worker.get("healthy")))) for labels, worker in named]
    yield Family("gpuinfer_worker_up", "Whether a replica is healthy and takes requests.", "gauge", up)
    for name, key, help_text in WORKER_COUNTERS:
        counts = [(labels, float(worker.get(key) or 0)) for labels, worker in named]
        yield Family(f"gpuinfer_worker_{name}", help_text, "counter", counts)
    load = [(labels, float(worker.get("in_flight") or 0)) for labels, worker in named]
    yield Family("gpuinfer_worker_in_flight", "Requests that a replica is answering now.", "gauge", load)
    states = [
        ({**labels, "state": state}, float(worker.get("breaker", "closed") == state))
        for labels, worker in named
        for state in BREAKER
    ]
    yield Family("gpuinfer_worker_breaker_state", "1 for the state of its circuit breaker.", "gauge", states)


def worker_name(worker: Mapping[str, Any]) -> str:
    """A replica's name on the page and in metrics: its number in the fleet."""
    return str(worker.get("id", worker.get("index", "")))

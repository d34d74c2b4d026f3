"""What a snapshot has measured, as metrics. Sets of labels are bounded, whatever plugins call lanes and stations."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpuinfer import __version__
from gpuinfer.api import Priority, Reason
from gpuinfer.monitoring.families import Distribution, Family, durations, one, sizes
from gpuinfer.stats import ERRORS, ClassCount, Snapshot, tokens_of
from gpuinfer.unmasked import Unmasked

MEGABYTE = 1 << 20
MOST_LANES, MOST_STATIONS = 16, 24  # kinds of lanes, and stations of each: what comes after them is `other`
MOST_MODELS = 32
OTHER = "other"
NAME = 100  # characters of a name from outside


def measured(snapshot: Snapshot) -> Iterator[Family]:
    """Every family of one snapshot, always in the same order. What is not known (tokens of rows) has none."""
    yield from _requests(snapshot)
    yield from _text(snapshot)
    yield from _unmasking(snapshot)
    yield from _batches(snapshot)
    yield from _lanes(snapshot)
    yield from _machine(snapshot)
    yield from _models(snapshot)


def _models(snapshot: Snapshot) -> Iterator[Family]:
    """A line each, where there are several."""
    lines = {short(name): line for name, line in list(snapshot.models.items())[:MOST_MODELS]}
    if not lines:
        return

    def by_model(what: str) -> list[tuple[dict[str, str], float]]:
        return [({"model": name}, line[what]) for name, line in lines.items()]

    for name, told in (
        ("requests", "Of several models in one server: requests that a model answered."),
        ("rows", "Rows of these."),
    ):
        yield Family(f"gpuinfer_model_{name}", told, "counter", by_model(name))
    for way, told in (("input", "Tokens of a model's prompts."), ("output", "Tokens of its answers.")):
        tokens = [({"model": name}, line["tokens"].get(way, 0)) for name, line in lines.items()]
        yield Family(f"gpuinfer_model_{way}_tokens", told, "counter", tokens)
    errors = [
        ({"model": name, "kind": kind}, line["errors"].get(kind, 0)) for name, line in lines.items() for kind in ERRORS
    ]
    yield Family("gpuinfer_model_errors", "As gpuinfer_errors, of each model.", "counter", errors)
    told = "Device time that it had, of all of the device."
    yield Family("gpuinfer_model_device_seconds", told, "counter", by_model("device_s"))
    told = "For how long its forwards waited while others had the device."
    yield Family("gpuinfer_model_turn_wait_seconds", told, "counter", by_model("turn_wait_s"))
    yield Family("gpuinfer_model_waiting_rows", "Rows that wait in its queue now.", "gauge", by_model("waiting"))
    waited: list[tuple[dict[str, str], Distribution]] = [
        ({"model": name}, durations(line["queue_wait"])) for name, line in lines.items()
    ]
    told = "From a request's arrival to its batch."
    yield Family("gpuinfer_model_queue_wait_seconds", told, "histogram", waited)


def _requests(snapshot: Snapshot) -> Iterator[Family]:
    classes = {name: snapshot.classes.get(name) or ClassCount().to_wire() for name in _classes(snapshot)}

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
    yield one("gpuinfer_waiting_rows", "Rows that wait in the queue now.", "gauge", snapshot.waiting)


def _classes(snapshot: Snapshot) -> list[str]:
    """All that there may be, so that a counter is there before it first counts."""
    known = [priority.name.lower() for priority in Priority]
    return [*known, *(name for name in snapshot.classes if name not in known)]


def _text(snapshot: Snapshot) -> Iterator[Family]:
    first, between = durations(snapshot.first_token), durations(snapshot.between_tokens)
    told = "From a prompt's arrival to its first token."
    yield one("gpuinfer_time_to_first_token_seconds", told, "histogram", first)
    told = "From one token of an answer to its next: the mean of each answer."
    yield one("gpuinfer_time_between_tokens_seconds", told, "histogram", between)
    tokens = tokens_of(snapshot)
    for name, told in (("input_tokens", "Tokens of prompts that were taken in."), ("output_tokens", "Tokens drawn.")):
        if name in tokens:
            yield one(f"gpuinfer_{name}", told, "counter", tokens[name])


def _unmasking(snapshot: Snapshot) -> Iterator[Family]:
    """Of diffusion models. Shares and tokens a forward are for who reads it, over the time that is looked at."""
    if (found := Unmasked.of(snapshot.device.get("steps"))) is None:
        return
    for name, told, value in (
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
        yield one(f"gpuinfer_{name}", told, "counter", value)


def _batches(snapshot: Snapshot) -> Iterator[Family]:
    yield one("gpuinfer_batch_rows", "Rows of each batch; of text: of each step.", "histogram", sizes(snapshot.batches))
    count = sum(int(times) for times, _ in snapshot.batch_s.values())
    seconds = sum(spent for _, spent in snapshot.batch_s.values())
    took = Distribution(((float("inf"), count),), seconds)
    yield one("gpuinfer_batch_duration_seconds", "What the model took for a batch or step.", "summary", took)
    known = [reason.value for reason in Reason]
    reasons = [*known, *(reason for reason in snapshot.reasons if reason not in known)]
    cuts = [({"reason": reason}, snapshot.reasons.get(reason, 0)) for reason in reasons]
    yield Family("gpuinfer_batches", "Batches cut from the queue, by what was the reason.", "counter", cuts)
    yield one("gpuinfer_slots", "Rows of text that may be under way at once.", "gauge", snapshot.slots)


def _lanes(snapshot: Snapshot) -> Iterator[Family]:
    seconds: dict[tuple[str, str], float] = {}
    for lane in snapshot.lanes:
        kind = kind_of(lane["name"])
        kinds = {known for known, _ in seconds}
        kind = kind if kind in kinds or len(kinds) < MOST_LANES else OTHER
        for station, spent in lane["stations"].items():
            key = (kind, _bounded(station, kind, seconds))
            seconds[key] = seconds.get(key, 0.0) + spent
    samples = [({"lane": lane, "station": station}, spent) for (lane, station), spent in seconds.items()]
    told = "Where the time of the lanes (forward slots, worker threads) went, by kind of lane and station."
    yield Family("gpuinfer_lane_seconds", told, "counter", samples)


def kind_of(lane: str) -> str:
    """`forward` of `forward 3`: a name without its number."""
    words = lane.split()
    return short(" ".join(words[:-1] if len(words) > 1 and words[-1].isdigit() else words)) or OTHER


def _bounded(station: str, kind: str, seen: Mapping[tuple[str, str], float]) -> str:
    station = short(station)
    known = (kind, station) in seen or sum(lane == kind for lane, _ in seen) < MOST_STATIONS
    return station if known else OTHER


def _machine(snapshot: Snapshot) -> Iterator[Family]:
    device = snapshot.device
    peak = "The most memory that the processes have had, added up."
    yield one("gpuinfer_memory_peak_bytes", peak, "gauge", snapshot.rss_peak_mb * MEGABYTE)
    for name in ("allocated", "reserved"):
        if (taken := device.get(f"{name}_mb")) is not None:
            told = f"Memory of the device that is {name}."
            yield one(f"gpuinfer_device_memory_{name}_bytes", told, "gauge", taken * MEGABYTE)
    if (busy := device.get("utilisation")) is not None:
        yield one("gpuinfer_device_utilization_ratio", "How busy the device says it is, 0 to 1.", "gauge", busy)
    if several := device.get("devices"):
        rows = [({"device": short(name)}, one["rows"]) for name, one in several.items()]
        lost = [({"device": short(name)}, float(bool(one["failed"]))) for name, one in several.items()]
        yield Family("gpuinfer_each_device_rows", "Rows that each of several devices has answered.", "counter", rows)
        yield Family("gpuinfer_each_device_failed", "Whether each of several was given up, 0 or 1.", "gauge", lost)
    yield _info("gpuinfer_device_info", "The device that computes.", {"name": device.get("name")})
    versions = {"version": __version__, "python": platform.python_version()}
    yield _info("gpuinfer_build_info", "What is running.", versions)


def serving(models: Sequence[str]) -> Family:
    """Which models a server serves: its snapshot does not know."""
    samples = [({"name": short(model)}, 1.0) for model in models]
    return Family("gpuinfer_model_info", "The models that are served.", "gauge", samples)


def up(models: Mapping[str, bool]) -> Family:
    """Which of them would answer now."""
    samples = [({"model": short(name)}, float(ready)) for name, ready in list(models.items())[:MOST_MODELS]]
    return Family("gpuinfer_model_up", "Whether a model answers now, 0 or 1.", "gauge", samples)


def _info(name: str, help: str, facts: Mapping[str, Any]) -> Family:
    return Family(name, help, "gauge", [({key: short(value or "unknown") for key, value in facts.items()}, 1.0)])


def short(name: object) -> str:
    """A name from outside, bounded in length."""
    return str(name)[:NAME]

"""The exposition says what the snapshot says, and docs/monitoring.md and the dashboard ask for what there is."""

from __future__ import annotations

import json
import math
import re
import subprocess

import pytest
from monitoring.exposed import dashboard, everything, expressions, labels_of
from monitoring.synthetic import Server, worker
from prometheus_client.parser import text_string_to_metric_families

from gpuinfer.api import Reason
from gpuinfer.serving.monitoring.metrics import (
    DURATIONS,
    durations,
    exposition,
    router_families,
    served_models_family,
    snapshot_families,
    worker_families,
)
from gpuinfer.stats import ERRORS, Histogram, Snapshot

WORKERS = [worker(0), worker(1, healthy=False, breaker="open", errors=7, restarts=2)]
HOSTILE = '</script><img src=x onerror="alert(1)">\n\\ \x00 ' + "ä" * 5000


def read(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample by its name and labels, as prometheus_client's own parser reads it."""
    families = list(text_string_to_metric_families(text.decode()))
    samples = [sample for family in families for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples), "a sample is there twice"
    return found


def of(samples, name, **labels):
    return samples[name, frozenset({key.removesuffix("_"): value for key, value in labels.items()}.items())]


@pytest.fixture
def snapshot() -> Snapshot:
    return Server().step(10.0, requests=400)


def test_values_are_those_of_the_snapshot(snapshot):
    samples = read(exposition([*snapshot_families(snapshot), *worker_families(WORKERS)]))
    for name, count in snapshot.classes.items():
        labels = {"class_": name}
        assert of(samples, "gpuinfer_requests_total", **labels) == count["requests"]
        assert of(samples, "gpuinfer_rows_total", **labels) == count["rows"]
        for metric, what in (("request_duration", "latency"), ("queue_wait", "queue_wait")):
            assert of(samples, f"gpuinfer_{metric}_seconds_sum", **labels) == pytest.approx(count[what]["total"])
            held = sum(count[what]["counts"].values())
            assert of(samples, f"gpuinfer_{metric}_seconds_count", **labels) == held
            assert of(samples, f"gpuinfer_{metric}_seconds_bucket", **labels, le="+Inf") == held
    for kind in ERRORS:
        assert of(samples, "gpuinfer_errors_total", kind=kind) == snapshot.errors[kind]
    for reason in Reason:
        assert of(samples, "gpuinfer_batches_total", reason=reason) == snapshot.reasons.get(reason, 0)
    assert of(samples, "gpuinfer_batch_rows_count") == sum(snapshot.batches.values())
    assert of(samples, "gpuinfer_batch_rows_sum") == sum(size * times for size, times in snapshot.batches.items())
    at_most_8 = sum(times for size, times in snapshot.batches.items() if size <= 8)
    assert of(samples, "gpuinfer_batch_rows_bucket", le="8.0") == at_most_8
    assert of(samples, "gpuinfer_input_tokens_total") == snapshot.device["tokens"]["input"]
    assert of(samples, "gpuinfer_output_tokens_total") == snapshot.device["tokens"]["output"]
    assert of(samples, "gpuinfer_waiting_rows") == snapshot.waiting
    forward = snapshot.lanes[0]["stations"]["forward"]
    assert of(samples, "gpuinfer_lane_seconds_total", lane="forward", station="forward") == pytest.approx(forward)
    assert of(samples, "gpuinfer_device_memory_allocated_bytes") == 41_300 * 2**20
    assert of(samples, "gpuinfer_worker_up", worker="0") == 1
    assert of(samples, "gpuinfer_worker_up", worker="1") == 0
    assert of(samples, "gpuinfer_worker_errors_total", worker="1") == 7
    assert of(samples, "gpuinfer_worker_breaker_state", worker="1", state="open") == 1
    assert of(samples, "gpuinfer_worker_breaker_state", worker="1", state="closed") == 0


def test_a_bucket_counts_what_was_at_most_its_bound():
    histogram, times = Histogram(), [0.00003, 0.0009, 0.0011, 0.049, 0.051, 0.7, 299.0, 1000.0]
    for seconds in times:
        histogram.add(seconds)
    buckets = dict(durations(histogram.to_wire()).buckets)
    assert buckets == {
        **{bound: sum(seconds <= bound for seconds in times) for bound in DURATIONS},
        math.inf: len(times),
    }


def test_counters_are_there_before_they_first_count_and_never_fall():
    server = Server()
    before = read(exposition(snapshot_families(Snapshot())))
    assert of(before, "gpuinfer_errors_total", kind="failed") == 0
    assert of(before, "gpuinfer_requests_total", class_="low") == 0
    for _ in range(5):
        now = read(exposition(snapshot_families(server.step())))
        rising = ("_total", "_count", "_sum", "_bucket")
        assert not {key for key in before if key[0].endswith(rising) and now[key] < before[key]}
        before = now
    floor: dict[tuple[str, ...], float] = {}
    for forward, idle in ((10.0, 5.0), (9.999, 5.1)):  # seconds that were told are not taken back
        lane = {"name": "forward 0", "stations": {"forward": forward, "idle": idle}}
        samples = read(exposition(snapshot_families(Snapshot(lanes=(lane,)), floor)))
    assert of(samples, "gpuinfer_lane_seconds_total", lane="forward", station="forward") == 10.0
    assert of(samples, "gpuinfer_lane_seconds_total", lane="forward", station="idle") == 5.1


def test_names_from_outside_are_escaped_and_bounded():
    lanes = tuple(
        {"name": f"{HOSTILE} lane-{lane}", "stations": {f"station {number} {HOSTILE}": 1.0 for number in range(100)}}
        for lane in "abcdefghijklmnopqrstuvwxyz"
    )
    more = [served_models_family([HOSTILE]), *worker_families([worker(0, id=HOSTILE)])]
    text = exposition([*snapshot_families(Server().snapshot(lanes=lanes)), *more])
    samples = read(text)
    seconds = [value for (name, _), value in samples.items() if name == "gpuinfer_lane_seconds_total"]
    assert len(seconds) <= 17 * 25
    assert sum(seconds) == pytest.approx(2600)
    assert len(text) < 200_000


@pytest.mark.parametrize("expression", expressions())
def test_every_metric_and_label_that_is_asked_for_is_there(expression):
    known, by_prometheus = labels_of(everything()), {"job", "instance"}
    named = re.findall(r"\b(gpuinfer_\w+)(\{[^}]*\})?", expression)
    assert named
    for name, selected in named:
        assert set(re.findall(r"(\w+)=", selected)) <= known[name] | by_prometheus
    grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
    assert grouped <= set.union(*(known[name] for name, _ in named)) | by_prometheus


def test_panels_say_what_they_are_and_do_not_overlap_and_legends_name_labels_that_are_left():
    panels, taken = dashboard()["panels"], set()
    assert len({panel["id"] for panel in panels}) == len({panel["title"] + panel["type"] for panel in panels})
    for panel in panels:
        assert panel["description"]
        x, y, w, h = (panel["gridPos"][name] for name in "xywh")
        cells = {(across, down) for across in range(x, x + w) for down in range(y, y + h)}
        assert not cells & taken
        assert x + w <= 24
        taken |= cells
        for target in panel["targets"]:
            wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            grouped = re.findall(r"by \(([^)]*)\)", target["expr"])
            assert wanted <= {label.strip() for group in grouped for label in group.split(",")}, panel["title"]


@pytest.mark.system
def test_promtool_has_nothing_to_say(snapshot, tmp_path):
    more = [served_models_family([HOSTILE]), *worker_families(WORKERS), *router_families({"requests": 7})]
    for text in (exposition(snapshot_families(Snapshot())), exposition([*snapshot_families(snapshot), *more])):
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, b"")
    rules = [
        {"record": f"tried:{number}", "expr": text.replace("$__rate_interval", "5m")}
        for number, text in enumerate(expressions())
    ]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "tried", "rules": rules}]}))  # JSON is YAML
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{len(rules)} rules found" in done.stdout

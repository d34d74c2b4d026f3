"""`gpuinfer load` and `gpuinfer bench engine` as people meet them, on the stand-in backend and on a small model."""

import json
import os
from pathlib import Path

import jsonschema
import pytest

from gpuinfer.config import registry
from gpuinfer.lab.bench.bench_document import bench_schema

pytestmark = pytest.mark.usefixtures("children_forked")

BENCH = ["bench", "engine", "--seconds", "0.8", "--warmup", "0", "--repeats", "2"]
STANDIN = ["--backend", "standin", "-B", "alpha=10us", "-B", "beta=1ms"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    for variable in [name for name in os.environ if name.startswith("GPUINFER_")]:
        monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    registry.search_again()


def test_a_load_of_its_own(gpuinfer):
    code, out, _ = gpuinfer("load", *STANDIN, "--rate", "500", "--requests", "100", "--json", "-")
    report = json.loads(out)
    assert code == 0
    assert report["status"] == "done"
    assert report["progress"]["done"] == 100
    assert report["roofline"] is None


def test_more_than_a_queue_can_take_is_turned_away_and_said(gpuinfer):
    words = ["-B", "max_rows=64", "-B", "beta=100ms", "-B", "alpha=0", "--max-queue-rows", "512"]
    words += ["--rate", "100k", "--requests", "9000"]  # of which even a machine that is busy sends more than are served
    code, out, _ = gpuinfer("load", "--backend", "standin", *words, "--json", "-")
    report = json.loads(out)
    assert code == 0
    assert report["progress"]["done"] == 9000
    assert report["errors"]["rejected"] > 0
    assert report["bottleneck"]["class"] != "arrival-bound"


def test_what_waits_for_longer_than_its_timeout_expires(gpuinfer):
    words = ["-B", "max_rows=1", "-B", "beta=200ms", "--rate", "1000", "--requests", "20", "--timeout", "50ms"]
    code, out, _ = gpuinfer("load", "--backend", "standin", *words, "--json", "-")
    assert code == 0
    assert json.loads(out)["errors"]["expired"] > 10


def test_a_rate_is_compared_by_latency(gpuinfer):
    code, out, _ = gpuinfer(*BENCH, *STANDIN, "--rate", "400", "-S", "max_wait=0,150ms", "--json", "-")
    document = json.loads(out)
    jsonschema.validate(document, bench_schema())
    assert code == 0
    assert (document["target"], document["of_load"]) == ("engine", True)
    rows = document["comparison"]
    assert [row["metric"] for row in rows] == ["latency_p95_s"] * 2
    assert rows[0]["median"] < rows[1]["median"]
    assert [row["parity"] for row in rows] == [None, None]
    assert all(set(row["reasons"]) and row["latency_s"]["mean"] > 0 for row in rows)


def test_all_variants_meet_the_same_arrivals(gpuinfer):
    code, out, _ = gpuinfer("bench", "engine", *STANDIN, "--rate", "300", "--duration", "0.3", "--warmup", "0",
                            "--repeats", "2", "-S", "max_wait=0,2ms", "--json", "-")  # fmt: skip
    document = json.loads(out)
    assert code == 0
    done = {(one["variant"], one["repeat"]): run["progress"]["done"] for one, run in zip(document["samples"],
            document["runs"], strict=True)}  # fmt: skip
    assert done["max wait 0", 0] == done["max wait 2ms", 0]
    assert done["max wait 0", 1] == done["max wait 2ms", 1]


def test_a_recorded_load_comes_again(gpuinfer):
    words = ["--classes", "high=0.5,low=0.5", "--rows", "1-3", "--rate", "400", "--requests", "60"]
    assert gpuinfer("load", *STANDIN, *words, "--trace", "t.jsonl", "--quiet")[0] == 0
    code, out, _ = gpuinfer("load", *STANDIN, "--replay", "t.jsonl", "--trace", "again.jsonl", "--json", "-")
    assert code == 0
    assert json.loads(out)["progress"]["done"] == 60

    def arrived(name):
        lines = [json.loads(line) for line in Path(name).read_text().splitlines()]
        return [line[4:6] for line in lines if isinstance(line, list) and line[0] == "a"]

    assert arrived("again.jsonl") == arrived("t.jsonl")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(["load", "--rate", "5", "--clients", "5"], "Give one of them.", id="two loads"),
        pytest.param(["load", "--rate", "0"], "--rate: '0' is not more than 0.", id="no rate"),
        pytest.param(["load", "--schedule", "5:x"], "--schedule 5:x: 'x' is no number.", id="a schedule"),
        pytest.param(["load", "--schedule", ","], "a schedule of nothing", id="an empty schedule"),
        pytest.param(["load", "--replay", "no.jsonl"], "no.jsonl", id="no trace"),
        pytest.param(["load", "--replay", "t", "--rows", "8"], "Leave --rows out.", id="rows of a recorded load"),
        pytest.param(["load", "--arrivals", "bursty"], "--clients has none", id="bursts of clients"),
        pytest.param(["load", "--rate", "5", "--requests", "1" + "0" * 30], "or less", id="more than can be counted"),
        pytest.param(["load", "--rate", "5", "--rows", "1" + "0" * 30], "no request has so many", id="endless rows"),
        pytest.param(["load", "--backend", "standin", "-B", "alpha=-1ms"], "alpha", id="a negative alpha"),
        pytest.param(["load", "--model", "blobnett"], "Did you mean 'blobnet'?", id="a model"),
        pytest.param(["bench", "engin"], "Did you mean 'engine'?", id="a target"),
    ],
)
def test_bad_usage_is_explained(gpuinfer, words, said):
    code, out, err = gpuinfer(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) <= 3

"""`gpuinfer load` and `gpuinfer bench engine` as people meet them, on the stand-in backend."""

import json
from pathlib import Path

import jsonschema
import pytest

from gpuinfer.lab.bench.bench_document import bench_schema

pytestmark = pytest.mark.usefixtures("children_forked", "empty_folder")

STANDIN = ["--backend", "standin", "-B", "alpha=10us", "-B", "beta=1ms"]
BENCH = ["bench", "engine", *STANDIN, "--warmup", "0", "--repeats", "2", "--json", "-"]


@pytest.fixture
def report(gpuinfer):
    """The document of a command that succeeds."""

    def run(*words):
        code, out, errors = gpuinfer(*words)
        assert code == 0, errors
        return json.loads(out)

    return run


def test_a_load_that_was_recorded_comes_again(gpuinfer, report):
    words = ["--classes", "high=0.5,low=0.5", "--rows", "1-3", "--rate", "400", "--requests", "60"]
    first = report("load", *STANDIN, *words, "--trace", "t.jsonl", "--json", "-")
    again = report("load", *STANDIN, "--replay", "t.jsonl", "--trace", "again.jsonl", "--json", "-")
    assert [(one["status"], one["progress"]["done"], one["roofline"]) for one in (first, again)] == [
        ("done", 60, None)
    ] * 2

    def arrived(name):
        lines = [json.loads(line) for line in Path(name).read_text().splitlines()]
        return [line[4:6] for line in lines if isinstance(line, list) and line[0] == "a"]

    assert arrived("again.jsonl") == arrived("t.jsonl")


@pytest.mark.parametrize(
    ("words", "count", "error"),
    [
        ("-B max_rows=64 -B beta=100ms -B alpha=0 --max-queue-rows 512 --rate 100k", 9000, "rejected"),
        ("-B max_rows=1 -B beta=200ms --rate 1000 --timeout 50ms", 20, "expired"),
    ],
)
def test_requests_that_are_turned_away_or_expire_are_counted(report, words, count, error):
    found = report("load", "--backend", "standin", *words.split(), "--requests", f"{count}", "--json", "-")
    assert found["progress"]["done"] == count
    assert found["errors"][error] > 0


@pytest.mark.thorough
def test_a_rate_is_compared_by_latency(report):
    document = report(*BENCH, "--seconds", "0.8", "--rate", "400", "-S", "max_wait=0,150ms")
    jsonschema.validate(document, bench_schema())
    assert (document["target"], document["of_load"]) == ("engine", True)
    rows = document["comparison"]
    assert [(row["metric"], row["parity"]) for row in rows] == [("latency_p95_s", None)] * 2
    assert rows[0]["median"] < rows[1]["median"]
    assert all(set(row["reasons"]) and row["latency_s"]["mean"] > 0 for row in rows)


def test_all_variants_meet_the_same_arrivals(report):
    document = report(*BENCH, "--rate", "300", "--duration", "0.3", "-S", "max_wait=0,2ms")
    pairs = zip(document["samples"], document["runs"], strict=True)
    done = {(one["variant"], one["repeat"]): run["progress"]["done"] for one, run in pairs}
    assert [done["max wait 0", repeat] for repeat in (0, 1)] == [done["max wait 2ms", repeat] for repeat in (0, 1)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("load --rate 5 --clients 5", "Give one of them."),
        ("load --rate 0", "--rate: '0' is not more than 0."),
        ("load --schedule 5:x", "--schedule 5:x: 'x' is no number."),
        ("load --replay t --rows 8", "Leave --rows out."),
        ("load --arrivals bursty", "--clients has none"),
        ("load --rate 5 --requests 1" + "0" * 30, "or less"),
        ("load --rate 5 --rows 1" + "0" * 30, "no request has so many"),
        ("load --backend standin -B alpha=-1ms", "alpha"),
        ("load --model blobnett", "Did you mean 'blobnet'?"),
        ("bench engin", "Did you mean 'engine'?"),
    ],
)
def test_bad_usage_is_explained(gpuinfer, words, said):
    code, out, err = gpuinfer(*words.split())
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) <= 3

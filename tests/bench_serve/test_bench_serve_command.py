"""`gpuinfer bench serve` as people and scripts meet it, against scripted servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest

from gpuinfer.cli import bench_serve
from gpuinfer.cli.bench_serve import LoadOptions, load_of
from gpuinfer.errors import UsageError
from gpuinfer.lab.bench.bench_document import bench_schema
from tests.bench_serve.scripted import scripted

pytestmark = pytest.mark.usefixtures("empty_folder")

ROOT = Path(__file__).parent.parent.parent
ENOUGH_S = 60.0
SHORT = ["--requests", "12", "--concurrency", "3", "--warmup", "0", "--output-tokens", "3"]
STANDIN = ["--backend", "standin", "--model", "blobnet", "--features", "4"]


@pytest.fixture(scope="module")
def server():
    with scripted(route="replica=1; why=random; attempt=1") as (url, _):
        yield url


@pytest.fixture
def bench(gpuinfer):
    """The document of a run that succeeds, and its first way."""

    def run(*words):
        code, out, errors = gpuinfer("bench", "serve", *words, "--json", "-")
        assert code == 0, errors
        document = json.loads(out)
        jsonschema.validate(document, bench_schema())
        return document, document["serve"]["ways"][0]

    return run


def test_the_document_says_what_was_asked_and_who_answered(bench, server):
    document, way = bench(f"{server}/v1", *SHORT, "--goodput", "e2e:60s")
    assert (way["requests"], way["errors"], way["goodput_share"]) == (12, {}, 1.0)
    assert way["routes"] == {"1": {"random": 12}}
    assert document["comparison"][0]["metric"] == "goodput_per_s"
    assert document["serve"]["load"]["concurrency"] == 3


@pytest.mark.thorough
def test_two_urls_on_the_same_requests_with_a_report(gpuinfer, server):
    with scripted(first_s=0.1) as (slow, _):
        words = ["--compare", f"{server},{slow}", *SHORT, "--repeats", "2", "--report", "out", "--fail-under", "0.5"]
        code, _, err = gpuinfer("bench", "serve", *words)
    assert code == 4
    assert "--fail-under 0.5 does not hold" in err
    document = json.loads(Path("out/bench.json").read_text())
    jsonschema.validate(document, bench_schema())
    assert [one["repeat"] for one in document["samples"]] == [0, 0, 1, 1]
    assert document["winner"] == server.removeprefix("http://")
    page = Path("out/bench.html").read_text()
    for word in ("Latencies", "Who answered", "The sender itself", "Time to the first token", "data:image/svg"):
        assert word in page
    assert {"e2e.png", "ttft.png", "throughput.png", "bench.md"} <= {path.name for path in Path("out").iterdir()}


@pytest.mark.parametrize(
    "words",
    ["chat", "completions --no-stream", "evaluate --rows 2", "evaluate --binary"],
)
def test_every_endpoint_is_asked(bench, server, words):
    _, way = bench(server, "--endpoint", *words.split(), *SHORT)
    assert way["answered"] == 12


def test_an_open_loop_is_compared_by_its_latency(bench, server):
    document, way = bench(server, *["--rate", "100", "--arrivals", "uniform", "--requests", "20", "--warmup", "0"])
    assert document["comparison"][0]["metric"] == "latency_p95_s"
    assert way["offered_per_s"] is not None


def test_what_is_turned_away_is_told_by_kind(gpuinfer):
    Path("prompts.txt").write_text("tell me of it\nand of that\n")
    with scripted(fail=4) as (url, _):
        code, out, _ = gpuinfer("bench", "serve", url, *SHORT, "--prompts", "prompts.txt")
    assert code == 0
    assert "HTTP 429 (3)" in out


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("--duration 0.3 --repeats 100000", signal.SIGINT),  # once a repeat is over
        ("--duration 1h", signal.SIGINT),
        pytest.param("--duration 1h", signal.SIGTERM, marks=pytest.mark.thorough),
    ],
)
def test_a_run_that_is_stopped_keeps_what_was_measured(words, number):
    with scripted() as (url, script):
        command = ["bench", "serve", url, "--warmup", "0", "--json", "found.json", *words.split()]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, "-m", "gpuinfer", *command], env=environment, stderr=subprocess.PIPE, text=True
        )
        if "repeats" in words:
            assert "repeat 1 of" in process.stderr.readline()
        until = time.monotonic() + ENOUGH_S
        while script.number < 100:
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(number)
        process.communicate(timeout=ENOUGH_S)
    document = json.loads(Path("found.json").read_text())
    assert (process.returncode, document["status"]) == (3, "partial")
    assert document["comparison"]
    assert document["serve"]["ways"][0]["answered"] >= 50


NOWHERE = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("https://a.example", 2, "before the proxy that speaks TLS"),
        ("localhost:8000", 2, "Give http://HOST:PORT"),
        (f"{NOWHERE} --replicas 2", 2, "--replicas is said of a server"),
        ("", 2, "which server? Give the URL of one, or --model"),
        (f"{NOWHERE} --compare replicas=1,2", 2, "--replicas is said of"),
        ("--compare replicass=1,2", 2, "Did you mean 'replicas'"),
        ("--compare fast,slow", 2, "what is that?"),
        (f"{NOWHERE} --rate 5 --concurrency 2", 2, "Give one of them"),
        (f"{NOWHERE} --goodput ttft", 2, "Write --goodput"),
        (f"{NOWHERE} --goodput tftt:1s", 2, "Write --goodput ttft:200ms"),
        (f"{NOWHERE} --goodput e2e:-1s", 2, "Write --goodput ttft:200ms"),
        (f"{NOWHERE} --input-tokens no", 2, "--input-tokens no: cannot be"),
        (f"{NOWHERE} --prompts missing.txt", 2, "cannot be read"),
        (f"{NOWHERE} --prompts empty", 2, "holds no prompts"),
        (f"{NOWHERE} --duration 0", 2, "--duration"),
        (f"{NOWHERE} --fail-under 0", 2, "nothing could fail that"),
        (f"{NOWHERE} --requests 2", 1, f"cannot reach {NOWHERE}"),
        ("--model no-such-folder --requests 2", 1, "no-such-folder"),
    ],
)
def test_a_run_that_cannot_be_ends_with_the_cure(gpuinfer, words, code, said):
    Path("empty").write_text("\n")
    found, _, err = gpuinfer("bench", "serve", *words.split())
    assert found == code
    assert said in err


def test_our_own_server_is_started_and_ended(bench):
    document, way = bench(*STANDIN, "-B", "beta=5ms", "--compare", "S.max_wait=2ms", *SHORT)
    (row,) = document["comparison"]
    assert (row["name"], way["answered"], "-S max_wait" in row["command"]) == ("S.max_wait=2ms", 12, True)


@pytest.mark.thorough
def test_replicas_scale(bench):
    """100 ms for a batch of up to 8, 16 clients for each replica: what one alone does, times their number."""
    words = ["-B", "alpha=0", "-B", "beta=100ms", "-B", "max_rows=8", "--per-replica", "--duration", "4s"]
    document, _ = bench(*STANDIN, *words, "--compare", "replicas=1,2")
    scaling = document["serve"]["scaling"]
    assert [one["replicas"] for one in scaling] == [1, 2]
    assert all(one["efficiency"] > 0 for one in scaling)
    assert [len(way["routes"]) for way in document["serve"]["ways"]] == [1, 2]


def test_flags_become_all_combinations_of_ways():
    def ways(*compare, given=None):
        known = {"replicas": "--replicas", "routing": "--routing", "strategy": "--strategy", "backend": "--backend"}
        server = bench_serve.ComparedServer(known, given or {})
        return bench_serve.server_variants(
            compare, None, server, lambda changes, replicas: load_of(LoadOptions(), replicas), str
        )

    found = ways("replicas=1,2", "least-loaded,sticky", given={"model": ["--model", "tiny"]})
    pairs = [(number, routing) for number in (1, 2) for routing in ("least-loaded", "sticky")]
    assert [way.name for way in found] == [f"replicas={number}, {routing}" for number, routing in pairs]
    assert found[3].words == ["--model", "tiny", "--replicas", "2", "--routing", "sticky"]
    assert found[3].replicas == 2
    assert [way.words for way in ways("S.max_wait=0,5ms")] == [["-S", "max_wait=0"], ["-S", "max_wait=5ms"]]
    assert ways("dynamic,adaptive")[1].words == ["--strategy", "adaptive"]
    assert load_of(LoadOptions(concurrency=16, per_replica=True), 4).concurrency == 64
    assert load_of(LoadOptions(rate=5, per_replica=True), 4).arrivals.rows_per_s == 20
    with pytest.raises(UsageError, match="Give one of them"):
        load_of(LoadOptions(rate=5, concurrency=3))


def test_the_key_is_the_first_that_a_server_would_read(gpuinfer, bench):
    file = Path("keys")
    file.write_text("# of the load test\n\nsk-first name=load requests=60\nsk-second\n")
    file.chmod(0o600)
    with scripted(key="sk-first") as (url, _):
        assert bench(url, *SHORT, "--api-key-file", "keys")[1]["errors"] == {}
        file.chmod(0o644)
        code, _, err = gpuinfer("bench", "serve", url, *SHORT, "--api-key-file", "keys")
    assert code == 2
    assert "chmod 600" in err

"""`gpuinfer bench serve` as people and scripts meet it, against scripted servers that are processes of their own."""

from __future__ import annotations

import contextlib
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

pytestmark = pytest.mark.usefixtures("empty_folder")

ROOT = Path(__file__).parent.parent.parent
ENOUGH_S = 60.0
SHORT = ["--requests", "12", "--concurrency", "3", "--warmup", "0", "--output-tokens", "3"]


@contextlib.contextmanager
def scripted(folder, name, **script):
    """The URL of a scripted server in a process of its own."""
    file = folder / f"{name}.json"
    words = [f"{key}={json.dumps(value)}" for key, value in script.items()]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench_serve.scripted", str(file), *words], cwd=ROOT, stdin=subprocess.PIPE
    )
    try:
        until = time.monotonic() + ENOUGH_S
        while not file.exists():
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
        yield f"http://127.0.0.1:{json.loads(file.read_text())['port']}"
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with scripted(tmp_path_factory.mktemp("server"), "usual", route="replica=1; why=random; attempt=1") as url:
        yield url


def test_the_document_holds_to_its_schema(gpuinfer, server):
    code, out, _ = gpuinfer("bench", "serve", f"{server}/v1", *SHORT, "--json", "-", "--goodput", "e2e:60s")
    document = json.loads(out)
    jsonschema.validate(document, bench_schema())
    way = document["serve"]["ways"][0]
    assert (code, way["requests"], way["errors"], way["goodput_share"]) == (0, 12, {}, 1.0)
    assert way["routes"] == {"1": {"random": 12}}
    assert document["comparison"][0]["metric"] == "goodput_per_s"
    assert document["serve"]["load"]["concurrency"] == 3


def test_two_urls_on_the_same_requests_with_a_report(gpuinfer, server, tmp_path):
    with scripted(tmp_path, "slow", first_s=0.1) as slow:
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
    ("endpoint", "more"),
    [("chat", []), ("completions", ["--no-stream"]), ("evaluate", ["--rows", "2"]), ("evaluate", ["--binary"])],
)
def test_every_endpoint(gpuinfer, server, endpoint, more):
    code, out, _ = gpuinfer("bench", "serve", server, "--endpoint", endpoint, *more, *SHORT, "--json", "-")
    assert code == 0
    assert json.loads(out)["serve"]["ways"][0]["answered"] == 12


def test_an_open_loop_is_compared_by_its_latency(gpuinfer, server):
    words = ["--rate", "100", "--arrivals", "uniform", "--requests", "20", "--warmup", "0", "--json", "-"]
    code, out, _ = gpuinfer("bench", "serve", server, *words)
    document = json.loads(out)
    assert (code, document["comparison"][0]["metric"]) == (0, "latency_p95_s")
    assert document["serve"]["ways"][0]["offered_per_s"] is not None


def test_what_is_turned_away_is_told_by_kind(gpuinfer, tmp_path):
    with scripted(tmp_path, "full", fail=4) as url:
        code, out, _ = gpuinfer("bench", "serve", url, *SHORT, "--prompts", str(prompts(tmp_path)))
    assert code == 0
    assert "HTTP 429 (3)" in out


def prompts(folder):
    path = folder / "prompts.txt"
    path.write_text("tell me of it\nand of that\n")
    return path


def test_ctrl_c_keeps_what_was_measured(tmp_path):
    with scripted(tmp_path, "usual") as url:
        words = [
            "bench",
            "serve",
            url,
            "--duration",
            "0.3",
            "--warmup",
            "0",
            "--repeats",
            "100000",
            "--json",
            "found.json",
        ]
        process = subprocess.Popen(
            [sys.executable, "-m", "gpuinfer", *words], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert "repeat 1 of" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=ENOUGH_S)
    document = json.loads((tmp_path / "found.json").read_text())
    assert (process.returncode, document["status"]) == (3, "partial")
    assert document["comparison"]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_a_run_that_is_stopped_counts_as_far_as_it_came(tmp_path, number):
    with scripted(tmp_path, "noticed", notice=str(tmp_path / "asked")) as url:
        words = ["bench", "serve", url, "--duration", "1h", "--warmup", "0", "--json", "found.json"]
        process = subprocess.Popen(
            [sys.executable, "-m", "gpuinfer", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
        )
        until = time.monotonic() + ENOUGH_S
        while not (tmp_path / "asked").exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(number)
        process.wait(timeout=ENOUGH_S)
    document = json.loads((tmp_path / "found.json").read_text())
    assert (process.returncode, document["status"]) == (3, "partial")
    assert document["serve"]["ways"][0]["answered"] >= 50


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(["https://a.example"], "before the proxy that speaks TLS", id="https"),
        pytest.param(["localhost:8000"], "Give http://HOST:PORT", id="no scheme"),
        pytest.param(
            ["http://127.0.0.1:9", "--replicas", "2"], "--replicas is said of a server", id="replicas of a URL"
        ),
        pytest.param([], "which server? Give the URL of one, or --model", id="no server"),
        pytest.param(["http://127.0.0.1:9", "--compare", "replicas=1,2"], "--replicas is said of", id="compared ones"),
        pytest.param(["--compare", "replicass=1,2"], "Did you mean 'replicas'", id="a setting"),
        pytest.param(["--compare", "fast,slow"], "what is that?", id="no setting"),
        pytest.param(["http://127.0.0.1:9", "--rate", "5", "--concurrency", "2"], "Give one of them", id="two loads"),
        pytest.param(["http://127.0.0.1:9", "--goodput", "ttft"], "Write --goodput", id="a promise"),
        pytest.param(["http://127.0.0.1:9", "--input-tokens", "no"], "--input-tokens no: cannot be", id="a length"),
        pytest.param(["http://127.0.0.1:9", "--prompts", "missing.txt"], "cannot be read", id="no file"),
        pytest.param(["http://127.0.0.1:9", "--duration", "0"], "--duration", id="no time"),
        pytest.param(["http://127.0.0.1:9", "--fail-under", "0"], "nothing could fail that", id="nothing to hold"),
    ],
)
def test_bad_usage_ends_with_the_cure(gpuinfer, words, said):
    code, _, err = gpuinfer("bench", "serve", *words)
    assert code == 2
    assert said in err


def test_nobody_there(gpuinfer):
    code, _, err = gpuinfer("bench", "serve", "http://127.0.0.1:9", *SHORT)
    assert code == 1
    assert "cannot reach http://127.0.0.1:9" in err


def test_a_server_of_our_own_that_cannot_be_says_why(gpuinfer):
    code, _, err = gpuinfer("bench", "serve", "--model", "no-such-folder", *SHORT)
    assert code == 1
    assert "no-such-folder" in err


def test_our_own_server_is_started_and_ended(gpuinfer):
    words = ["--backend", "standin", "--model", "blobnet", "--features", "4", "-B", "beta=5ms"]
    code, out, _ = gpuinfer("bench", "serve", *words, "--compare", "S.max_wait=0,2ms", *SHORT, "--json", "-")
    document = json.loads(out)
    assert code == 0
    assert [row["name"] for row in document["comparison"]] == ["S.max_wait=0", "S.max_wait=2ms"]
    assert all("-S max_wait" in row["command"] for row in document["comparison"])


@pytest.mark.thorough
def test_replicas_scale(gpuinfer):
    """100 ms for a batch of up to 8, 16 clients for each replica: what one alone does, times their number."""
    server = ["--backend", "standin", "--model", "blobnet", "--features", "4"]
    server += ["-B", "alpha=0", "-B", "beta=100ms", "-B", "max_rows=8"]
    load = ["--per-replica", "--duration", "4s", "--compare", "replicas=1,2"]
    code, out, _ = gpuinfer("bench", "serve", *server, *load, "--json", "-")
    document = json.loads(out)
    scaling = document["serve"]["scaling"]
    assert code == 0
    assert [one["replicas"] for one in scaling] == [1, 2]
    assert all(one["efficiency"] > 0 for one in scaling)
    assert [len(way["routes"]) for way in document["serve"]["ways"]] == [1, 2]


# How flags become ways


KNOWN = {"replicas": "--replicas", "routing": "--routing", "strategy": "--strategy", "backend": "--backend"}


def ways(*compare, url=None, given=None):
    server = bench_serve.ComparedServer(KNOWN, given or {})
    return bench_serve.server_variants(
        compare, url, server, lambda changes, replicas: load_of(LoadOptions(), replicas), str
    )


def test_ways_are_all_combinations():
    found = ways("replicas=1,2", "least-loaded,sticky", given={"model": ["--model", "tiny"]})
    assert [way.name for way in found] == [
        "replicas=1, least-loaded",
        "replicas=1, sticky",
        "replicas=2, least-loaded",
        "replicas=2, sticky",
    ]
    assert found[3].words == ["--model", "tiny", "--replicas", "2", "--routing", "sticky"]
    assert found[3].replicas == 2


def test_a_plugins_options_are_compared():
    assert [way.words for way in ways("S.max_wait=0,5ms")] == [["-S", "max_wait=0"], ["-S", "max_wait=5ms"]]
    assert ways("dynamic,adaptive")[1].words == ["--strategy", "adaptive"]


def test_a_load_for_each_replica():
    assert load_of(LoadOptions(concurrency=16, per_replica=True), 4).concurrency == 64
    assert load_of(LoadOptions(rate=5, per_replica=True), 4).arrivals.rows_per_s == 20
    with pytest.raises(UsageError, match="Give one of them"):
        load_of(LoadOptions(rate=5, concurrency=3))


def test_the_key_is_the_first_that_a_server_would_read(gpuinfer, tmp_path):
    file = Path("keys")
    file.write_text("# of the load test\n\nsk-first name=load requests=60\nsk-second\n")
    file.chmod(0o600)
    with scripted(tmp_path, "locked", key="sk-first") as url:
        code, out, _ = gpuinfer("bench", "serve", url, *SHORT, "--api-key-file", "keys", "--json", "-")
        assert (code, json.loads(out)["serve"]["ways"][0]["errors"]) == (0, {})
        file.chmod(0o644)
        code, _, err = gpuinfer("bench", "serve", url, *SHORT, "--api-key-file", "keys")
    assert code == 2
    assert "chmod 600" in err

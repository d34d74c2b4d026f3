"""A server's front: keys and quotas, TLS, other origins' pages, the page and its events, the log of requests, spans."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from otlp_receiver import Received, receiving
from prometheus_client.parser import text_string_to_metric_families
from replica_servers import SECONDS, Server, bearer, serving, until, write_keys

from gpuinfer.api import ModelSpec
from gpuinfer.fleet.control import ControlServer
from gpuinfer.http.access import Access
from gpuinfer.serving.health import ReplicaHealth
from gpuinfer.serving.monitoring.live_page import FILES
from gpuinfer.serving.openai.schema import CHANGES
from gpuinfer.serving.routes import replica_routes
from gpuinfer.serving.service import ModelService, ServedModels

TINY = ("--model", "tiny", "-B", "slots=4", "-B", "threads=1")
ASKED = {"prompt": "Hello", "max_tokens": 8, "ignore_eos": True}
APP = "https://app.example.org"
KEYS = (
    "open name=open",
    "few name=alice requests=3",
    "whole name=carol tokens=20",
    "streamed name=dave tokens=20",
    "page name=page requests=1 tokens=9000",
)


def certificate(folder: Path, name: str = "localhost") -> Path:
    """A certificate of 127.0.0.1 signed by itself, made.pem and made.key; replaces the one before."""
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={name} -addext subjectAltName=IP:127.0.0.1"
    words = [*command.split(), "-out", folder / "next.pem", "-keyout", folder / "next.key"]
    subprocess.run(words, check=True, capture_output=True, timeout=SECONDS)
    (folder / "next.key").chmod(0o600)
    (folder / "next.key").rename(folder / "made.key")
    (folder / "next.pem").rename(folder / "made.pem")
    return folder / "made.pem"


@pytest.fixture(scope="module", params=[(), ("--replicas", "1")], ids=["one server", "a fleet"])
def server(request, tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("front")
    made = certificate(folder)
    write_keys(folder / "keys", *KEYS)
    write_keys(folder / "admin", "the-owners-key")
    words = (
        *TINY,
        *request.param,
        "--api-key-file",
        "keys",
        "--admin-key-file",
        "admin",
        "--allowed-origins",
        APP,
        "--log-format",
        "json",
    )
    with serving(*words, "--tls-cert", made, "--tls-key", "made.key", folder=folder, certificate=made) as server:
        yield server


@pytest.fixture
def client(server, monkeypatch):
    """OpenAI's client with a key."""
    monkeypatch.setenv("SSL_CERT_FILE", str(server.certificate))
    with contextlib.ExitStack() as closing:

        def opened(key: str) -> openai.OpenAI:
            one = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=SECONDS)
            return closing.enter_context(one)

        yield opened


def logged(server: Server, **wanted: object) -> dict:
    """The one line of the request log with these fields."""
    found: list[dict] = []

    def look() -> bool:
        lines = [json.loads(line) for line in server.log.splitlines() if '"method"' in line]
        found[:] = [one for one in lines if wanted.items() <= one.items()]
        return bool(found)

    until(look, lambda: server.log)
    (line,) = found
    return line


def test_requests_beyond_a_quota_are_refused_as_openai_does(server, client):
    alice = client("few")
    for _ in range(3):
        alice.completions.create(model="tiny", prompt="a", max_tokens=1)
    with pytest.raises(openai.RateLimitError) as refused:
        alice.completions.create(model="tiny", prompt="a", max_tokens=1)
    assert (refused.value.type, refused.value.code) == ("requests", "rate_limit_exceeded")
    headers = refused.value.response.headers
    assert 1 <= int(headers["retry-after"]) <= 20, "of three a minute one is back in twenty seconds"
    assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("3", "0")
    other = server.ask("/v1/completions", ASKED, bearer("open"))
    assert (other.status, other.headers.get("x-ratelimit-limit-requests")) == (200, None)
    assert server.ask("/v1/models", headers=bearer("few")).status == 200, "GET costs nothing"
    assert "'alice' has used its 3 requests a minute" in logged(server, key="alice", status=429)["refused"]
    assert '"few"' not in server.log, "a key is in the log"


@pytest.mark.parametrize("key", ["whole", "streamed"])
def test_tokens_beyond_a_quota_are_refused_until_they_are_back(server, key):
    asked = {**ASKED, "stream": key == "streamed"}
    answers = [server.ask("/v1/completions", asked, bearer(key)) for _ in range(6)]
    assert (answers[0].status, answers[-1].status) == (200, 429), "each costs its prompt and eight tokens"
    assert (answers[-1].error["type"], answers[-1].error["code"]) == ("tokens", "rate_limit_exceeded")
    assert int(answers[-1].headers["retry-after"]) >= 1


@pytest.mark.thorough
def test_keys_are_replaced_without_a_restart_and_a_wrong_file_changes_nothing(server):
    folder = server.log_file.parent
    write_keys(folder / "keys", *KEYS, "new name=new")
    until(lambda: server.ask("/v1/models", headers=bearer("new")).status == 200, lambda: server.log)
    write_keys(folder / "keys", *KEYS)
    until(lambda: server.ask("/v1/models", headers=bearer("new")).status == 401, lambda: server.log)
    write_keys(folder / "keys", "# all gone")
    until(lambda: "What was read before holds" in server.log, lambda: server.log)
    assert server.ask("/v1/completions", ASKED, bearer("open")).status == 200
    assert server.ask("/v1/completions", ASKED).status == 401


def test_tls_serves_whole_answers_and_streams_and_takes_a_renewed_certificate(server, client):
    asking = {"model": "tiny", "prompt": "Hello", "max_tokens": 16, "seed": 1}
    whole = client("open").completions.create(**asking).choices[0].text
    stream = client("open").completions.create(**asking, stream=True)
    assert "".join(one.choices[0].text for one in stream) == whole
    plain = f"http://{server.host}:{server.port}/health"
    with pytest.raises((OSError, http.client.HTTPException)):
        urllib.request.urlopen(plain, timeout=SECONDS)
    certificate(server.log_file.parent, "renewed")
    until(lambda: server.trusted(), lambda: server.log)
    assert server.ask("/health").json["status"] == "ready"


def test_a_page_of_an_allowed_origin_may_ask_and_another_may_not(server):
    preflight = {
        "Origin": APP,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }
    allowed = server.ask("/v1/completions", headers=preflight, method="OPTIONS")
    assert (allowed.status, allowed.headers["access-control-allow-origin"]) == (204, APP)
    assert allowed.headers["access-control-allow-headers"] == preflight["Access-Control-Request-Headers"]
    assert "POST" in allowed.headers["access-control-allow-methods"]
    key = bearer("page")
    for headers, status in (({}, 401), (key, 200), (key, 429)):
        answer = server.ask("/v1/completions", {"prompt": "a", "max_tokens": 1}, {**headers, "Origin": APP})
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, APP)
        assert answer.headers["vary"] == "Origin"
        own = {name for name in answer.headers if name.startswith("x-") or name == "retry-after"}
        assert own <= set(answer.headers["access-control-expose-headers"].lower().split(", "))
        assert status != 200 or "x-ratelimit-reset-tokens" in own
    own = server.ask("/stats", headers={**key, "Origin": APP})
    assert (own.status, own.headers["access-control-allow-origin"]) == (200, APP)
    for method in ("GET", "OPTIONS"):
        evil = server.ask("/v1/models", headers={**key, "Origin": "https://evil.example"}, method=method)
        assert (evil.status, evil.headers.get("access-control-allow-origin")) == (403, None)
        assert "--allowed-origins" in evil.error["message"]
    assert "access-control-allow-origin" not in server.ask("/v1/models", headers=key).headers


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_request_is_one_line_of_the_log_with_its_tokens(server, stream):
    name = f"mine-{stream}"
    trace = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    headers = {"X-Request-Id": name, "traceparent": trace, **bearer("open")}
    assert server.ask("/v1/completions?model=tiny", {**ASKED, "stream": stream}, headers).status == 200
    line = logged(server, id=name)
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert (line["model"], line["key"], line["trace"]) == ("tiny", "open", trace)
    assert (line["input_tokens"], line["output_tokens"]) == (5, 8)
    assert line["took_ms"] > 0


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "why"),
    [
        pytest.param("/nowhere", None, {}, 404, "nothing at /nowhere", id="no route"),
        pytest.param("/v1/nowhere", None, bearer("open"), 404, "nothing at /v1/nowhere", id="no route of a replica"),
        pytest.param("/stats", None, {"Host": "evil.example"}, 403, "--allowed-hosts", id="another name"),
        pytest.param("/v1/completions", {"prompt": "a", "n": -1}, bearer("open"), 400, "n", id="a bad request"),
        pytest.param("/predict", b"{", bearer("open"), 400, "JSON", id="no JSON"),
    ],
)
def test_a_refusal_is_in_the_log_with_its_reason_and_probes_are_not(server, path, body, headers, status, why):
    assert server.ask("/health").status == 200
    assert server.ask(path, body, headers).status == status
    assert why in logged(server, path=path, status=status)["refused"]
    assert '"/health"' not in server.log


def test_what_is_no_http_and_a_client_that_went_away_are_in_the_log(server):
    with server.socket() as raw:
        raw.sendall(b"GET / HTTP/9.9\r\n\r\n")
        assert raw.recv(1 << 16)
    assert logged(server, status=505)
    headers = "X-Request-Id: gone\r\nAuthorization: Bearer open\r\n"
    with server.begun("/v1/completions", {**ASKED, "max_tokens": 4000, "stream": True}, headers) as raw:
        came = b""
        while b"data: " not in came:
            came += (more := raw.recv(1 << 16))
            assert more, came
        raw.shutdown(socket.SHUT_RDWR)
    assert 0 < logged(server, id="gone")["output_tokens"] < 4000


OPEN = {"/health", "/v2", "/v2/health/live", "/v2/health/ready", *FILES}


class Nothing:
    moved = waiting_rows = 0
    longest_s, serving = 0.0, False


def of_a_replica(kind: str) -> list[tuple[str, str, str]]:
    models = ServedModels([ModelService(Nothing(), ReplicaHealth(Nothing(), "m", kind), ModelSpec("m", kind=kind))])
    return [(route.method, route.path, route.access) for route in replica_routes(models)]


ROUTES = [(route.method, route.path, route.access) for route in ControlServer(None, Access(), "key", "").paths.routes]
REPLICAS = [("GET", "/v1/models", "api"), ("POST", "/v1/completions", "api"), ("POST", "/predict", "api")]
OF_ONE = [*of_a_replica("text"), *of_a_replica("rows")]


def test_no_route_answers_without_its_key_no_key_can_be_seen_and_what_a_fleet_keeps_is_for_its_owner_alone(server):
    def status(method: str, path: str, headers: dict[str, str]) -> int:
        """Of the answer's head alone: events have no end."""
        with contextlib.closing(server.connect()) as connection:
            body = b"{}" if method == "POST" else None
            connection.request(method, path.replace("{id}", "0"), body, headers)
            return connection.getresponse().status

    family = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    told = [server.log, *(" ".join([*one.cmdline(), *one.environ().values()]) for one in family)]
    keys = ["open", "the-owners-key"]
    assert [{path for _, path, access in one if access == "open"} for one in (ROUTES, OF_ONE)] == [OPEN, OPEN]
    assert {path for _, path, access in ROUTES if access == "admin"} == {
        "/workers",
        "/workers/{id}",
        "/profile",
        *CHANGES,
    }
    replica = next((one.cmdline() for one in family if "--setup-file" in one.cmdline()), None)
    for method, path, access in OF_ONE if replica is None else [*ROUTES, *REPLICAS]:
        wrong = [{}, bearer("wrong"), bearer(""), {"Authorization": "open"}, {"Authorization": "Basic open"}]
        for headers in [*wrong, *([bearer("open")] if access == "admin" else [])]:
            assert status(method, path, headers) == (200 if access == "open" else 401)
    if replica is not None:
        assert status("GET", "/workers", bearer("the-owners-key")) == 200
        folder = Path(replica[replica.index("--setup-file") + 1]).parent
        keys += [(folder / name).read_text().strip() for name in ("replica.key", "admin.key")]
        told += [log.read_text() for log in folder.glob("*.log")]
        assert folder.stat().st_mode & 0o777 == 0o700
        assert [one for one in folder.iterdir() if one.suffix != ".log" and one.stat().st_mode & 0o077] == []
        open_ports = [one for child in family for one in child.net_connections("inet") if one.status == "LISTEN"]
        assert {one.laddr.ip for one in open_ports} == {"127.0.0.1"}
    for key in keys[1:]:
        assert not [text for text in told if key in text]


TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[Received]:
    with receiving() as received:
        yield received


def test_for_people_the_log_is_words_a_star_lets_all_pages_in_and_each_request_is_a_span(collector, tmp_path):
    with serving(*TINY, "-v", "--allowed-origins", "*", "--otlp-endpoint", collector.url, folder=tmp_path) as server:
        headers = {"Origin": "https://a.example", "traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
        answer = server.ask("/v1/completions", ASKED, headers)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "*")
        assert server.ask("/v1/completions", {**ASKED, "odd\ngpuinfer: forged\x1b[2J": 1}).status == 400
        until(lambda: "forged" in server.log)
        for said in ("gpuinfer: POST /v1/completions 200 in ", "+8 tokens, model tiny", "id mine", TRACE):
            assert said in server.log
        assert "\ngpuinfer: forged" not in server.log, "a client writes no line of its own"
        assert "\x1b" not in server.log
        assert server.end() == 0  # which sends what is left
    good, bad = (span for _, span in collector.spans)
    assert (good.trace_id.hex(), good.parent_span_id.hex(), good.name) == (TRACE, PARENT, "POST /v1/completions")
    told = {one.key: one.value for one in good.attributes}
    assert told["gpuinfer.request_id"].string_value == "mine"
    assert told["gen_ai.usage.output_tokens"].int_value == 8
    assert [event.name for event in good.events] == ["admitted", "first token"]
    assert bad.status.code == 2


@contextlib.contextmanager
def watching(server: Server, headers: dict[str, str] | None = None) -> Iterator[Iterator[tuple[str, Any]]]:
    with contextlib.closing(server.connect()) as connection:
        connection.request("GET", "/events", headers=headers or {})
        response = connection.getresponse()
        assert (response.status, response.getheader("content-type")) == (200, "text/event-stream")

        def events() -> Iterator[tuple[str, Any]]:
            while name := response.readline().decode().strip():
                data = response.readline().decode()
                assert response.readline() == b"\n"
                yield name.removeprefix("event: "), json.loads(data.removeprefix("data: "))

        yield events()


def metrics(server: Server) -> dict[tuple[str, str], float]:
    answer = server.ask("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = text_string_to_metric_families(answer.body.decode())
    samples = [sample for family in families for sample in family.samples]
    return {(sample.name, ",".join(sample.labels.values())): sample.value for sample in samples}


def test_metrics_and_events_count_what_was_asked_and_no_counter_falls(rows):
    row, asked = {"x": [0.5] * 16}, ("gpuinfer_requests_total", "normal")
    before = metrics(rows)
    for _ in range(5):
        assert rows.ask("/v1/evaluate", row).status == 200
    after = metrics(rows)
    assert after["gpuinfer_model_info", "blobnet-small"] == 1
    assert after[asked] - before[asked] >= 5
    assert after["gpuinfer_request_duration_seconds_count", "normal"] == after[asked]
    rising = ("_total", "_count", "_sum", "_bucket")
    assert not [key for key in before if key[0].endswith(rising) and after[key] < before[key]]
    assert after[asked] <= rows.ask("/stats").json["requests"]
    with watching(rows) as events:
        name, first = next(events)
        assert (name, first["about"]["status"]) == ("look", "ready")
        assert rows.ask("/v1/evaluate", row).status == 200
        wanted = first["totals"]["requests"] + 1
        look = next(look for _, look in events if look["totals"]["requests"] >= wanted)
        assert look["latency_s"]["p50"] > 0
        assert look["batches"]["sizes"]

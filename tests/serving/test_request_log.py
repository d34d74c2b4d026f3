"""One line for each request: for people with -v, for programs with --log-format json."""

from __future__ import annotations

import json
import socket

import pytest
from replica_servers import SECONDS, serving, until

TINY = ("--model", "tiny", "-B", "slots=4", "-B", "threads=1")
ASKED = {"prompt": "Hello", "max_tokens": 8, "ignore_eos": True}


def lines(server) -> list[dict]:
    return [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]


def requests(server) -> list[dict]:
    return [one for one in lines(server) if "method" in one]


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logged")
    with serving(*TINY, "--log-format", "json", folder=folder) as server:
        yield server


def told_of(server, path: str, status: int) -> dict:
    """The line of the one request for this path that was answered so."""
    found = [one for one in requests(server) if (one["path"], one["status"]) == (path, status)]
    assert len(found) == 1, server.log
    return found[0]


def test_each_line_is_json_and_says_what_a_request_was_answered_and_cost(logged):
    headers = {"X-Request-Id": "mine-1", "traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}
    answer = logged.ask("/v1/completions?model=tiny", ASKED, headers).json
    until(lambda: any(one.get("id") == "mine-1" for one in requests(logged)), lambda: logged.log)
    (told,) = [one for one in requests(logged) if one.get("id") == "mine-1"]
    assert (told["method"], told["path"], told["status"], told["model"]) == ("POST", "/v1/completions", 200, "tiny")
    usage = answer["usage"]
    assert (told["input_tokens"], told["output_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert told["trace"] == headers["traceparent"]
    assert told["took_ms"] > 0
    assert all(line.startswith("{") for line in logged.log.splitlines()), logged.log
    assert any("/v1/completions" in one.get("message", "") for one in lines(logged)), "where it listens, as a message"


def test_a_stream_counts_its_tokens_too(logged):
    logged.ask("/v1/completions", {**ASKED, "stream": True}, {"X-Request-Id": "mine-2"})
    until(lambda: any(one.get("id") == "mine-2" for one in requests(logged)), lambda: logged.log)
    (told,) = [one for one in requests(logged) if one.get("id") == "mine-2"]
    assert (told["status"], told["output_tokens"]) == (200, 8)


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "why"),
    [
        pytest.param("/nowhere", None, {}, 404, "nothing at /nowhere", id="no route"),
        pytest.param("/v1/models", None, {"Host": "evil.example"}, 403, "--allowed-hosts", id="another name"),
        pytest.param("/v1/completions", {"prompt": "a", "n": -1}, {}, 400, "n", id="a request that cannot be"),
        pytest.param("/predict", b"{", {}, 400, "JSON", id="no JSON"),
    ],
)
def test_a_refusal_is_there_with_its_reason(logged, path, body, headers, status, why):
    assert logged.ask(path, body, headers).status == status
    until(lambda: any(one["status"] == status and one["path"] == path for one in requests(logged)))
    assert why in told_of(logged, path, status)["refused"]


def test_what_is_no_http_is_a_line_too(logged):
    with socket.create_connection((logged.host, logged.port), timeout=SECONDS) as raw:
        raw.sendall(b"GET / HTTP/9.9\r\n\r\n")
        assert raw.recv(1 << 16)
    until(lambda: any(one["status"] == 505 for one in requests(logged)), lambda: logged.log)


def test_a_client_that_went_away_is_there(logged):
    body = json.dumps({**ASKED, "max_tokens": 4000, "stream": True}).encode()
    with socket.create_connection((logged.host, logged.port), timeout=SECONDS) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: gone\r\n")
        raw.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        came = b""
        while b"data: " not in came:
            came += (more := raw.recv(1 << 16))
            assert more, came
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    until(lambda: any(one.get("id") == "gone" for one in requests(logged)), lambda: logged.log)
    (told,) = [one for one in requests(logged) if one.get("id") == "gone"]
    assert 0 < told["output_tokens"] < 4000


def test_probes_do_not_fill_it(logged):
    for _ in range(3):
        assert logged.ask("/health").status == 200
    logged.ask("/nowhere-else")
    until(lambda: any(one["path"] == "/nowhere-else" for one in requests(logged)))
    assert not [one for one in requests(logged) if one["path"] == "/health"]


def test_for_people_it_is_a_line_of_words(tmp_path):
    with serving(*TINY, "-v", folder=tmp_path) as server:
        server.ask("/v1/completions", ASKED)
        server.ask("/nowhere")
        until(lambda: "/nowhere" in server.log)
        assert "gpuinfer: POST /v1/completions 200 in " in server.log
        assert "+8 tokens, model tiny" in server.log
        assert "there is nothing at /nowhere" in server.log
        server.ask("/v1/completions", {**ASKED, "odd\ngpuinfer: forged\x1b[2J": 1})
        until(lambda: "forged" in server.log)
        assert "\ngpuinfer: forged" not in server.log, "a client writes no line of its own"
        assert "\x1b" not in server.log


def test_a_fleet_logs_each_request_once_and_no_probe(tmp_path):
    with serving(*TINY, "--replicas", "1", "-v", folder=tmp_path) as server:
        assert server.ask("/health").status == 200
        for path in ("/nowhere", "/v1/nowhere"):
            assert server.ask(path).status == 404
        assert server.ask("/v1/completions", ASKED).status == 200
        until(lambda: "+8 tokens, model tiny, replica 0" in server.log, lambda: server.log)
        lines = [line for line in server.log.splitlines() if line.startswith("gpuinfer: ")]
        assert [line.split(" in ")[0] for line in lines] == [
            "gpuinfer: GET /nowhere 404",
            "gpuinfer: GET /v1/nowhere 404",
            "gpuinfer: POST /v1/completions 200",
        ]
        assert "there is nothing at /v1/nowhere" in lines[1], "in the replica's words"
        assert "+8 tokens, model tiny, replica 0" in lines[2]

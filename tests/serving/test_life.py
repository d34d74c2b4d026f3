"""How a server starts, drains, ends, and gives up what nobody waits for."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import struct
import threading

import pytest
from replica_servers import SECONDS, Server, serving, until

LONG = {"prompt": ["Hello"] * 20, "n": 8, "max_tokens": 1900, "ignore_eos": True}  # 20 times all slots: many seconds
SLOW = ("--model", "blobnet", "--features", 4, "--actions", 2, "--seats", 2, "--backend", "standin", "-B", "alpha=0")
ROW = {"x": [1.0] * 4}


def test_health_says_what_it_serves(tiny):
    answer = tiny.ask("/health")
    assert answer.status == 200
    told = answer.json
    assert {told[name] for name in ("alive", "ready")} == {True}
    assert (told["server"], told["status"], told["model"], told["kind"]) == ("gpuinfer", "ready", "tiny", "text")
    assert told["stuck"] is False


def test_a_client_that_goes_away_frees_its_slot(tiny):
    before = tiny.ask("/stats").json["errors"]["cancelled"]
    with socket.create_connection((tiny.host, tiny.port), SECONDS) as client:
        body = json.dumps({**LONG, "stream": True}).encode()
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        assert tiny.ask("/health").json["busy"]
    until(lambda: tiny.ask("/stats").json["errors"]["cancelled"] > before)
    until(lambda: tiny.ask("/health").json["in_flight"] == 0)


@pytest.mark.thorough
def test_one_that_reads_nothing_holds_up_nobody(tiny):
    """Its parts are joined while it does not read, and its slot is free once its answer is drawn."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((tiny.host, tiny.port))
        body = json.dumps({**LONG, "prompt": "Hello", "stream": True, "logprobs": 5}).encode()
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        until(lambda: tiny.ask("/health").json["in_flight"] == 1)
        assert tiny.ask("/v1/completions", {"prompt": "Hello", "max_tokens": 2}).status == 200
    until(lambda: tiny.ask("/health").json["in_flight"] == 0)


def test_one_that_goes_away_before_its_answer_begins_does_too(tiny):
    before = tiny.ask("/stats").json["errors"]["cancelled"]
    with socket.create_connection((tiny.host, tiny.port), SECONDS) as client:
        body = json.dumps(LONG).encode()
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        until(lambda: tiny.ask("/health").json["in_flight"])
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # to close is to reset
    until(lambda: tiny.ask("/stats").json["errors"]["cancelled"] > before)
    until(lambda: tiny.ask("/health").json["in_flight"] == 0)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param("/v1/completions", {"prompt": "Hello", "max_tokens": 40, "ignore_eos": True}, id="whole"),
        pytest.param("/v1/completions", {"prompt": "Hello", "max_tokens": 40, "stream": True}, id="streamed"),
        pytest.param("/health", None, id="health"),
        pytest.param("/stats", None, id="stats"),
    ],
)
def test_a_client_that_has_said_all_gets_its_answer_and_nothing_before_it(tiny, path, body):
    """As `nc -N`, some proxies and health checkers do."""
    assert tiny.said_all(path, body).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.thorough
def test_with_few_descriptors_further_clients_hear_a_503_and_the_log_says_why(tmp_path):
    words = ("--model", "tiny", "-B", "threads=1", "-B", "slots=2")
    with serving(*words, folder=tmp_path, descriptors=64) as server:
        assert "since this process may open few files. Raise the limit: ulimit -n 65536" in server.log
        slow = [socket.create_connection((server.host, server.port), SECONDS) for _ in range(100)]
        for client in slow:
            with contextlib.suppress(ConnectionError):  # it has been refused already
                client.sendall(b"POST /v1/completions HT")
        found = [server.ask("/v1/models") for _ in range(20)]
        assert {answer.status for answer in found} == {503}
        assert {answer.error["type"] for answer in found} == {"overloaded_error"}
        refused = [client for client in slow if said(client)]
        assert len(refused) >= 60
        assert "connections at once" in server.log
        for client in slow:
            client.close()
        until(lambda: server.ask("/v1/models").status == 200)


def said(client: socket.socket) -> bool:
    """Whether it has been refused in words, rather than being waited for; a reset without a byte fails."""
    client.settimeout(0.05)
    try:
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
    except TimeoutError:
        return False
    return True


def test_sigterm_finishes_what_is_under_way_and_takes_nothing_new(tmp_path):
    with serving(*SLOW, "-B", "beta=4", folder=tmp_path) as server:
        found = []
        asking = threading.Thread(target=lambda: found.append(server.ask("/v1/evaluate", ROW)))
        asking.start()
        until(lambda: server.ask("/health").json["in_flight"] == 1)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.ask("/health").status == 503)
        assert server.ask("/health").json["status"] == "draining"
        refused = server.ask("/v1/evaluate", ROW)
        assert (refused.status, refused.error["type"]) == (503, "overloaded_error")
        assert int(refused.headers["retry-after"]) >= 1
        asking.join(SECONDS)
        assert found[0].status == 200
        assert server.process.wait(SECONDS) == 0
        assert not server.ready_file.exists()
        assert "finishing what is under way" in server.log


@pytest.mark.parametrize("second", [False, True], ids=["a drain has an end", "a second signal ends at once"])
def test_a_full_queue_is_429_a_late_request_408_and_what_is_under_way_is_broken_off_in_the_end(tmp_path, second):
    drain_s = 600 if second else 0.2
    words = (*SLOW, "-B", "beta=600", "-B", "max_rows=1", "--max-queue-rows", 2, "--drain-timeout", drain_s)
    with serving(*words, folder=tmp_path) as server:
        clients = []
        for count in range(1, 4):
            if count == 2:
                late = server.ask("/v1/evaluate", ROW, {"X-Gpuinfer-Timeout": "0.05", "X-Gpuinfer-Priority": "high"})
                assert late.status == 408
            clients.append(server.connect())
            clients[-1].request("POST", "/v1/evaluate", json.dumps(ROW))
            until(lambda count=count: server.ask("/health").json["in_flight"] == count)
        refused = server.ask("/v1/evaluate", ROW)
        assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["x-gpuinfer-error"] == "QueueFull"
        assert server.ask("/health").json["waiting_rows"] == 2
        wrong = server.ask("/v1/evaluate", {"x": [1.0] * 5})
        assert wrong.status == 400, "what is wrong is said before what is full"
        if second:
            server.process.send_signal(signal.SIGINT)
            until(lambda: "finishing" in server.log)
        assert server.end(signal.SIGINT if second else signal.SIGTERM) == 3
        assert "3 requests were broken off" in server.log
        for client in clients:
            client.close()


@pytest.mark.thorough
def test_a_backend_that_hangs_is_told_by_its_heartbeat_while_the_port_answers(tmp_path):
    with serving(*SLOW, "-B", "beta=0.001", "-B", "drift=1000000", "-B", "drift_after=1", folder=tmp_path) as server:
        clients: list[http.client.HTTPConnection] = []
        until(lambda: _drifted(server, clients))
        until(lambda: server.ask("/health").json["stuck"])
        told = server.ask("/health")
        assert told.status == 503
        assert told.json["status"] == "stuck"
        assert told.json["heartbeat_age_s"] > 3
        for client in clients:
            client.close()


def _drifted(server: Server, clients: list[http.client.HTTPConnection]) -> bool:
    """Whether a request is not answered in a while. Its connection stays open: it is under way."""
    clients.append(http.client.HTTPConnection(server.host, server.port, timeout=2))
    clients[-1].request("POST", "/v1/evaluate", json.dumps(ROW))
    try:
        clients[-1].getresponse().read()
    except TimeoutError:  # or it was slow for once, and is answered by now
        return bool(server.ask("/health").json["in_flight"])
    return False


def test_a_model_that_cannot_be_had_ends_it_with_a_sentence(tmp_path):
    server = Server("--model", "nowhere:factory", "--features", 3, folder=tmp_path)
    assert server.process.wait(SECONDS) == 2
    assert "nowhere" in server.log
    assert "Traceback" not in server.log


def test_a_port_that_is_taken_is_named_with_its_holder(tiny, tmp_path):
    server = Server("--model", "tiny", "--port", tiny.port, folder=tmp_path)
    assert server.process.wait(SECONDS) == 2
    assert f"pid {tiny.process.pid}" in server.log
    assert "--port" in server.log


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param((), "serve needs a model: give --model DIR", id="no model"),
        pytest.param(("--model", "tiny", "--host", "0.0.0.0"), "--api-key-file", id="others could ask"),
        pytest.param(("--model", "tiny", "--api-key-file", "missing.txt"), "missing.txt", id="no key file"),
        pytest.param(("--model", "a:b"), "--features", id="rows of no length"),
        pytest.param(("--model", "tiny", "--features", "3"), "--features", id="rows of a text model"),
        pytest.param(("--setup-file", "none.json"), "none.json", id="no setup file"),
    ],
)
def test_what_cannot_be_served_is_a_sentence(gpuinfer, words, said):
    code, _, err = gpuinfer("serve", *words)
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) <= 3


def test_an_empty_key_file_is_an_error_and_no_key_at_all(gpuinfer, tmp_path):
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    code, _, err = gpuinfer("serve", "--model", "tiny", "--api-key-file", str(keys))
    assert code == 2
    assert "no key" in err

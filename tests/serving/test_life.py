"""How a server starts, drains, ends, and gives up what nobody waits for."""

from __future__ import annotations

import ast
import contextlib
import http.client
import json
import signal
import socket
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from replica_servers import SECONDS, Server, serving, until

from gpuinfer.serving.health import COMPUTING, FIRST_S, LOOK_S, STUCK_S, ReplicaHealth

PACKAGE = Path(__file__).parents[2] / "gpuinfer"
LONG = {"prompt": ["Hello"] * 20, "n": 8, "max_tokens": 1900, "ignore_eos": True}  # 20 times all slots: many seconds
SLOW = ("--model", "blobnet", "--features", 4, "--actions", 2, "--seats", 2, "--backend", "standin", "-B", "alpha=0")
ROW = {"x": [1.0] * 4}


def test_a_client_that_goes_away_frees_its_slot_whether_its_answer_has_begun_or_not(tiny):
    told = tiny.ask("/health").json
    named = {"server": "gpuinfer", "status": "ready", "model": "tiny", "kind": "text"}
    assert {**told, **named, "alive": True, "ready": True, "stuck": False} == told
    for stream in (True, False):
        before = tiny.ask("/stats").json["errors"]["cancelled"]
        with tiny.begun("/v1/completions", {**LONG, "stream": stream}) as client:
            if stream:
                assert client.recv(100).startswith(b"HTTP/1.1 200")
                assert tiny.ask("/health").json["busy"]
            else:
                until(lambda: tiny.ask("/health").json["in_flight"])
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # to close is to reset
        until(lambda before=before: tiny.ask("/stats").json["errors"]["cancelled"] > before)
        until(lambda: tiny.ask("/health").json["in_flight"] == 0)


@pytest.mark.thorough
def test_one_that_reads_nothing_holds_up_nobody(tiny):
    """Its parts are joined while it does not read, and its slot is free once its answer is drawn."""
    with tiny.begun("/v1/completions", {**LONG, "prompt": "Hello", "stream": True, "logprobs": 5}):
        until(lambda: tiny.ask("/health").json["in_flight"] == 1)
        assert tiny.ask("/v1/completions", {"prompt": "Hello", "max_tokens": 2}).status == 200
    until(lambda: tiny.ask("/health").json["in_flight"] == 0)


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
    with serving(*SLOW, "-B", "beta=4", folder=tmp_path) as server, server.begun("/events") as watching:
        assert watching.recv(100).startswith(b"HTTP/1.1 200")  # events without end, that hold nothing up
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
        until(lambda: drifted(server, clients))
        until(lambda: server.ask("/health").json["stuck"])
        told = server.ask("/health")
        assert told.status == 503
        assert told.json["status"] == "stuck"
        assert told.json["heartbeat_age_s"] > 3
        for client in clients:
            client.close()


def drifted(server: Server, clients: list[http.client.HTTPConnection]) -> bool:
    """Whether a request is not answered in a while. Its connection stays open: it is under way."""
    clients.append(http.client.HTTPConnection(server.host, server.port, timeout=2))
    clients[-1].request("POST", "/v1/evaluate", json.dumps(ROW))
    try:
        clients[-1].getresponse().read()
    except TimeoutError:  # or it was slow for once, and is answered by now
        return bool(server.ask("/health").json["in_flight"])
    return False


def test_a_model_that_cannot_be_had_and_a_port_that_is_taken_end_it_with_a_sentence(tiny, tmp_path):
    server = Server("--model", "nowhere:factory", "--features", 3, folder=tmp_path)
    assert server.process.wait(SECONDS) == 2
    assert "nowhere" in server.log
    assert "Traceback" not in server.log
    server = Server("--model", "tiny", "--port", tiny.port, folder=tmp_path)
    assert server.process.wait(SECONDS) == 2
    assert f"pid {tiny.process.pid}" in server.log
    assert "--port" in server.log


@dataclass
class Engine:
    moved: int = 0
    longest_s: float = 0.1
    waiting_rows: int = 0
    room: int = 4
    serving: bool = True
    lost: bool = False


@pytest.mark.parametrize(
    ("engine", "seconds", "moves", "cores", "status", "alive"),
    [
        (Engine(), STUCK_S + LOOK_S, False, 0.0, "stuck", True),  # work, and nothing moves
        (Engine(serving=False, lost=True), LOOK_S, False, 0.0, "stuck", False),
        (Engine(), COMPUTING * STUCK_S + 1, False, 1.0, "stuck", True),  # it spins for ever
        (Engine(), 1000, True, 0.0, "ready", True),
        (Engine(serving=False), 1000, False, 0.0, "ready", True),
        (Engine(), STUCK_S, False, 0.0, "ready", True),
        (Engine(longest_s=5), 19, False, 0.0, "ready", True),  # its steps take long
        (Engine(longest_s=0), FIRST_S - 1, False, 0.0, "ready", True),  # it has not answered anything yet
        (Engine(), COMPUTING * STUCK_S - 1, False, 1.0, "ready", True),  # it computes all the while
    ],
)
def test_busy_is_healthy_and_stuck_is_one_that_has_work_and_moves_nothing(engine, seconds, moves, cores, status, alive):
    spent = [0.0]
    health = ReplicaHealth(engine, "m", "rows", "ready", cpu_s=lambda: spent[0])
    health.look_once()
    for _ in range(round(seconds / LOOK_S)):
        engine.moved += moves
        spent[0] += cores * LOOK_S
        health.look_once()
    assert (health.status, health.told()["alive"], health.code) == (status, alive, 503 if status == "stuck" else 200)
    if status == "stuck" and alive:
        assert health.told()["heartbeat_age_s"] > STUCK_S
        engine.moved += 1
        health.look_once()
        assert health.status == "ready", "one that moves again is well again"


STRANGERS = ("http/", "serving/", "fleet/", "models/row_format.py")  # what reads bytes of strangers


@pytest.mark.thorough
def test_no_guard_goes_away_no_shell_is_asked_and_keys_are_compared_in_constant_time():
    """An `assert` is gone under -O: it may only tell the type checker something, and not where strangers' bytes are
    read. A shell interprets what a name may hold.
    """
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assert):
                test = ast.unparse(node.test)
                assert test.endswith(" is not None") or test.startswith("isinstance("), f"{name}:{node.lineno}: {test}"
                assert not name.startswith(STRANGERS), f"{name}:{node.lineno}: use if … raise"
            if isinstance(node, ast.Call):
                if getattr(node.func, "attr", getattr(node.func, "id", "")) in ("eval", "exec", "system", "popen"):
                    called = ast.unparse(node.func)
                    assert called not in ("eval", "exec", "os.system", "os.popen"), f"{name}:{node.lineno}: {called}"
                assert not [word for word in node.keywords if word.arg == "shell"], f"{name}:{node.lineno}: a shell"
    for name, word in (
        ("http/access.py", "compare_digest"),
        ("fleet/control.py", "compare_digest"),
        ("http/route_table.py", ".check_key("),
        ("fleet/router/client_connection.py", ".check_key("),
    ):
        assert word in (PACKAGE / name).read_text(), name

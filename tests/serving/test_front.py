"""One server and one fleet, over TLS, with keys and quotas, other origins' pages, and a log of requests in JSON."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from replica_servers import SECONDS, Server, serving, until

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


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def write_keys(folder: Path, *lines: str) -> None:
    (folder / "next").touch(mode=0o600)
    (folder / "next").write_text("\n".join(lines))
    (folder / "next").rename(folder / "keys")


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
    write_keys(folder, *KEYS)
    words = (*TINY, *request.param, "--api-key-file", "keys", "--allowed-origins", APP, "--log-format", "json")
    with serving(*words, "--tls-cert", made, "--tls-key", "made.key", folder=folder, certificate=made) as server:
        yield server


@pytest.fixture
def client(server, monkeypatch):
    """OpenAI's client with a key."""
    monkeypatch.setenv("SSL_CERT_FILE", str(server.certificate))
    return lambda key: openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=SECONDS)


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
    statuses = [server.ask("/v1/completions", asked, bearer(key)).status for _ in range(6)]
    assert (statuses[0], statuses[-1]) == (200, 429), "each costs its prompt and eight tokens"
    refused = server.ask("/v1/completions", ASKED, bearer(key))
    assert (refused.error["type"], refused.error["code"]) == ("tokens", "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) >= 1


def test_keys_are_replaced_without_a_restart_and_a_wrong_file_changes_nothing(server):
    folder = server.log_file.parent
    write_keys(folder, *KEYS, "new name=new")
    until(lambda: server.ask("/v1/models", headers=bearer("new")).status == 200, lambda: server.log)
    write_keys(folder, *KEYS)
    until(lambda: server.ask("/v1/models", headers=bearer("new")).status == 401, lambda: server.log)
    write_keys(folder, "# all gone")
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
    body = json.dumps({**ASKED, "max_tokens": 4000, "stream": True}).encode()
    with server.socket() as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: gone\r\n")
        raw.sendall(b"Authorization: Bearer open\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        came = b""
        while b"data: " not in came:
            came += (more := raw.recv(1 << 16))
            assert more, came
        raw.shutdown(socket.SHUT_RDWR)
    assert 0 < logged(server, id="gone")["output_tokens"] < 4000


def test_for_people_the_log_is_words_and_a_star_lets_all_pages_in(tmp_path):
    with serving(*TINY, "-v", "--allowed-origins", "*", folder=tmp_path) as server:
        answer = server.ask("/v1/completions", ASKED, {"Origin": "https://anybody.example"})
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "*")
        server.ask("/v1/completions", {**ASKED, "odd\ngpuinfer: forged\x1b[2J": 1})
        until(lambda: "forged" in server.log)
        assert "gpuinfer: POST /v1/completions 200 in " in server.log
        assert "+8 tokens, model tiny" in server.log
        assert "\ngpuinfer: forged" not in server.log, "a client writes no line of its own"
        assert "\x1b" not in server.log


@pytest.mark.parametrize(
    ("words", "why"),
    [
        pytest.param(("--tls-cert", "made.pem"), "--tls-cert FILE --tls-key FILE", id="no key"),
        pytest.param(("--tls-cert", "none.pem", "--tls-key", "made.key"), "cannot read", id="no file"),
        pytest.param(("--tls-cert", "made.key", "--tls-key", "made.key"), "no certificate", id="no cert"),
        pytest.param(("--tls-cert", "made.pem", "--tls-key", "open.key"), "can be read by others", id="an open key"),
        pytest.param(("--tls-cert", "fifo", "--tls-key", "made.key"), "no regular file", id="a FIFO for a cert"),
        pytest.param(("--tls-cert", "made.pem", "--tls-key", "fifo"), "no regular file", id="a FIFO for a key"),
        pytest.param(("--allowed-origins", "app.example.org"), "https://app.example.org", id="no origin"),
    ],
)
def test_files_and_origins_that_are_none_are_refused_before_anything_starts(
    gpuinfer, tmp_path, monkeypatch, words, why
):
    monkeypatch.chdir(tmp_path)
    certificate(tmp_path)
    Path("open.key").write_bytes(Path("made.key").read_bytes())
    Path("open.key").chmod(0o644)
    os.mkfifo("fifo", 0o600)
    code, _, err = gpuinfer("serve", *TINY, "--port", "0", *words)
    assert code == 2
    assert why in " ".join(err.split())

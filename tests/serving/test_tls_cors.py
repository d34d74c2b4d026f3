"""HTTPS by certificate files, and pages of other origins: one server, and a fleet."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest
from replica_servers import SECONDS, Server, serving, until

TINY = ("--model", "tiny", "-B", "slots=4", "-B", "threads=1")
KINDS = pytest.mark.parametrize("more", [(), ("--replicas", "1")], ids=["one server", "a fleet"])
APP = "https://app.example.org"


def certificate(folder: Path, name: str = "localhost") -> tuple[Path, Path]:
    """A self-made one of 127.0.0.1, which replaces that of before."""
    made, key = folder / "made.pem", folder / "made.key"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={name} -addext subjectAltName=IP:127.0.0.1"
    words = [*command.split(), "-out", folder / "next.pem", "-keyout", folder / "next.key"]
    subprocess.run(words, check=True, capture_output=True, timeout=SECONDS)
    (folder / "next.key").chmod(0o600)
    (folder / "next.key").rename(key)
    (folder / "next.pem").rename(made)
    return made, key


def asked(server: Server, made: Path, path: str) -> bytes:
    context = ssl.create_default_context(cafile=made)
    with urllib.request.urlopen(f"https://127.0.0.1:{server.port}{path}", timeout=SECONDS, context=context) as answer:
        return answer.read()


def trusted(server: Server, made: Path) -> bool:
    try:
        return bool(asked(server, made, "/v1/models"))
    except urllib.error.URLError:
        return False


@KINDS
def test_a_client_that_checks_the_certificate_is_answered_whole_and_as_a_stream(tmp_path, monkeypatch, more):
    made, key = certificate(tmp_path)
    with serving(*TINY, *more, "--tls-cert", made, "--tls-key", key, folder=tmp_path) as server:
        assert json.loads(asked(server, made, "/health"))["status"] == "ready"
        assert f"https://127.0.0.1:{server.port}" in server.log
        monkeypatch.setenv("SSL_CERT_FILE", str(made))
        client = openai.OpenAI(base_url=f"https://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
        asking = {"model": "tiny", "prompt": "Hello", "max_tokens": 16, "seed": 1}
        whole = client.completions.create(**asking).choices[0].text
        assert "".join(one.choices[0].text for one in client.completions.create(**asking, stream=True)) == whole
        with pytest.raises((ConnectionError, http.client.HTTPException)):  # there is no HTTP without TLS
            server.ask("/health")
        assert client.completions.create(**asking).choices[0].text == whole, "which harms nobody else"
        renewed, _ = certificate(tmp_path, "renewed")
        until(lambda: trusted(server, renewed), lambda: server.log)
        assert server.end() == 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        pytest.param(("--tls-cert", "made.pem"), "Give both: --tls-cert FILE --tls-key FILE", id="no key"),
        pytest.param(("--tls-cert", "none.pem", "--tls-key", "made.key"), "cannot read", id="no file"),
        pytest.param(("--tls-cert", "made.key", "--tls-key", "made.key"), "no certificate with its key", id="no cert"),
        pytest.param(("--tls-cert", "made.pem", "--tls-key", "open.key"), "can be read by others", id="an open key"),
        pytest.param(("--tls-cert", "fifo", "--tls-key", "made.key"), "it is no regular file", id="a FIFO for a cert"),
        pytest.param(("--tls-cert", "made.pem", "--tls-key", "fifo"), "it is no regular file", id="a FIFO for a key"),
    ],
)
def test_files_that_are_none_are_refused_before_anything_starts(tmp_path, words, why):
    _, key = certificate(tmp_path)
    (tmp_path / "open.key").write_bytes(key.read_bytes())
    (tmp_path / "open.key").chmod(0o644)
    os.mkfifo(tmp_path / "fifo", 0o600)
    server = Server(*TINY, *words, folder=tmp_path)
    assert server.process.wait(SECONDS) == 2
    assert why in " ".join(server.log.split())


@KINDS
def test_a_page_of_an_allowed_origin_may_ask_and_read_and_another_may_not(tmp_path, more):
    (tmp_path / "keys").touch(mode=0o600)
    (tmp_path / "keys").write_text("right name=alice requests=1 tokens=9000\n")
    words = (*TINY, *more, "--allowed-origins", APP, "--api-key-file", "keys")
    with serving(*words, folder=tmp_path) as server:
        told = {
            "Origin": APP,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
        }
        allowed = server.ask("/v1/completions", headers=told, method="OPTIONS")
        assert (allowed.status, allowed.headers["access-control-allow-origin"]) == (204, APP)
        assert allowed.headers["access-control-allow-headers"] == told["Access-Control-Request-Headers"]
        assert "POST" in allowed.headers["access-control-allow-methods"]
        body, key = {"prompt": "a", "max_tokens": 1}, {"Authorization": "Bearer right"}
        for headers, status in (({}, 401), (key, 200), (key, 429)):
            answer = server.ask("/v1/completions", body, {**headers, "Origin": APP})
            assert answer.status == status
            assert answer.headers["access-control-allow-origin"] == APP, "refusals can be read, too"
            assert answer.headers["vary"] == "Origin"
            exposed = answer.headers["access-control-expose-headers"].lower().split(", ")
            own = {name for name in answer.headers if name.startswith("x-") or name == "retry-after"}
            assert own <= set(exposed), "a page reads every header of ours"
            assert status != 200 or "x-ratelimit-reset-tokens" in own
        own = server.ask("/stats", headers={**key, "Origin": APP})
        assert (own.status, own.headers["access-control-allow-origin"]) == (200, APP)
        for method in ("GET", "OPTIONS"):
            evil = server.ask("/v1/models", headers={**key, "Origin": "https://evil.example"}, method=method)
            assert evil.status == 403
            assert "--allowed-origins" in evil.error["message"]
            assert "access-control-allow-origin" not in evil.headers
        assert "access-control-allow-origin" not in server.ask("/v1/models", headers=key).headers


def test_a_star_lets_all_pages_in_and_what_is_no_origin_is_refused(tmp_path):
    with serving(*TINY, "--allowed-origins", "*", folder=tmp_path) as server:
        answer = server.ask("/v1/models", headers={"Origin": "https://anybody.example"})
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "*")
    refused = Server(*TINY, "--allowed-origins", "app.example.org", folder=tmp_path)
    assert refused.process.wait(SECONDS) == 2
    assert "such as https://app.example.org" in " ".join(refused.log.split())

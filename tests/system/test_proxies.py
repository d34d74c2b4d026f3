"""nginx and Caddy, run with the examples of docs/proxies.md, in front of a real server."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import free_port
from serving.replica_servers import SECONDS, Server, serving, until

PAGE = Path(__file__).parents[2] / "docs" / "proxies.md"
NAME = "llm.example.org"
pytestmark = pytest.mark.system

NGINX = """
user root; daemon off; pid {folder}/pid; error_log {folder}/log; events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
    uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
    include {folder}/gpuinfer.conf;
}}
"""


def example(file: str) -> str:
    (text,) = re.findall(rf"^```\w+ {re.escape(file)}\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    return text


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("certificate")
    made, key = folder / "made.pem", folder / "made.key"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={NAME} -addext subjectAltName=DNS:{NAME}"
    subprocess.run([*command.split(), "-out", made, "-keyout", key], check=True, capture_output=True, timeout=SECONDS)
    return made, key


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    words = ("--model", "tiny", "-B", "slots=4", "-B", "threads=1", "--allowed-hosts", NAME)
    with serving(*words, folder=tmp_path_factory.mktemp("server")) as one:
        yield one


def nginx(folder: Path, port: int, server: Server, certificate: tuple[Path, Path]) -> tuple[list[str], dict[str, str]]:
    text = example("gpuinfer.conf").replace("listen 443 ssl", f"listen 127.0.0.1:{port} ssl")
    for kind, file in zip(("pem", "key"), certificate, strict=True):
        text = text.replace(f"/etc/ssl/{NAME}.{kind}", str(file))
    (folder / "gpuinfer.conf").write_text(text.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}"))
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder))
    return ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")], {}


def caddy(folder: Path, port: int, server: Server, certificate: tuple[Path, Path]) -> tuple[list[str], dict[str, str]]:
    text = example("Caddyfile").replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
    named = f"https://{NAME}:{port} {{\n    bind 127.0.0.1\n    tls {certificate[0]} {certificate[1]}\n"
    text = "{\n    admin off\n    auto_https disable_redirects\n}\n" + text.replace(f"{NAME} {{\n", named)
    (folder / "Caddyfile").write_text(text)
    home = {"XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "HOME": str(folder)}
    return ["caddy", "run", "--adapter", "caddyfile", "--config", str(folder / "Caddyfile")], home


@pytest.fixture(scope="module", params=[nginx, caddy], ids=["nginx", "caddy"])
def proxy(request, server, certificate, tmp_path_factory) -> Iterator[Proxied]:
    name = request.param.__name__
    if shutil.which(name) is None:
        pytest.skip(f"needs {name}")
    folder, port = tmp_path_factory.mktemp(name), free_port()
    command, environment = request.param(folder, port, server, certificate)
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env={**os.environ, **environment})
    try:
        one = Proxied(port, certificate[0])
        until(lambda: one.listens() or process.poll() is not None, lambda: (folder / "said").read_text())
        assert process.poll() is None, (folder / "said").read_text()
        yield one
    finally:
        process.terminate()
        try:
            process.wait(SECONDS)
        finally:
            process.kill()


class Proxied:
    """The proxy as its clients reach it: by its name, with its certificate checked."""

    def __init__(self, port: int, certificate: Path) -> None:
        self.port, self._context = port, ssl.create_default_context(cafile=certificate)

    def listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    @contextlib.contextmanager
    def asked(self, path: str, body: object = None, **headers: str) -> Iterator[http.client.HTTPResponse]:
        raw = socket.create_connection(("127.0.0.1", self.port), SECONDS)
        with contextlib.closing(http.client.HTTPSConnection(NAME, self.port)) as connection:
            connection.sock = self._context.wrap_socket(raw, server_hostname=NAME)
            data = None if body is None else json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", path, data, headers)
            with connection.getresponse() as response:
                yield response

    def ask(self, path: str, body: object = None, **headers: str) -> tuple[int, dict]:
        with self.asked(path, body, **headers) as response:
            return response.status, json.load(response)


def test_a_client_is_answered_under_the_proxys_name_and_so_is_the_page_of_the_server(proxy):
    assert proxy.ask("/health")[0] == 200
    status, answer = proxy.ask("/v1/completions", {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
    assert proxy.ask("/v1/models", Origin=f"https://{NAME}:{proxy.port}")[0] == 200
    assert proxy.ask("/v1/models", Origin="https://evil.example")[0] == 403
    status, answer = proxy.ask("/v1/completions", {"prompt": "x" * (3 << 20), "max_tokens": 1})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), "the server's word, no 413 of the proxy"


def test_a_stream_comes_while_it_is_made(proxy, server):
    asked = {"prompt": "Hello", "max_tokens": 4000, "n": 4, "ignore_eos": True, "stream": True}
    with proxy.asked("/v1/completions", asked) as answer:
        assert answer.readline().startswith(b"data: ")
        assert server.ask("/health").json["in_flight"] == 1, "the first words are here before the last are made"
    until(lambda: server.ask("/health").json["in_flight"] == 0)

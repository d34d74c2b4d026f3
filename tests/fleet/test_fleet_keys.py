"""Who may ask a fleet what, with keys of clients and of its owner; and where these keys can be read."""

from __future__ import annotations

import http.client
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from serving.replica_servers import Server

from gpuinfer.fleet.control import ControlServer
from gpuinfer.http.access import Access
from gpuinfer.serving.monitoring.live_page import FILES
from gpuinfer.serving.openai.schema import CHANGES

pytestmark = pytest.mark.thorough
KEY, ADMIN = "a-key-of-clients", "the-key-of-the-owner"
OPEN = {"/health", *FILES}
ROUTES = [(route.method, route.path, route.access) for route in ControlServer(None, Access(), "key", "").paths.routes]
REPLICAS = [("GET", "/v1/models", "api"), ("POST", "/v1/evaluate", "api"), ("POST", "/predict", "api")]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("keys")
    words: list[object] = ["--model", "blobnet-small", "-B", "threads=1", "--replicas", 1, "-vv"]
    for flag, key in (("--api-key-file", KEY), ("--admin-key-file", ADMIN)):
        file = folder / flag.strip("-")
        file.write_text(f"{key}\n")
        file.chmod(0o600)
        words += [flag, file]
    server = Server(*words, folder=folder).wait_until_ready()
    try:
        yield server
    finally:
        server.end(signal.SIGTERM)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def status(server: Server, method: str, path: str, headers: dict[str, str]) -> int:
    """Of the answer's head alone: events have no end."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    try:
        connection.request(method, path.replace("{id}", "0"), b"{}" if method == "POST" else None, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_only_health_and_the_files_of_the_page_are_open():
    assert {path for _, path, access in ROUTES if access == "open"} == OPEN
    assert {path for _, path, access in ROUTES if access == "admin"} == {"/workers", "/workers/{id}", *CHANGES}


@pytest.mark.parametrize(("method", "path", "access"), [*ROUTES, *REPLICAS])
def test_no_route_answers_without_its_key(fleet, method, path, access):
    wrong = [{}, bearer("wrong"), bearer(""), {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}]
    if access == "admin":
        wrong.append(bearer(KEY))
    for headers in wrong:
        assert status(fleet, method, path, headers) == (200 if access == "open" else 401)


@pytest.mark.parametrize("path", ["/stats", "/metrics", "/events", "/v1/models"])
def test_a_clients_key_opens_what_is_for_clients(fleet, path):
    assert status(fleet, "GET", path, bearer(KEY)) == 200
    assert status(fleet, "GET", "/workers", bearer(ADMIN)) == 200


def test_no_key_is_in_a_log_a_command_line_or_an_environment(fleet):
    status(fleet, "GET", "/v1/models", bearer(KEY))
    status(fleet, "GET", "/workers", bearer(ADMIN))
    family = [psutil.Process(fleet.process.pid), *psutil.Process(fleet.process.pid).children(recursive=True)]
    folder = folder_of(family)
    replica, changing = ((folder / name).read_text().strip() for name in ("replica.key", "admin.key"))
    told = [fleet.log, *(log.read_text() for log in folder.glob("*.log"))]
    told += [" ".join([*one.cmdline(), *one.environ().values()]) for one in family]
    assert len(family) > 2
    for key in (KEY, ADMIN, replica, changing):
        assert not [text for text in told if key in text]


def test_what_a_fleet_keeps_is_for_its_owner_alone(fleet):
    family = psutil.Process(fleet.process.pid).children(recursive=True)
    folder = folder_of(family)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    others = stat.S_IRWXG | stat.S_IRWXO
    assert [file for file in folder.iterdir() if file.suffix != ".log" and file.stat().st_mode & others] == []
    listening = [one for process in family for one in process.net_connections("inet") if one.status == "LISTEN"]
    assert {one.laddr.ip for one in listening} == {"127.0.0.1"}


def folder_of(family: list[psutil.Process]) -> Path:
    """Where the setup file lies that a replica was given."""
    words = next(one.cmdline() for one in family if "--setup-file" in one.cmdline())
    return Path(words[words.index("--setup-file") + 1]).parent

"""Who may use what: keys and their files, quotas, Host, Origin; every route is tried without its key."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from malformed_requests import get
from serving_http import said_to, serving

from gpuinfer.errors import UsageError
from gpuinfer.http.access import LOOPBACK, Access, Key, Keys, Quotas
from gpuinfer.http.http_exchange import Exchange
from gpuinfer.http.route_table import Route, RouteTable

GUARDED = Access(Keys(["api-1", "api-2"]), Keys(["admin-1"]), None)
ADMIN = [("Authorization", "Bearer admin-1")]


def key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_of_keys_is_read_and_kept_as_digests_only(tmp_path):
    keys = Keys.read(key_file(tmp_path, "# mine\n\n  one  \r\ntwo\n#three"))
    assert keys.allow("Bearer one")
    assert keys.allow("bearer  two")
    for wrong in (None, "", "one", "Basic one", "Bearer", "Bearer ", "Bearer three", "Bearer #three", "Bearer oné"):
        assert not keys.allow(wrong)
    assert "a-very-secret-key" not in repr(vars(Keys(["a-very-secret-key"])))
    named = Keys.read(key_file(tmp_path, "one name=alice requests=5\ntwo name=alice requests=5\nthree"))
    assert [named.find(f"Bearer {key}").name for key in ("one", "two", "three")] == ["alice", "alice", "line-3"]


NUMBER = "takes a whole number from 1 to"


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("", 0o600, "has no key. Write one a line: openssl rand -hex 32 > "),
        ("# one\n\n", 0o600, "has no key"),
        ("one\nzw\u00f6lf\n", 0o600, "a key has letters, digits and signs of ASCII alone"),
        ("one", 0o644, "can be read by others. Run: chmod 600 "),
        ("one", 0o640, "can be read by others. Run: chmod 600 "),
        ("a\n" * (1 << 20), 0o600, "more than 1,048,576 bytes"),
        ("#\none name=alice requests=5\ntwo name=alice", 0o600, "line 3 of the key file"),
        ("#\none name=", 0o600, "'name' takes 1 to 64 letters, digits and . _ @ -"),
        ("#\none name=a b", 0o600, "what stands behind the key is no field; there are name, requests, tokens"),
        ("#\none requests=0", 0o600, f"'requests' {NUMBER}"),
        ("#\none name=x requests=abc", 0o600, f"'requests' {NUMBER}"),
        ("#\none tokens=-1", 0o600, f"'tokens' {NUMBER}"),
        ("#\none tokens=1e9", 0o600, f"'tokens' {NUMBER}"),
        ("#\none tokens=5 tokens=6", 0o600, "'tokens' is there twice"),
        ("#\none nam=x", 0o600, "'nam' is no field of a key; there are name, requests, tokens"),
        ("#\none S3cret==", 0o600, "what stands behind the key is no field"),
    ],
)
def test_a_file_of_keys_that_is_wrong_says_where_and_how_and_shows_no_key(tmp_path, text, mode, message):
    with pytest.raises(UsageError) as refused:
        Keys.read(key_file(tmp_path, text, mode))
    said = str(refused.value)
    assert message in said
    if text.startswith("#\none ") and "two" not in text:
        assert f"line 2 of the key file {tmp_path}" in said
        assert "KEY name=alice requests=60 tokens=100000" in said
    assert "zw" not in said
    assert "S3cret" not in said


def test_a_file_that_is_missing_and_one_that_root_hands_to_a_services_group(tmp_path, monkeypatch):
    """As systemd's credentials and Kubernetes' secrets are; a file of one's own is for oneself alone."""
    for path, message in ((tmp_path / "none", "No such file"), (tmp_path, "it is no regular file")):
        with pytest.raises(UsageError, match=message):
            Keys.read(path)
    handed = key_file(tmp_path, "one", 0o440)
    if handed.stat().st_uid != 0:
        pytest.skip("only root can hand a file over")
    with pytest.raises(UsageError, match="can be read by others"):
        Keys.read(handed)
    monkeypatch.setattr("os.geteuid", lambda: 10001)
    assert Keys.read(handed).allow("Bearer one")
    handed.chmod(0o444)
    with pytest.raises(UsageError, match="can be read by others"):
        Keys.read(handed)


def test_a_file_is_read_again_when_it_changes_and_one_that_went_wrong_when_it_is_mended(tmp_path):
    path = key_file(tmp_path, "one")
    keys = Keys.read(path)
    assert keys.reload() is None
    os.utime(path, (1, 1))
    assert keys.reload() is None, "its keys are the same"
    path.write_text("one\ntwo")
    assert keys.reload() == ["one name=line-1", "two name=line-2"]
    path.chmod(0o644)
    path.write_text("three")
    with pytest.raises(UsageError, match="chmod 600"):
        keys.reload()
    assert keys.reload() is None, "it is said once"
    assert keys.allow("Bearer two")
    path.chmod(0o600)
    assert keys.reload() == ["three name=line-1"]
    assert not keys.allow("Bearer two")


@pytest.mark.parametrize("kind", ["a FIFO that nobody writes to", "a link to a device without end"])
def test_what_is_no_regular_file_blocks_nothing_and_the_next_good_file_is_taken(tmp_path, kind):
    path = key_file(tmp_path, "one\nwithdrawn")
    keys = Keys.read(path)
    path.unlink()
    if kind.startswith("a FIFO"):
        os.mkfifo(path, 0o600)
    else:
        path.symlink_to("/dev/zero")
    raised: list[Exception] = []

    def look() -> None:
        try:
            keys.reload()
        except UsageError as error:
            raised.append(error)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(60)
    assert not looking.is_alive(), "it waits for what never comes"
    (error,) = raised
    assert "it is no regular file" in str(error)
    assert keys.reload() is None, "it is said once"
    assert keys.allow("Bearer withdrawn")
    (tmp_path / "next").mkdir()
    key_file(tmp_path / "next", "one").rename(path)
    assert keys.reload() == ["one name=line-1"]
    assert not keys.allow("Bearer withdrawn")


@pytest.mark.parametrize("key", [None, "api-1", "api-2", "admin-1", "wrong"])
async def test_every_route_without_its_key_is_denied(key):
    async with serving(access=GUARDED) as served:
        served.seen.release.set()
        client = served.client(headers=[("Authorization", f"Bearer {key}")] if key else [])
        for route in served.paths.routes:
            path = route.path.replace("{id}", "3")
            if path in ("/flood", "/fail-late"):
                continue
            allowed = route.access == "open" or key == "admin-1" or (route.access == "api" and str(key)[:4] == "api-")
            answer = await client.request(route.method, path)
            assert (answer.status != 401) == allowed, (route, answer)
            if not allowed:
                assert answer.headers["www-authenticate"] == 'Bearer realm="gpuinfer"'
                error = json.loads(answer.body)["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
                assert "wrong" not in error["message"].removeprefix("a wrong key")
                head = await client.request("HEAD", path)
                assert head.status == 401


async def test_no_other_spelling_of_a_path_goes_around_the_key_and_no_body_is_waited_for_before_it():
    async with serving(access=GUARDED) as served:
        for target in (
            b"//workers", b"/workers/", b"/./workers", b"/x/../workers", b"/%77orkers", b"/workers%2f3", b"/WORKERS",
            b"/workers;a", b"/workers%00", b"/workers?", b"/health/../workers", b"/health%2f..%2fworkers",
            b"/workers%3f", b"/workers%23",
        ):  # fmt: skip
            (answer,) = await said_to(served.port, get(b"Connection: close", target=target))
            assert answer.status in (400, 401, 404)
        head = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 5000000\r\n"
        for pieces in ([head + b"Expect: 100-continue\r\n\r\n"], [head + b"\r\n", b"x" * 100_000]):
            (answer,) = await said_to(served.port, *pieces)
            assert (answer.status, answer.headers["connection"]) == (401, "close")
        assert served.server.counts["body_bytes"] == 0


async def test_admin_routes_without_an_admin_key_are_forbidden():
    async with serving(access=Access(api=Keys(["api-1"]))) as served:
        client = served.client(headers=[("Authorization", "Bearer api-1")])
        answer = await client.request("GET", "/workers")
        assert answer.status == 403
        assert b"--admin-key-file" in answer.body
        assert (await client.request("GET", "/echo")).status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([b"Host: localhost:8000"], 200),
        ([b"Host: LOCALHOST"], 200),
        ([b"Host: 127.0.0.1:1"], 200),
        ([b"Host: [::1]:8000"], 200),
        ([b"Host: evil.example"], 403),
        ([b"Host: localhost.evil.example"], 403),
        ([b"Host: 127.0.0.1.evil.example:8000"], 403),
        ([b"Host: evil.example:127.0.0.1"], 400),
        ([b"Host:"], 403),
        ([b"Host: localhost:8000", b"Origin: http://localhost:8000"], 200),
        ([b"Host: localhost:8000", b"Origin: http://localhost:3000"], 403),
        ([b"Host: localhost:8000", b"Origin: http://evil.example"], 403),
        ([b"Host: localhost:8000", b"Origin: null"], 403),
        ([b"Host: localhost:8000", b"Origin:"], 403),
        ([b"Host: localhost:8000", b"Origin: http://localhost:8000.evil.example"], 403),
    ],
)
async def test_on_loopback_browsers_cannot_be_tricked(headers, status):
    async with serving(access=Access(hosts=LOOPBACK)) as served:
        for path in (b"/echo", b"/health", b"/nowhere"):
            raw = b"GET " + path + b" HTTP/1.1\r\n" + b"\r\n".join([*headers, b"Connection: close", b"", b""])
            (answer,) = await said_to(served.port, raw)
            assert answer.status == (404 if path == b"/nowhere" and status == 200 else status)
            if status == 403:
                assert answer.error["type"] == "permission_error"
                assert "--allowed-hosts" in answer.error["message"]


async def test_behind_a_proxy_the_refusal_names_the_option_and_the_name_and_a_probe_without_host_is_answered():
    raw = b"GET /health HTTP/1.1\r\nHost: llm.example.org:443\r\nConnection: close\r\n\r\n"
    async with serving(access=Access(hosts=LOOPBACK)) as served:
        (answer,) = await said_to(served.port, raw)
        assert "--allowed-hosts llm.example.org " in answer.error["message"]
        assert (await said_to(served.port, b"GET /health HTTP/1.0\r\n\r\n"))[0].status == 200
    async with serving(access=Access(hosts=LOOPBACK | {"llm.example.org"})) as served:
        assert (await said_to(served.port, raw))[0].status == 200


async def test_what_is_not_there_is_told_what_is_and_parameters_are_taken_from_the_path():
    async with serving(access=GUARDED) as served:
        client = served.client(headers=ADMIN)
        message = json.loads((await client.request("GET", "/nowhere/" + "x" * 5000)).body)["error"]["message"]
        assert "GET /echo, POST /echo" in message
        assert len(message) < 1000
        for method, path, allowed in (
            ("DELETE", "/echo", "GET, HEAD, POST, PUT"),
            ("POST", "/workers/3", "DELETE, GET, HEAD"),
            ("OPTIONS", "/wait", "GET, HEAD, POST"),
        ):
            answer = await client.request(method, path)
            assert (answer.status, answer.headers["allow"]) == (405, allowed)
        assert json.loads((await client.request("GET", "/workers/a%20b")).body) == {"id": "a b"}
        for path in ("/workers/", "/workers/3/4"):
            assert (await client.request("GET", path)).status == 404


def test_routes_that_contradict_one_another_are_refused():
    async def nothing(exchange: Exchange) -> None: ...

    for path in ("/a", "/a/{x}"):
        route = Route("GET", path, nothing, "open", "")
        with pytest.raises(ValueError, match="two routes for GET /a"):
            RouteTable([route, route], Access())
    with pytest.raises(ValueError, match="cannot be immediate"):
        Route("POST", "/a", nothing, "open", "", immediate=lambda exchange: None)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_minutes_worth_may_be_used_at_once_and_comes_back_evenly():
    clock, key = Clock(), Key(b"", "alice", requests=6)
    quotas = Quotas(clock)
    assert [quotas.take(key) for _ in range(6)] == [None] * 6
    exceeded = quotas.take(key)
    assert (exceeded.kind, exceeded.headers) == ("requests", [("Retry-After", "10")])
    clock.now = 9.9
    assert quotas.take(key) is not None
    clock.now = 10.1
    assert quotas.take(key) is None
    clock.now = 1000
    assert [quotas.take(key) is None for _ in range(7)] == [True] * 6 + [False], "no more is saved up than a minute's"


def test_more_tokens_than_there_were_are_waited_for_and_a_refused_request_costs_nothing():
    clock = Clock()
    first, second = (Key(digest, "alice", requests=2, tokens=600) for digest in (b"1", b"2"))
    quotas = Quotas(clock)
    quotas.spend(first, 800)
    exceeded = quotas.take(second)
    assert (exceeded.kind, exceeded.headers) == ("tokens", [("Retry-After", "21")])
    assert {("x-ratelimit-remaining-tokens", "0"), ("x-ratelimit-remaining-requests", "2")} <= set(
        quotas.headers(first)
    )
    clock.now = 21
    assert quotas.take(first) is None


def test_what_is_spent_in_another_process_is_spent_here_too():
    clock, key = Clock(), Key(b"", "alice", requests=10, tokens=100)
    here, there = Quotas(clock), Quotas(clock)
    for _ in range(7):
        assert there.take(key) is None
    there.spend(key, 90)
    here.add_news(there.take_news())
    assert there.take_news() == [], "it is told once"
    assert {("x-ratelimit-remaining-requests", "3"), ("x-ratelimit-remaining-tokens", "10")} <= set(here.headers(key))
    assert [here.take(key) is None for _ in range(4)] == [True] * 3 + [False]
    assert here.take_news() == [("alice", "requests", 3)], "and not what was heard"

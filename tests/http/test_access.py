"""Who may use what: keys, Host, Origin; every route is tried without."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from malformed_requests import get
from serving_http import answers, said_to, serving

from gpuinfer.errors import UsageError
from gpuinfer.http.access import LOOPBACK, Access, Keys
from gpuinfer.http.http_exchange import Exchange
from gpuinfer.http.route_table import Route, RouteTable

GUARDED = Access(Keys(["api-1", "api-2"]), Keys(["admin-1"]), None)


def key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_of_keys_is_read(tmp_path):
    keys = Keys.read(key_file(tmp_path, "# mine\n\n  one  \r\ntwo\n#three"))
    assert keys.allow("Bearer one")
    assert keys.allow("bearer  two")
    for wrong in (None, "", "one", "Basic one", "Bearer", "Bearer ", "Bearer three", "Bearer #three", "Bearer oné"):
        assert not keys.allow(wrong)


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        pytest.param("", 0o600, "has no key. Write one a line: openssl rand -hex 32 > ", id="empty"),
        pytest.param("# one\n\n", 0o600, "has no key", id="only comments"),
        pytest.param("one two\n", 0o600, "line 1 of the key file", id="a space"),
        pytest.param("one\nzw\u00f6lf\n", 0o600, "line 2 of the key file", id="not ASCII"),
        pytest.param("one", 0o644, "can be read by others. Run: chmod 600 ", id="readable by all"),
        pytest.param("one", 0o640, "can be read by others. Run: chmod 600 ", id="readable by the group"),
        pytest.param("a\n" * (1 << 20), 0o600, "more than 1,048,576 bytes", id="far too long"),
    ],
)
def test_a_file_of_keys_that_is_wrong_says_how(tmp_path, text, mode, message):
    with pytest.raises(UsageError) as refused:
        Keys.read(key_file(tmp_path, text, mode))
    assert message in str(refused.value)
    assert "zw" not in str(refused.value), "it shows a key"


def test_a_file_of_keys_that_is_missing_says_so(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read the key file .*/none \(No such file"):
        Keys.read(tmp_path / "none")
    with pytest.raises(UsageError, match=r"it is no regular file"):
        Keys.read(tmp_path)


def test_keys_are_kept_as_digests_only():
    keys = Keys(["a-very-secret-key"])
    assert "a-very-secret-key" not in repr(vars(keys))


@pytest.mark.parametrize("key", [None, "api-1", "api-2", "admin-1", "wrong"])
async def test_every_route_without_its_key_is_denied(key):
    async with serving(access=GUARDED) as served:
        served.seen.release.set()
        client = served.client(headers=[("Authorization", f"Bearer {key}")] if key else [])
        for route in served.paths.routes:
            path = route.path.replace("{id}", "3")
            if path in ("/flood", "/fail-late"):
                continue
            allowed = (
                route.access == "open" or key == "admin-1" or (route.access == "api" and key in ("api-1", "api-2"))
            )
            answer = await client.request(route.method, path)
            assert (answer.status != 401) == allowed, (route, answer)
            if not allowed:
                assert answer.headers["www-authenticate"] == 'Bearer realm="gpuinfer"'
                error = json.loads(answer.body)["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
                assert "wrong" not in error["message"].removeprefix("a wrong key")
            head = await client.request("HEAD", path)
            assert head.status in ((401,) if route.method == "GET" and not allowed else (200, 405, 500, 401))


@pytest.mark.parametrize(
    "target",
    [
        b"//workers", b"/workers/", b"/./workers", b"/x/../workers", b"/%77orkers", b"/workers%2f3", b"/WORKERS",
        b"/workers;a", b"/workers%00", b"/workers?", b"/health/../workers", b"/health%2f..%2fworkers", b"/workers%3f",
        b"/workers%23",
    ],
)  # fmt: skip
async def test_no_other_spelling_of_a_path_goes_around_the_key(target):
    async with serving(access=GUARDED) as served:
        said = await said_to(served.port, [get(b"Connection: close", target=target)])
        assert answers(said)[0].status in (400, 401, 404)


async def test_a_body_is_not_waited_for_before_the_key_is_known():
    async with serving(access=GUARDED) as served:
        head = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 5000000\r\n"
        (answer,) = answers(await said_to(served.port, [head + b"Expect: 100-continue\r\n\r\n"]))
        assert (answer.status, answer.headers["connection"]) == (401, "close")
        (answer,) = answers(await said_to(served.port, [head + b"\r\n", b"x" * 100_000]))
        assert answer.status == 401
        assert served.server.counts["body_bytes"] == 0


async def test_admin_routes_without_an_admin_key_are_forbidden():
    async with serving(access=Access(api=Keys(["api-1"]))) as served:
        client = served.client(headers=[("Authorization", "Bearer api-1")])
        answer = await client.request("GET", "/workers")
        assert answer.status == 403
        assert "--admin-key-file" in json.loads(answer.body)["error"]["message"]
        assert (await client.request("GET", "/echo")).status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param([b"Host: localhost:8000"], 200, id="localhost"),
        pytest.param([b"Host: LOCALHOST"], 200, id="in capitals"),
        pytest.param([b"Host: 127.0.0.1:1"], 200, id="an address, through a tunnel"),
        pytest.param([b"Host: [::1]:8000"], 200, id="IPv6"),
        pytest.param([b"Host: evil.example"], 403, id="another name"),
        pytest.param([b"Host: localhost.evil.example"], 403, id="a name that begins like ours"),
        pytest.param([b"Host: 127.0.0.1.evil.example:8000"], 403, id="a name that begins like our address"),
        pytest.param([b"Host: evil.example:127.0.0.1"], 400, id="a port that is none"),
        pytest.param([b"Host:"], 403, id="no name"),
        pytest.param([b"Host: localhost:8000", b"Origin: http://localhost:8000"], 200, id="our own page"),
        pytest.param([b"Host: localhost:8000", b"Origin: http://localhost:3000"], 403, id="another local page"),
        pytest.param([b"Host: localhost:8000", b"Origin: http://evil.example"], 403, id="another page"),
        pytest.param([b"Host: localhost:8000", b"Origin: null"], 403, id="a page without origin"),
        pytest.param([b"Host: localhost:8000", b"Origin:"], 403, id="an empty origin"),
        pytest.param([b"Host: localhost:8000", b"Origin: http://localhost:8000.evil.example"], 403, id="longer"),
    ],
)
async def test_on_loopback_browsers_cannot_be_tricked(headers, status):
    async with serving(access=Access(hosts=LOOPBACK)) as served:
        for path in (b"/echo", b"/health", b"/nowhere"):
            raw = b"GET " + path + b" HTTP/1.1\r\n" + b"\r\n".join([*headers, b"Connection: close", b"", b""])
            (answer,) = answers(await said_to(served.port, [raw]))
            assert answer.status == (404 if path == b"/nowhere" and status == 200 else status)
            if status == 403:
                assert answer.error["type"] == "permission_error"
                assert "--allowed-hosts" in answer.error["message"]


async def test_behind_a_proxy_the_refusal_names_the_option_and_the_name():
    async with serving(access=Access(hosts=LOOPBACK)) as served:
        raw = b"GET /health HTTP/1.1\r\nHost: llm.example.org:443\r\nConnection: close\r\n\r\n"
        (answer,) = answers(await said_to(served.port, [raw]))
        assert "--allowed-hosts llm.example.org " in answer.error["message"]
    async with serving(access=Access(hosts=LOOPBACK | {"llm.example.org"})) as served:
        assert answers(await said_to(served.port, [raw]))[0].status == 200


async def test_what_is_not_there_is_told_what_is():
    async with serving() as served:
        client = served.client()
        message = json.loads((await client.request("GET", "/nowhere/" + "x" * 5000)).body)["error"]["message"]
        assert "GET /echo, POST /echo" in message
        assert len(message) < 1000


async def test_a_probe_without_host_is_answered():
    async with serving(access=Access(hosts=LOOPBACK)) as served:
        assert answers(await said_to(served.port, [b"GET /health HTTP/1.0\r\n\r\n"]))[0].status == 200


async def test_a_method_that_a_path_does_not_take_is_405():
    async with serving(access=GUARDED) as served:
        client = served.client(headers=[("Authorization", "Bearer admin-1")])
        for method, path, allowed in (
            ("DELETE", "/echo", "GET, HEAD, POST, PUT"),
            ("POST", "/workers/3", "DELETE, GET, HEAD"),
            ("OPTIONS", "/wait", "GET, HEAD, POST"),
        ):
            answer = await client.request(method, path)
            assert (answer.status, answer.headers["allow"]) == (405, allowed)


async def nothing(exchange: Exchange) -> None: ...


def test_routes_that_contradict_one_another_are_refused():
    route = Route("GET", "/a", nothing, "open", "")
    with pytest.raises(ValueError, match="two routes for GET /a"):
        RouteTable([route, route], Access())
    pattern = Route("GET", "/a/{x}", nothing, "open", "")
    with pytest.raises(ValueError, match="two routes"):
        RouteTable([pattern, pattern], Access())
    with pytest.raises(ValueError, match="cannot be immediate"):
        Route("POST", "/a", nothing, "open", "", immediate=lambda exchange: None)


async def test_parameters_are_taken_from_the_path():
    async with serving(access=GUARDED) as served:
        client = served.client(headers=[("Authorization", "Bearer admin-1")])
        assert json.loads((await client.request("GET", "/workers/a%20b")).body) == {"id": "a b"}
        for path in ("/workers/", "/workers/3/4"):
            assert (await client.request("GET", path)).status == 404


def test_a_file_that_root_hands_to_a_service_may_be_read_by_the_services_group(tmp_path, monkeypatch):
    """As systemd's credentials and Kubernetes' secrets are; a file of one's own is for oneself alone."""
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


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("one name=", "'name' takes 1 to 64 letters, digits and . _ @ -"),
        ("one name=a\u0020b", "what stands behind the key is no field; there are name, requests, tokens"),
        ("one requests=0", "'requests' takes a whole number from 1 to"),
        ("one name=x requests=abc", "'requests' takes a whole number from 1 to"),
        ("one tokens=-1", "'tokens' takes a whole number from 1 to"),
        ("one tokens=1e9", "'tokens' takes a whole number from 1 to"),
        ("one tokens=5 tokens=6", "'tokens' is there twice"),
        ("one nam=x", "'nam' is no field of a key; there are name, requests, tokens"),
        ("one S3cret==", "what stands behind the key is no field"),
        ("s\u00e4cret", "a key has letters, digits and signs of ASCII alone"),
    ],
)
def test_a_line_that_is_none_says_which_field_is_wrong_and_what_it_takes_and_tells_no_key(tmp_path, line, said):
    with pytest.raises(UsageError) as refused:
        Keys.read(key_file(tmp_path, f"# keys\n{line}"))
    assert f"line 2 of the key file {tmp_path}" in str(refused.value)
    assert said in str(refused.value)
    assert "KEY name=alice requests=60 tokens=100000" in str(refused.value)
    assert "one" not in str(refused.value).split(":", 1)[1].split()
    assert "cret" not in str(refused.value).replace("alice", "")


def test_a_file_is_read_again_when_it_changes_and_one_that_went_wrong_when_it_is_mended(tmp_path):
    path = key_file(tmp_path, "one")
    keys = Keys.read(path)
    assert keys.reload() is None
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


def test_two_keys_of_one_name_have_the_same_quota(tmp_path):
    keys = Keys.read(key_file(tmp_path, "one name=alice requests=5\ntwo name=alice requests=5\nthree"))
    assert [keys.find(f"Bearer {key}").name for key in ("one", "two", "three")] == ["alice", "alice", "line-3"]
    with pytest.raises(UsageError, match=r"line 2 of the key file .* gives 'alice' other limits"):
        Keys.read(key_file(tmp_path, "one name=alice requests=5\ntwo name=alice"))

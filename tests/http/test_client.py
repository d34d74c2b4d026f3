"""The client: against our server, and against one that does as it likes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import pytest
from serving_http import PATIENCE_S, serving, until

from gpuinfer.errors import UsageError
from gpuinfer.http.client import ConnectionBroken, HttpClient, RequestTimedOut, Unreachable
from gpuinfer.http.parser import HttpLimits

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class Odd:
    """A server that answers as it is told."""

    url: str = ""
    connections: int = 0
    requests: list[bytes] = field(default_factory=list)


@contextlib.asynccontextmanager
async def odd(*answers: bytes | None, close: bool = False) -> AsyncIterator[Odd]:
    """Each request gets the next answer; None: the connection is closed instead."""
    found, left = Odd(), list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            while left:
                found.requests.append(await reader.readuntil(b"\r\n\r\n"))
                if (answer := left.pop(0)) is None:
                    return
                writer.write(answer)
                await writer.drain()
                if close:
                    return
            await reader.read()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    found.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield found
    finally:
        server.close()
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def asking(url: str, **options: object) -> AsyncIterator[HttpClient]:
    client = HttpClient(url, **{"timeout_s": PATIENCE_S, **options})
    try:
        yield client
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("answer", "body", "close"),
    [
        pytest.param(OK, b"ok", False, id="a length"),
        pytest.param(CHUNKED + b"1\r\no\r\n1\r\nk\r\n0\r\n\r\n", b"ok", False, id="chunks"),
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\nok", b"ok", True, id="up to the end"),
        pytest.param(b"HTTP/1.0 200 OK\r\n\r\nok", b"ok", True, id="HTTP/1.0"),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"ok", False, id="after a 100"),
        pytest.param(b"HTTP/1.1 102 A\r\nA: b\r\n\r\nHTTP/1.1 103 B\r\n\r\n" + OK, b"ok", False, id="after two 1xx"),
        pytest.param(b"HTTP/1.1 204 No Content\r\n\r\n", b"", False, id="no body"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b"", False, id="an empty body"),
    ],
)
async def test_a_response_is_read_in_all_its_forms(answer, body, close):
    async with odd(answer, answer, close=close) as server, asking(server.url) as client:
        response = await client.request("GET", "/")
        assert (response.body, "a" in response.headers) == (body, False)
        async with client.stream("GET", "/") as streamed:
            assert await streamed.read() == body


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"hello\r\n\r\n", id="no HTTP"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok", id="two lengths"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok", id="too short"),
        pytest.param(CHUNKED + b"2\r\nok\r\n", id="no last chunk"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-", id="half a head"),
        pytest.param(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nx", id="a 101"),
        pytest.param(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 100_000, id="a head without end"),
        pytest.param(b"", id="nothing"),
    ],
)
async def test_a_response_that_is_none_is_broken_off(answer):
    for method in ("GET", "POST"):
        async with odd(answer, answer, close=True) as server, asking(server.url) as client:
            with pytest.raises(ConnectionBroken):
                await client.request(method, "/")
            with pytest.raises(ConnectionBroken):
                async with client.stream(method, "/") as streamed:
                    await streamed.read()


async def test_a_body_that_is_too_large_is_broken_off_and_a_head_request_has_none():
    async with serving() as served, asking(served.url, body_bytes=1000) as client:
        for _ in range(3):
            response = await client.request("HEAD", "/echo")
            assert (response.headers["content-length"], response.body) == ("7", b"")
            assert (await client.request("GET", "/echo")).body == b"nothing"
        assert served.server.counts["accepted"] == 1
        assert len((await client.request("POST", "/echo", b"x" * 1000)).body) == 1000
        with pytest.raises(ConnectionBroken, match="more than 1,000 bytes"):
            await client.request("POST", "/echo", b"x" * 1001)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD"])
async def test_what_may_be_repeated_is_repeated_once_on_a_kept_connection_that_was_closed(method):
    async with odd(OK, None, OK, None, None) as server, asking(server.url) as client:
        assert (await client.request("GET", "/")).status == 200
        assert (await client.request(method, "/")).status == 200
        assert (len(server.requests), server.connections) == (3, 2)
        if method != "HEAD":
            with pytest.raises(ConnectionBroken):
                await client.request(method, "/")
            assert len(server.requests) == 5


async def test_what_may_have_been_done_is_not_repeated():
    async with odd(OK, None, OK) as server, asking(server.url) as client:
        await client.request("POST", "/")
        with pytest.raises(ConnectionBroken):
            await client.request("POST", "/")
        assert len(server.requests) == 2
    async with odd(OK, b"HTTP/1.1 ", OK) as server, asking(server.url) as client:
        await client.request("GET", "/")
        with pytest.raises(RequestTimedOut):
            await client.request("GET", "/", timeout_s=0.2)
        await until(lambda: len(server.requests) >= 2)
        assert len(server.requests) == 2
    async with odd(None, OK) as server, asking(server.url) as client:
        with pytest.raises(ConnectionBroken):
            await client.request("GET", "/")  # the connection was new: it is not the wait that ended it


async def test_a_connection_that_was_closed_while_nobody_asked_is_not_used():
    """Nothing was sent, so that anything may go over another."""
    async with serving(replace(HttpLimits(), idle_s=0.2)) as served, asking(served.url) as client:
        for number in range(2):
            assert (await client.request("POST", "/echo", b"x")).body == b"x"
            await until(lambda: served.server.counts["connections"] == 0)
            assert served.server.counts["accepted"] == number + 1


async def test_who_is_not_there_is_unreachable_and_an_address_that_is_none_is_refused():
    async with serving() as served:
        url = served.url
    for at, unix, message in (
        (url, None, "cannot reach http://127"),
        ("http://localhost", "/nowhere/at/all", "cannot reach /nowhere/at/all"),
        ("http://no.such.host.invalid", None, "cannot reach"),
    ):
        async with asking(at, unix=unix) as client:
            with pytest.raises(Unreachable, match=message):
                await client.request("GET", "/")
    for wrong in ("ftp://a", "a:80", "http://", "http://a:b", "https://a", "http://a:70000"):
        with pytest.raises(UsageError, match="is no address"):
            HttpClient(wrong)


async def test_every_wait_has_an_end():
    async with serving() as served, asking(served.url, timeout_s=0.1, connections=1) as client:
        with pytest.raises(RequestTimedOut, match=r"within 0.1 s"):
            await client.request("POST", "/wait")
        await until(lambda: served.seen.cancelled == served.seen.begun)
        with pytest.raises(RequestTimedOut):
            async with client.stream("GET", "/wait"):
                pass
        async with client.stream("GET", "/events") as streamed:
            with pytest.raises(RequestTimedOut):
                await streamed.read()
        assert (await client.request("GET", "/health", timeout_s=PATIENCE_S)).status == 200
        await until(lambda: served.server.counts["connections"] == 1)
        begun = served.seen.begun
        first = asyncio.ensure_future(client.request("GET", "/wait", timeout_s=PATIENCE_S))
        await until(lambda: served.seen.begun > begun)
        with pytest.raises(RequestTimedOut):  # while another has the only connection
            await client.request("GET", "/health")
        served.seen.release.set()
        assert (await first).body == b"at last"
        assert (await client.request("GET", "/health", timeout_s=PATIENCE_S)).status == 200


async def test_requests_wait_their_turn_for_a_connection_and_give_it_back_when_they_are_cancelled():
    async with serving() as served, asking(served.url, connections=4) as client:
        bodies = [b"%d" % number for number in range(200)]
        found = await asyncio.gather(*[client.request("POST", "/echo", body) for body in bodies])
        assert [one.body for one in found] == bodies
        assert served.server.counts["accepted"] == 4
        for _ in range(5):
            some = [asyncio.ensure_future(client.request("GET", "/wait")) for _ in range(10)]
            await asyncio.sleep(0.01)
            for one in some:
                one.cancel()
            ended = await asyncio.gather(*some, return_exceptions=True)
            assert {type(one) for one in ended} == {asyncio.CancelledError}
        assert (await client.request("GET", "/health")).status == 200
        await until(lambda: served.seen.cancelled == served.seen.begun)
        await until(lambda: served.server.counts["connections"] == 1)


async def test_a_stream_is_read_as_it_comes_and_knows_when_it_came():
    async with serving() as served, asking(served.url) as client:
        before = time.perf_counter()
        async with client.stream("GET", "/events") as streamed:
            assert (streamed.status, streamed.headers["content-type"]) == (200, "text/event-stream")
            parts = streamed.timed()
            came, first = await anext(parts)
            assert first == b"data: 1\n\n"
            assert before < streamed.first_byte <= came <= time.perf_counter()
            asked = time.perf_counter()
            served.seen.release.set()
            later, second = await anext(parts)
            assert second == b"data: 2\n\n"
            assert asked < later <= streamed.last_byte
            assert [part async for part in parts] == []
        assert (await client.request("GET", "/health")).status == 200
        assert served.server.counts["accepted"] == 1


async def test_a_stream_that_is_not_read_holds_its_server_back():
    async with serving() as served, asking(served.url) as client, client.stream("GET", "/flood") as streamed:
        assert await anext(aiter(streamed))
        written = -1
        while written != served.seen.written:
            written = served.seen.written
            await asyncio.sleep(0.1)
        assert written < 64 << 20
        read = 0
        async for part in streamed:
            read += len(part)
            if read > written + (1 << 20):
                break
        assert served.seen.written > written


async def test_closing_ends_what_is_under_way():
    async with serving() as served:
        client = served.client()
        asked = asyncio.ensure_future(client.request("GET", "/wait"))
        await until(lambda: served.seen.begun)
        await client.close()
        with pytest.raises(ConnectionBroken, match="was closed"):
            await asked
        with pytest.raises(Unreachable, match="is closed"):
            await client.request("GET", "/health")
        await until(lambda: served.seen.cancelled)


async def test_headers_that_would_end_a_line_are_not_sent_and_a_base_path_stands_before_each_path():
    async with serving() as served, asking(served.url + "/workers/") as client:
        for bad in (("A", "b\r\nC: d"), ("A\n", "b"), ("A b", "c"), ("A", "b\0"), ("", "b")):
            with pytest.raises(ValueError, match="cannot be sent"):
                await client.request("GET", "/health", headers=[bad])
        for path in ("/a b", "/a\r\nB: c", "a", "/ä"):
            with pytest.raises(ValueError, match="is no target"):
                await client.request("GET", path)
        with pytest.raises(ValueError, match="is no method"):
            await client.request("GET / HTTP/1.1\r\n", "/")
        assert (await client.request("GET", "/3")).status == 403

"""Clients that are slow, large, many or gone are cut off, and the others are served."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from malformed_requests import chunked, get, post
from serving_http import PATIENCE_S, Raw, answers, said_to, serving, turns, until

from gpuinfer.http import server_connection
from gpuinfer.http.client import HttpClient
from gpuinfer.http.network import run_loop
from gpuinfer.http.parser import HttpLimits, fitting_connections

SHORT = 0.2
LIMITS = HttpLimits()
WAIT = get(target=b"/wait")
LOOPS = pytest.mark.parametrize("runner", [run_loop, asyncio.run])


@pytest.mark.parametrize(
    ("limits", "piece", "statuses"),
    [
        pytest.param(replace(LIMITS, head_s=SHORT), b"GET /ec", [408], id="a head that stops"),
        pytest.param(replace(LIMITS, body_s=SHORT), post(b"Content-Length: 9", body=b"x"), [408], id="half a body"),
        pytest.param(replace(LIMITS, body_s=SHORT), chunked(b"5\r\nhel"), [408], id="half a chunk"),
        pytest.param(replace(LIMITS, head_s=SHORT), b"", [], id="no request at all"),
        pytest.param(replace(LIMITS, idle_s=SHORT), get(), [200], id="no further request"),
    ],
)
async def test_a_client_that_waits_too_long_is_cut_off(limits, piece, statuses):
    async with serving(limits) as served:
        assert [one.status for one in await said_to(served.port, piece)] == statuses
        await until(lambda: served.server.counts["connections"] == 0)
        assert served.server.counts.get("slow", 0) == (statuses == [408])


async def test_a_byte_now_and_then_does_not_help():
    """The time is that of the whole head."""
    async with serving(replace(LIMITS, head_s=SHORT)) as served:
        raw = await Raw.connect(served.port)
        await raw.send(b"GET /echo HTTP/1.1\r\nHost: a\r\n")
        rest = asyncio.ensure_future(raw.rest())
        while not rest.done():
            await raw.send(b"A")
            await asyncio.sleep(0.01)
        assert [one.status for one in answers(await rest)] in ([408], [])


async def test_a_server_that_was_suspended_blames_nobody():
    async with serving(replace(LIMITS, head_s=SHORT, body_s=SHORT, idle_s=SHORT)) as served:
        started, idle = await Raw.connect(served.port), await Raw.connect(served.port)
        await started.send(get()[:20])
        for _ in range(3):
            started.socket.send(get()[20:])
            idle.socket.send(get())
            time.sleep(3 * SHORT)  # noqa: ASYNC251 (nothing runs meanwhile)
            await started.receive_until(b"nothing")
            await idle.receive_until(b"nothing")
            await started.send(get()[:20])
        assert served.server.counts["accepted"] == 2


async def test_a_client_that_reads_nothing_is_cut_off_and_its_requests_are_not_read_either():
    async with serving(replace(LIMITS, write_s=SHORT)) as served:
        raw = await Raw.connect(served.port, receive_buffer=4096)
        await raw.send(get(target=b"/flood"))
        await until(lambda: served.seen.cancelled)
        assert served.server.counts["unread"] == 1
        assert served.seen.written < 64 << 20
        raw, request, sent = await Raw.connect(served.port, receive_buffer=4096), get(target=b"/health"), 0
        raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        with contextlib.suppress(ConnectionError):
            while served.server.counts["unread"] < 2:
                with contextlib.suppress(BlockingIOError):
                    sent += raw.socket.send((request * 1000)[sent % len(request) :])
                await asyncio.sleep(0)
        await until(lambda: served.server.counts["unread"] == 2)
        assert sent < 64 << 20


async def test_a_long_response_to_a_slow_reader_is_not_cut_short(monkeypatch):
    """Its reader takes longer than the time to linger, and pauses shorter than the time to write."""
    monkeypatch.setattr(server_connection, "LINGER_S", 0.05)
    async with serving(replace(LIMITS, write_s=20.0, idle_s=0.1)) as served:
        raw = await Raw.connect(served.port, receive_buffer=65536)
        size = 12 << 20
        await raw.send(post(b"Connection: close", b"Content-Length: %d" % size, body=b"x" * size))
        said = b""
        for _ in range(6):
            await asyncio.sleep(0.1)
            said += await raw.receive()
        assert len(answers(said + await raw.rest())[0].body) == size


async def test_one_connection_too_many_hears_so_and_probes_come_through():
    async with serving(replace(LIMITS, connections=3)) as served:
        kept = [await Raw.connect(served.port) for _ in range(3)]
        for raw in kept:
            await raw.send(get())
            await raw.receive_until(b"nothing")
        (answer,) = await said_to(served.port, get())
        assert (answer.status, answer.headers["retry-after"], answer.headers["connection"]) == (503, "1", "close")
        assert answer.error["type"] == "overloaded_error"
        (probe,) = await said_to(served.port, get(target=b"/health"))
        assert (probe.status, probe.headers["connection"]) == (200, "close")
        await kept[0].send(get())
        await kept[0].receive_until(b"nothing")
        kept.pop().socket.close()
        await until(lambda: served.server.counts["connections"] == 2)
        assert (await said_to(served.port, get(b"Connection: close")))[0].status == 200
    async with serving(replace(LIMITS, connections=1)) as served:
        made = [await Raw.connect(served.port) for _ in range(100)]
        await until(lambda: served.server.counts["accepted"] == 100)
        assert answers(await made[-1].rest())[0].status == 503
        for raw in made:
            raw.socket.close()
        await until(lambda: served.server.counts["connections"] == 0)
        assert (await served.client().request("GET", "/echo")).status == 200


@pytest.mark.parametrize(
    ("descriptors", "each", "fitting"),
    [
        (1 << 20, 1, (8192, 1024)),
        (8192 + 1024 + 16, 1, (8192, 1024)),
        (2000, 1, (1484, 500)),
        (2000, 2, (742, 500)),
        (44, 1, (17, 11)),
        (3, 2, (1, 0)),
    ],
)
def test_no_more_connections_than_there_are_descriptors_for(descriptors, each, fitting):
    assert fitting_connections(8192, descriptors, each) == fitting


async def test_bodies_are_bounded_alone_and_so_are_their_chunks():
    async with serving(replace(LIMITS, body_bytes=1000)) as served:
        assert (await served.client().request("POST", "/echo", b"x" * 1000)).status == 200
        for raw in (
            post(b"Content-Length: 1001"),
            post(b"Content-Length: 1001", body=b"x" * 1001),
            chunked(b"3e8\r\n" + b"x" * 1000 + b"\r\n1\r\n"),
            chunked(b"3e9\r\n"),
        ):
            assert (await said_to(served.port, raw))[0].status == 413
    async with serving() as served:
        assert (await said_to(served.port, chunked(b"1\r\nx\r\n" * 70_000)))[0].status == 413


async def test_bodies_are_bounded_together():
    async with serving(replace(LIMITS, bodies_bytes=1000)) as served:
        first = await Raw.connect(served.port)
        await first.send(post(b"Content-Length: 900", body=b"x" * 600))
        (answer,) = await said_to(served.port, post(b"Content-Length: 401"))
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        third = await Raw.connect(served.port)
        await third.send(post(b"Content-Length: 390", body=b"x" * 300))
        assert served.server.counts["body_bytes"] == 900
        await third.send(b"x" * 90)
        await third.receive_until(b"x" * 390)
        await third.send(post(b"Transfer-Encoding: chunked", body=b"1f4\r\n"), b"x" * 500)
        assert answers(await third.rest())[0].status == 503  # more than is left, and only now known
        first.socket.close()
        await until(lambda: served.server.counts["body_bytes"] == 0)


FEW_DESCRIPTORS = """
import asyncio, contextlib, resource, socket, time
from gpuinfer.http.client import ClientError, HttpClient
from gpuinfer.http.network import run_loop
from gpuinfer.http.server import HttpServer

async def answer(exchange):
    exchange.respond(200, b"still here")

async def main():
    server = HttpServer(answer)
    url = f"http://127.0.0.1:{await server.listen('127.0.0.1', 0)}"
    client, other = HttpClient(url), HttpClient(url)
    assert (await client.request("GET", "/")).status == 200
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    ours = [socket.socket() for _ in range(20)]  # connected once no descriptor is left
    hogs = []
    with contextlib.suppress(OSError):
        while True:
            hogs.append(socket.socket())
    hogs.pop().close()
    for one in ours:
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            one.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    before = time.process_time()
    await asyncio.sleep(1)
    print("busy", time.process_time() - before)
    assert (await client.request("GET", "/")).body == b"still here"  # whoever is connected is served
    for one in hogs + ours:
        one.close()
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(ClientError):
                assert (await other.request("GET", "/")).body == b"still here"
                break
            await asyncio.sleep(0.1)
    await server.close()

run_loop(main())
"""


def test_a_server_without_descriptors_waits_for_some():
    done = subprocess.run(
        [sys.executable, "-c", FEW_DESCRIPTORS], capture_output=True, text=True, timeout=PATIENCE_S + 60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split("busy ")[1].split()[0]) < 0.7, "it spins"


@pytest.mark.parametrize(
    "more", [b"", WAIT, post(b"Content-Length: 9000000", body=b"x" * 150_000)], ids=["nothing", "a request", "a body"]
)
@LOOPS
def test_the_handler_is_cancelled_when_the_client_resets_whatever_it_has_sent_beside(more, runner):
    async def main() -> None:
        async with serving() as served:
            raw = await Raw.connect(served.port)
            await raw.send(WAIT)
            await until(lambda: served.seen.begun)
            with contextlib.suppress(BlockingIOError):
                raw.socket.send(more)
            await asyncio.sleep(0)
            raw.reset()
            await until(lambda: served.seen.cancelled)
            await until(lambda: served.server.counts["connections"] == 0)
            assert (served.seen.begun, served.server.counts["body_bytes"]) == (1, 0)

    runner(main())


@LOOPS
def test_a_stream_is_cancelled_when_its_client_goes(runner):
    async def main() -> None:
        async with serving() as served:
            raw = await Raw.connect(served.port)
            await raw.send(get(target=b"/events"))
            await raw.receive_until(b"data: 1")
            raw.reset()
            await until(lambda: served.seen.cancelled)
            raw = await Raw.connect(served.port)
            await raw.send(get(target=b"/flood"))
            await raw.receive_until(b"xxxx")
            raw.socket.close()  # what is written next is reset
            await until(lambda: served.seen.cancelled == 2)

    runner(main())


@pytest.mark.soak  # a minute of waiting
@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="this system keeps nothing alive as asked")
async def test_a_client_that_has_closed_before_its_answer_is_noticed_once_its_system_has_forgotten_it():
    async with serving() as served:
        raw = await Raw.connect(served.port)
        await raw.send(WAIT)
        await until(lambda: served.seen.begun)
        raw.socket.close()  # ends its side, as one that has said all does
        for _ in range(150):  # Linux keeps a closed side for 60 s
            await asyncio.sleep(1.0)
            if served.seen.cancelled:
                break
        assert served.seen.cancelled == 1
        assert served.server.counts["connections"] == 0


@pytest.mark.parametrize("path", ["/wait", "/events"])
def test_a_client_of_ours_that_gives_up_is_gone_at_once(path):
    async def read(client: HttpClient) -> None:
        async with client.stream("GET", path) as response:
            await response.read()

    async def main() -> None:
        async with serving() as served:
            reading = asyncio.create_task(read(served.client()))
            await until(lambda: served.seen.begun)
            await asyncio.sleep(0.01)
            reading.cancel()
            await until(lambda: served.seen.cancelled)

    run_loop(main())


@LOOPS
def test_a_client_that_has_sent_everything_gets_its_answers_and_nothing_else(runner):
    async def main() -> None:
        async with serving() as served:
            for path, bodies in ((b"/wait", [b"at last"]), (b"/events", [b"data: 1\n\ndata: 2\n\n"])):
                served.seen.release.clear()
                begun, raw = served.seen.begun, await Raw.connect(served.port)
                await raw.send(get(target=path) + (get() * 3 + get(target=b"/health")))
                await until(lambda begun=begun: served.seen.begun > begun)
                said = await raw.receive_until(b"data: 1") if path == b"/events" else b""
                raw.socket.shutdown(socket.SHUT_WR)
                await turns(10)
                served.seen.release.set()
                said += await raw.rest()
                assert [one.body for one in answers(said)] == [*bodies, b"nothing", b"nothing", b"nothing", b"{}"]
            assert served.seen.cancelled == 0

    runner(main())


async def test_over_a_unix_socket_too(tmp_path):
    async with serving() as served:
        await served.server.listen_unix(str(tmp_path / "s"))
        for shuts in (True, False):
            made = socket.socket(socket.AF_UNIX)
            made.connect(str(tmp_path / "s"))
            made.sendall(WAIT)
            made.setblocking(False)
            await until(lambda shuts=shuts: served.seen.begun == 2 - shuts)
            if shuts:
                made.shutdown(socket.SHUT_WR)
                await asyncio.sleep(0.01)
                served.seen.release.set()
                assert answers(await Raw(0, made).rest())[0].body == b"at last"
                served.seen.release.clear()
            else:
                made.close()
                await until(lambda: served.seen.cancelled == 1)


async def test_a_client_that_leaves_in_the_middle_of_a_request_costs_nothing():
    async with serving() as served:
        for part in (b"GET /ec", post(b"Content-Length: 500", body=b"x" * 100), b""):
            raw = await Raw.connect(served.port)
            await raw.send(part)
            raw.socket.close()
        await until(lambda: served.server.counts["accepted"] == 3 and served.server.counts["connections"] == 0)
        assert (served.server.counts["broken_off"], served.server.counts["body_bytes"]) == (2, 0)

"""Whoever is slow, large or many is cut, and the others are served."""

from __future__ import annotations

import asyncio
import resource
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from malformed_requests import chunked, get, post
from serving_http import PATIENCE_S, Raw, answers, said_to, serving, until

from gpuinfer.http import server_connection
from gpuinfer.http.parser import HttpLimits, fitting_connections

SHORT = 0.2
LIMITS = HttpLimits()


@pytest.mark.parametrize(
    ("limits", "piece", "status"),
    [
        pytest.param(replace(LIMITS, head_s=SHORT), b"GET /ec", 408, id="a head that stops"),
        pytest.param(replace(LIMITS, body_s=SHORT), post(b"Content-Length: 9", body=b"x"), 408, id="a body that stops"),
        pytest.param(replace(LIMITS, body_s=SHORT), chunked(b"5\r\nhel"), 408, id="a chunk that stops"),
        pytest.param(replace(LIMITS, head_s=SHORT), b"", None, id="no request at all"),
        pytest.param(replace(LIMITS, idle_s=SHORT), get(), 200, id="no further request"),
    ],
)
async def test_whoever_waits_too_long_is_cut(limits, piece, status):
    async with serving(limits) as served:
        raw = await Raw.connect(served.port)
        await raw.send(piece)
        found = [one.status for one in answers(await raw.rest())]
        assert found == ([] if status is None else [status])
        await until(lambda: served.server.counts["connections"] == 0)
        assert served.server.counts.get("slow", 0) == (status == 408)


@pytest.mark.parametrize("piece", [b"G", b"GET /echo HTTP/1.1\r\nHost: a\r\n"])
async def test_a_byte_now_and_then_does_not_help(piece):
    """The time is that of the whole head."""
    async with serving(replace(LIMITS, head_s=SHORT)) as served:
        raw = await Raw.connect(served.port)
        await raw.send(piece)
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


async def test_whoever_reads_nothing_is_cut():
    async with serving(replace(LIMITS, write_s=SHORT)) as served:
        raw = await Raw.connect(served.port, receive_buffer=4096)
        await raw.send(get(target=b"/flood"))
        await until(lambda: served.seen.cancelled)
        assert served.server.counts["unread"] == 1
        assert served.seen.written < 64 << 20


async def test_requests_of_whoever_reads_nothing_are_not_read_either():
    async with serving(replace(LIMITS, write_s=SHORT)) as served:
        raw = await Raw.connect(served.port, receive_buffer=4096)
        request = get(target=b"/health")
        sent = 0
        raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        while "unread" not in served.server.counts:
            try:
                sent += raw.socket.send((request * 1000)[sent % len(request) :])
            except BlockingIOError:
                pass
            except ConnectionError:
                break
            await asyncio.sleep(0)
        await until(lambda: served.server.counts.get("unread"))
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
        said += await raw.rest()
        assert len(answers(said)[0].body) == size


async def test_one_connection_too_many_hears_so_and_probes_come_through():
    async with serving(replace(LIMITS, connections=3)) as served:
        kept = [await Raw.connect(served.port) for _ in range(3)]
        for raw in kept:
            await raw.send(get())
            await raw.receive_until(b"nothing")
        (answer,) = answers(await said_to(served.port, [get()]))
        assert answer.status == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.headers["connection"] == "close"
        assert answer.error["type"] == "overloaded_error"
        (probe,) = answers(await said_to(served.port, [get(target=b"/health")]))
        assert (probe.status, probe.headers["connection"]) == (200, "close")
        await kept[0].send(get())
        await kept[0].receive_until(b"nothing")
        kept.pop().socket.close()
        await until(lambda: served.server.counts["connections"] == 2)
        assert answers(await said_to(served.port, [get(b"Connection: close")]))[0].status == 200


@pytest.mark.parametrize(
    ("descriptors", "each", "connections", "refusals"),
    [
        pytest.param(1 << 20, 1, 8192, 1024, id="many"),
        pytest.param(8192 + 1024 + 16, 1, 8192, 1024, id="just enough"),
        pytest.param(2000, 1, 1484, 500, id="fewer than asked for"),
        pytest.param(2000, 2, 742, 500, id="two for each"),
        pytest.param(44, 1, 17, 11, id="few"),
        pytest.param(3, 2, 1, 0, id="next to none"),
    ],
)
def test_no_more_connections_than_there_are_descriptors_for(descriptors, each, connections, refusals):
    assert fitting_connections(8192, descriptors, each) == (connections, refusals)


async def test_far_too_many_connections_are_closed_at_once():
    async with serving(replace(LIMITS, connections=1)) as served:
        made = [await Raw.connect(served.port) for _ in range(100)]
        await until(lambda: served.server.counts["accepted"] == 100)
        assert answers(await made[-1].rest())[0].status == 503
        for raw in made:
            raw.socket.close()
        await until(lambda: served.server.counts["connections"] == 0)
        assert (await served.client().request("GET", "/echo")).status == 200


async def test_bodies_are_bounded_alone():
    async with serving(replace(LIMITS, body_bytes=1000)) as served:
        client = served.client()
        assert (await client.request("POST", "/echo", b"x" * 1000)).status == 200
        for raw in (
            post(b"Content-Length: 1001"),
            post(b"Content-Length: 1001", body=b"x" * 1001),
            chunked(b"3e8\r\n" + b"x" * 1000 + b"\r\n1\r\n"),
            chunked(b"3e9\r\n"),
        ):
            assert answers(await said_to(served.port, [raw]))[0].status == 413


async def test_bodies_are_bounded_together():
    async with serving(replace(LIMITS, bodies_bytes=1000)) as served:
        first, second = await Raw.connect(served.port), await Raw.connect(served.port)
        await first.send(post(b"Content-Length: 900", body=b"x" * 600))
        await second.send(post(b"Content-Length: 401"))
        (answer,) = answers(await second.rest())
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


async def test_chunks_of_a_byte_have_a_bound():
    async with serving() as served:
        assert answers(await said_to(served.port, [chunked(b"1\r\nx\r\n" * 70_000)]))[0].status == 413


FEW_DESCRIPTORS = """
import asyncio, resource, socket, sys, time
from gpuinfer.http.client import HttpClient
from gpuinfer.http.network import run_loop
from gpuinfer.http.server import HttpServer

async def answer(exchange):
    exchange.respond(200, b"still here")

async def main():
    server = HttpServer(answer)
    port = await server.listen("127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{port}")
    assert (await client.request("GET", "/")).status == 200
    made = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    ours = [socket.socket() for _ in range(20)]  # connected once no descriptor is left
    hogs = []
    try:
        while True:
            hogs.append(socket.socket())
    except OSError:
        pass
    hogs.pop().close()
    for one in ours:
        one.setblocking(False)
        try:
            one.connect(("127.0.0.1", port))
        except BlockingIOError:
            pass
    before = time.process_time()
    await asyncio.sleep(1)
    print("busy", time.process_time() - before)
    assert (await client.request("GET", "/")).body == b"still here"  # whoever is connected is served
    for one in hogs + ours:
        one.close()
    other = HttpClient(f"http://127.0.0.1:{port}")
    for _ in range(600):
        try:
            assert (await other.request("GET", "/")).body == b"still here"
            break
        except Exception as error:
            print(repr(error))
            await asyncio.sleep(0.1)
    else:
        sys.exit(1)
    await server.close()

run_loop(main())
"""


def test_a_server_without_descriptors_waits_for_some():
    done = subprocess.run(
        [sys.executable, "-c", FEW_DESCRIPTORS], capture_output=True, text=True, timeout=PATIENCE_S + 60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split("busy ")[1].split()[0]) < 0.7, "it spins"
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64

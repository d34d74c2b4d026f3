"""Listening, and stopping without losing anything."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from malformed_requests import get
from serving_http import Raw, answers, serving, until

from gpuinfer.errors import UsageError
from gpuinfer.http.client import HttpClient
from gpuinfer.http.http_exchange import Exchange
from gpuinfer.http.network import run_loop
from gpuinfer.http.server import HttpServer


async def answer(exchange: Exchange) -> None:
    exchange.respond(200, exchange.peer.encode(), "text/plain")


@contextlib.asynccontextmanager
async def closing(server: HttpServer):
    try:
        yield server
    finally:
        await server.close()


async def test_a_port_in_use_names_who_holds_it_and_a_free_one():
    async with closing(HttpServer(answer)) as first, closing(HttpServer(answer)) as second:
        port = await first.listen("127.0.0.1", 0)
        with pytest.raises(UsageError) as refused:
            await second.listen("127.0.0.1", port)
        message = str(refused.value)
        assert message.startswith(f"port {port} of 127.0.0.1 is in use by ")
        assert f"(pid {os.getpid()})" in message
        free = int(message.split("--port ")[1].split(",")[0])
        assert await second.listen("127.0.0.1", free) == free


async def test_an_address_that_is_not_ours_says_so_and_one_of_two_families_is_one_port():
    async with closing(HttpServer(answer)) as server:
        for host in ("no.such.host.invalid", "192.0.2.1", "\0"):
            with pytest.raises(UsageError, match="no address"):
                await server.listen(host, 0)
        client = HttpClient(f"http://localhost:{await server.listen('localhost', 0)}")
        assert (await client.request("GET", "/")).body.rpartition(b":")[0] in (b"127.0.0.1", b"::1")
        await client.close()


async def test_several_servers_share_a_port():
    async with closing(HttpServer(answer)) as first, closing(HttpServer(answer)) as second:
        port = await first.listen("127.0.0.1", 0, reuse_port=True)
        assert await second.listen("127.0.0.1", port, reuse_port=True) == port
        for _ in range(50):
            client = HttpClient(f"http://127.0.0.1:{port}")
            assert (await client.request("GET", "/")).status == 200
            await client.close()
        assert first.counts["requests"] + second.counts["requests"] == 50


async def test_a_unix_socket_is_its_owners_and_goes_with_the_server(tmp_path: Path):
    path = tmp_path / "s"
    async with closing(HttpServer(answer)) as server:
        await server.listen_unix(str(path))
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        client = HttpClient("http://localhost", unix=str(path))
        assert (await client.request("GET", "/")).body == b"unix"
        await client.close()
        async with closing(HttpServer(answer)) as other:
            with pytest.raises(UsageError, match="in use"):
                await other.listen_unix(str(path))
    assert not os.path.exists(path)  # noqa: ASYNC240


async def test_a_unix_socket_that_a_dead_process_left_is_replaced_and_a_file_is_not(tmp_path: Path):
    path = str(tmp_path / "s")
    left = socket.socket(socket.AF_UNIX)
    left.bind(path)
    left.listen()
    left.close()
    async with closing(HttpServer(answer)) as server:
        await server.listen_unix(path)
    Path(path).write_text("a file")  # noqa: ASYNC240
    async with closing(HttpServer(answer)) as server:
        for wrong in (path, str(tmp_path / ("long" * 50))):
            with pytest.raises(UsageError, match="cannot listen at"):
                await server.listen_unix(wrong)
    assert Path(path).read_text() == "a file"  # noqa: ASYNC240


async def test_draining_answers_what_is_under_way_and_closes_the_rest():
    async with serving() as served:
        busy, idle = await Raw.connect(served.port), await Raw.connect(served.port)
        await idle.send(get())
        await idle.receive_until(b"nothing")
        await busy.send(get(target=b"/wait"))
        await until(lambda: served.seen.begun)
        drained = asyncio.ensure_future(served.server.drain(30))
        assert await idle.receive() == b""
        with pytest.raises(ConnectionRefusedError):
            await Raw.connect(served.port)
        assert not drained.done()
        served.seen.release.set()
        (last,) = answers(await busy.rest())
        assert (last.body, last.headers["connection"]) == (b"at last", "close")
        assert await drained


async def test_draining_ends_when_its_time_is_over():
    async with serving() as served:
        raw = await Raw.connect(served.port)
        await raw.send(get(target=b"/wait"))
        await until(lambda: served.seen.begun)
        assert not await served.server.drain(0.05)
        await served.server.close()
        assert served.seen.cancelled == 1
        assert answers(await raw.rest())[0].status == 503
        await until(lambda: served.server.counts["connections"] == 0)


@pytest.mark.parametrize("runner", [run_loop, asyncio.run])
def test_connections_that_wait_to_be_taken_are_served_before_the_server_stops(runner):
    async def main() -> None:
        async with serving() as served:
            made = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(20)]
            for one in made:
                one.sendall(get())
            assert served.server.counts.get("accepted", 0) == 0
            served.server.stop_accepting()
            for one in made:
                one.setblocking(False)
                assert answers(await Raw(served.port, one).rest())[0].body == b"nothing"
            assert await served.server.drain(30)

    runner(main())


def test_nothing_heavy_is_imported_with_the_package():
    code = "import sys, gpuinfer.http.server, gpuinfer.http.client; sys.exit('uvloop' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=200).returncode == 0

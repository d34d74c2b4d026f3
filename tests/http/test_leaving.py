"""Clients that go away: their handler is cancelled. Clients that have only said all: they are answered."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from pathlib import Path

import pytest
from malformed_requests import get, post
from serving_http import Raw, answers, serving, turns, until

from gpuinfer.http.client import HttpClient
from gpuinfer.http.network import run_loop

WAIT = get(target=b"/wait")
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close at once


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(b"", id="nothing more sent"),
        pytest.param(WAIT, id="another request waits"),
        pytest.param(post(b"Content-Length: 9000000", body=b"x" * 150_000), id="a large body is on its way"),
    ],
)
@pytest.mark.parametrize("runner", [run_loop, asyncio.run])
def test_the_handler_is_cancelled_when_the_client_resets(more, runner):
    async def main() -> None:
        async with serving() as served:
            raw = await Raw.connect(served.port)
            await raw.send(WAIT)
            await until(lambda: served.seen.begun)
            raw.socket.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                raw.socket.send(more)
            await asyncio.sleep(0)
            raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            raw.socket.close()
            await until(lambda: served.seen.cancelled)
            await until(lambda: served.server.counts["connections"] == 0)
            assert served.seen.begun == 1
            assert served.server.counts["body_bytes"] == 0

    runner(main())


@pytest.mark.parametrize("runner", [run_loop, asyncio.run])
def test_a_stream_is_cancelled_when_its_client_goes(runner):
    async def main() -> None:
        async with serving() as served:
            raw = await Raw.connect(served.port)
            await raw.send(get(target=b"/events"))
            await raw.receive_until(b"data: 1")
            raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            raw.socket.close()
            await until(lambda: served.seen.cancelled)
            raw = await Raw.connect(served.port)
            await raw.send(get(target=b"/flood"))
            await raw.receive_until(b"xxxx")
            raw.socket.close()  # what is written next is reset
            await until(lambda: served.seen.cancelled == 2)

    runner(main())


@pytest.mark.thorough
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


@pytest.mark.parametrize("reads", [False, True])
def test_a_client_of_ours_that_gives_up_is_gone_at_once(reads):
    async def main() -> None:
        async with serving() as served:
            client = served.client()
            asking = asyncio.create_task(client.request("GET", "/wait") if not reads else one_event(client))
            await until(lambda: served.seen.begun)
            await asyncio.sleep(0.01)
            asking.cancel()
            await until(lambda: served.seen.cancelled)

    async def one_event(client: HttpClient) -> None:
        async with client.stream("GET", "/events") as response:
            await response.read()

    run_loop(main())


@pytest.mark.parametrize("runner", [run_loop, asyncio.run])
def test_whoever_has_said_all_gets_the_answer_and_nothing_else(runner):
    async def main() -> None:
        async with serving() as served:
            for path, body in ((b"/wait", b"at last"), (b"/events", b"data: 1\n\ndata: 2\n\n")):
                served.seen.release.clear()
                begun = served.seen.begun
                raw = await Raw.connect(served.port)
                await raw.send(get(target=path))
                await until(lambda begun=begun: served.seen.begun > begun)
                said = await raw.receive_until(b"data: 1") if path == b"/events" else b""
                raw.shut()
                await turns(10)
                served.seen.release.set()
                said += await raw.rest()
                assert said.startswith(b"HTTP/1.1 200 OK\r\n")
                (answer,) = answers(said)
                assert (answer.status, answer.body) == (200, body)
            assert served.seen.cancelled == 0

    runner(main())


async def test_requests_sent_before_the_end_are_all_answered():
    async with serving() as served:
        raw = await Raw.connect(served.port)
        await raw.send(WAIT + get() * 3 + get(target=b"/health"))
        raw.shut()
        await until(lambda: served.seen.begun)
        served.seen.release.set()
        said = await raw.rest()
        assert [one.body for one in answers(said)] == [b"at last"] + [b"nothing"] * 3 + [b"{}"]


async def test_over_a_unix_socket_too(tmp_path: Path):
    async with serving() as served:
        path = str(tmp_path / "s")
        await served.server.listen_unix(path)
        for shuts in (True, False):
            made = socket.socket(socket.AF_UNIX)
            made.connect(path)
            made.sendall(WAIT)
            made.setblocking(False)
            await until(lambda shuts=shuts: served.seen.begun == 2 - shuts)
            if shuts:
                made.shutdown(socket.SHUT_WR)
                await asyncio.sleep(0.01)
                served.seen.release.set()
                raw = Raw(0, made)
                assert answers(await raw.rest())[0].body == b"at last"
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
        assert served.server.counts["broken_off"] == 2
        assert served.server.counts["body_bytes"] == 0

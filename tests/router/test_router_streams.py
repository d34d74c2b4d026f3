"""Streams: passed on as they come, held back with their client, taken up elsewhere when their replica is lost."""

from __future__ import annotations

import asyncio
import re

import pytest
from resumable import Resumable
from run_router import EVENTS, Upstream, chunk, post, routing, saying, until, well

from gpuinfer.fleet.router.shared_counters import MemberCell, ProcessCell


def tokens(body: bytes, sample: int = 0) -> list[int]:
    return [int(number) for number in re.findall(rb"data: {%d: (\d+)}\n\n" % sample, body)]


async def test_each_event_goes_on_as_it_comes():
    gate = asyncio.Event()

    async def slowly(request, writer):
        writer.write(EVENTS + chunk(b"data: 1\n\n"))
        await gate.wait()
        writer.write(chunk(b"data: 2\n\n") + b"0\r\n\r\n")

    async with routing(Upstream(slowly)) as router:
        connection = await router.connect()
        await connection.send(post())
        await connection.head()
        assert await connection.chunk() == b"data: 1\n\n"
        gate.set()
        assert await connection.chunk() == b"data: 2\n\n"
        assert await connection.chunk() == b""


@pytest.mark.parametrize(
    ("samples", "breaks"),
    [
        pytest.param(1, [0], id="before its first event"),
        pytest.param(1, [1], id="after one event"),
        pytest.param(1, [7], id="in its middle"),
        pytest.param(1, [20], id="before its last event"),
        pytest.param(1, [21], id="before the word that it is done"),
        pytest.param(1, [5, 5, 5], id="again and again"),
        pytest.param(3, [8], id="with several samples"),
        pytest.param(3, [61], id="with several samples of which some have ended"),
    ],
)
@pytest.mark.parametrize("partial", [False, True])
async def test_a_stream_of_ours_goes_on_elsewhere_from_where_it_broke_off(samples, breaks, partial):
    answering = Resumable(20, samples, breaks, partial)
    async with routing(Upstream(answering), Upstream(answering), breaker_failures=100) as router:
        answer = await router.post(b'{"prompt": "hello"}')
        assert answer.whole
        for sample in range(samples):
            assert tokens(answer.body, sample) == list(range(20))
            assert answer.body.count(b"{%d: end}" % sample) == 1
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert answer.body.count(b"[DONE]") == 1
        assert set(answering.bodies) == {b'{"prompt": "hello"}'}
        assert len(set(answering.created)) == len(set(answering.ids)) == 1
        assert len(answering.begun) == len(breaks) + 1
        assert sum(router.cell(slot, MemberCell.RESUMED) for slot in (0, 1)) == len(breaks)
        assert router.relay.budget.left == router.relay.config.bodies_bytes


async def test_what_was_sent_is_told_sample_by_sample():
    answering = Resumable(3, 2, [5])
    async with routing(Upstream(answering), Upstream(answering)) as router:
        await router.post()
    assert answering.begun[1] == {
        "0": {"tokens": [0, 1, 2], "ended": False},
        "1": {"tokens": [0, 1], "ended": False},
    }


async def test_a_stream_that_was_done_but_for_its_end_is_done():
    async with routing(Upstream(saying(EVENTS + chunk(b"data: [DONE]\n\n"), "close"))) as router:
        answer = await router.post()
        assert (answer.whole, answer.body) == (True, b"data: [DONE]\n\n")
        assert router.total(ProcessCell.BROKEN_OFF) == 0


async def test_a_stream_that_is_longer_than_what_is_kept_ends_with_an_error_event():
    async with routing(Upstream(Resumable(100, 1, [90])), kept_bytes=1000) as router:
        answer = await router.post()
        assert answer.whole
        assert b'data: {"error"' in answer.body
        assert router.relay.budget.left == router.relay.config.bodies_bytes


async def test_a_stream_that_nobody_can_go_on_with_ends_with_an_error_event():
    refusing = saying(b"HTTP/1.1 400 No\r\nContent-Length: 2\r\n\r\nno")
    breaking = Upstream(Resumable(9, 1, [3]))
    async with routing(breaking, Upstream(refusing), policy="round-robin", wait_s=0.3) as router:
        breaking.always.breaks = [3, 0, 0, 0, 0, 0]
        answer = await router.post()
        assert answer.whole
        assert tokens(answer.body) == [0, 1, 2]
        assert b'data: {"error"' in answer.body


async def test_a_stream_that_falls_silent_goes_on_elsewhere():
    async def silent(request, writer):
        writer.write(EVENTS + chunk(b"id: 0.0\ndata: {0: 0}\n\n"))
        await asyncio.Event().wait()

    async with routing(Upstream(silent), Upstream(Resumable(4)), policy="round-robin", timeout_s=0.3) as router:
        assert tokens((await router.post()).body) == [0, 1, 2, 3]


async def test_events_in_pieces_and_with_crlf_go_on_whole():
    said = b"data: 1\r\n\r\ndata: 2\r\n\r\ndata: 3\n\n"
    pieces = b"".join(chunk(said[at : at + 3]) for at in range(0, len(said), 3))
    async with routing(Upstream(saying(EVENTS + pieces + b"0\r\n\r\n"))) as router:
        answer = await router.post()
        assert answer.body == said


async def test_a_client_that_reads_slowly_holds_its_replica_back():
    sent = 0

    async def flood(request, writer):
        nonlocal sent
        writer.write(EVENTS)
        event = chunk(b"data: " + b"x" * 65_000 + b"\n\n")
        while True:
            writer.write(event)
            await writer.drain()
            sent += len(event)
            await asyncio.sleep(0)

    async with routing(Upstream(flood), kept_bytes=1 << 20) as router:
        connection = await router.connect()
        await connection.send(post())
        await until(lambda: router.relay.active)
        client = next(one for slot in router.relay.timer._slots for one in slot if one._request is not None)
        await until(lambda: client._request.paused, "holding back")
        seen = -1
        while sent > seen:  # until what the system's own buffers take has been sent
            seen = sent
            await asyncio.sleep(0.1)
        assert client._transport.get_write_buffer_size() < 1 << 20
        while sent < seen + (8 << 20):
            await connection.reader.read(1 << 20)
        connection.close()
        await until(lambda: router.relay.active == 0)


async def test_a_client_that_reads_nothing_is_cut_off():
    async def flood(request, writer):
        writer.write(EVENTS)
        while True:
            writer.write(chunk(b"data: " + b"x" * 65_000 + b"\n\n"))
            await writer.drain()

    async with routing(Upstream(flood), write_s=0.2) as router:
        connection = await router.connect()
        await connection.send(post())
        await until(lambda: router.total(ProcessCell.CLIENT_GONE) == 1)
        assert router.cell(0, MemberCell.ERRORS) == 0


async def test_an_answer_without_a_length_that_is_no_stream_goes_on_as_it_comes():
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with routing(Upstream(saying(head + chunk(b"\0\n\n\1" * 1000) + b"0\r\n\r\n")), Upstream(well)) as router:
        for _ in range(3):
            answer = await router.post()
            assert answer.body in (b"\0\n\n\1" * 1000, b'{"answer": "ok"')

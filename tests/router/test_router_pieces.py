"""Whatever pieces the bytes come in, and however many hops read them: the same meaning."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_router import ANSWER, EVENTS, Router, Upstream, chunk, post, routing

from gpuinfer.fleet.router.client_connection import Listener
from gpuinfer.fleet.router.connection_pool import ReplicaConnection
from gpuinfer.fleet.router.event_stream import ByteBudget, RelayedEvents
from gpuinfer.fleet.router.http_message import BrokenResponse, ResponseHead
from gpuinfer.http.parser import ChunkDecoder, Malformed

ANSWERS = {
    "a length": (ANSWER, b'{"answer": "ok"'),
    "no body": (b"HTTP/1.1 204 No\r\n\r\n", b""),
    "chunks": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + chunk(b"a" * 20)
        + chunk(b"\r\n\r\n")
        + b"0\r\nA: b\r\n\r\n",
        b"a" * 20 + b"\r\n\r\n",
    ),
    "events": (
        EVENTS + chunk(b"data: 1\n\n") + chunk(b"data: 2\n") + chunk(b"\ndata: 3\n\n") + b"0\r\n\r\n",
        b"data: 1\n\ndata: 2\n\ndata: 3\n\n",
    ),
    "interim": (b"HTTP/1.1 103 Early\r\nLink: <x>\r\n\r\n" + ANSWER, b'{"answer": "ok"'),
}


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({place % len(data) for place in places} | {0, len(data)})
    return [data[one:other] for one, other in itertools.pairwise(edges)]


class Fed:
    """Stands where a socket would: what it is told to send is fed piece by piece, without a network between."""

    def __init__(self) -> None:
        self.sent = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        self.closed = True

    def get_extra_info(self, name: str) -> None: ...
    def set_write_buffer_limits(self, high: int) -> None: ...
    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    abort = close
    pause_reading = resume_reading = lambda self: None


async def through(router: Router, request: list[bytes], answer: list[bytes]) -> tuple[bytes, bytes]:
    """What the replica and the client receive."""
    pool, upstream, client = router.relay.members.usable[0].pool, Fed(), Fed()
    link = ReplicaConnection(pool)
    link.connection_made(upstream)
    pool.take_back(link)
    side = Listener(router.relay).protocol()
    side.connection_made(client)
    for piece in request:
        side.data_received(piece)
    assert side._request is not None
    for piece in answer:
        link.data_received(piece)
    assert side._request is None
    side.connection_lost(None)
    link.drop()
    return upstream.sent, client.sent


def content(data: bytes) -> bytes:
    head, _, body = data.partition(b"\r\n\r\n")
    if b"chunked" not in head:
        return body
    reader = ChunkDecoder()
    found = reader.feed(body)
    assert (reader.complete, reader.rest) == (True, b"")
    return found


@pytest.mark.parametrize("kind", ANSWERS)
@given(st.lists(st.integers(0, 10_000), max_size=12), st.lists(st.integers(0, 10_000), max_size=12), st.booleans())
def test_any_pieces_are_read_as_the_whole(kind, cuts, other_cuts, chunked):
    body = b'{"prompt": "\xff\r\n\r\n"}'
    request = post(body)
    if chunked:
        request = request.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
        request = request[: -len(body)] + chunk(body[:5]) + chunk(body[5:]) + b"0\r\n\r\n"
    answer, expected = ANSWERS[kind]

    async def go() -> tuple[bytes, bytes]:
        async with routing(Upstream()) as router:
            return await through(router, cut(request, cuts), cut(answer, other_cuts))

    asked, answered = asyncio.run(go())
    assert asked.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert asked.endswith(b"\r\n\r\n" + body)
    assert content(answered) == expected


@given(st.binary(max_size=200))
def test_no_bytes_of_a_replica_do_more_than_break_its_connection(data):
    for read in (
        lambda: ResponseHead(b"HTTP/1.1 200 OK\r\n" + data + b"\r\n\r\n", b"GET"),
        lambda: ChunkDecoder().feed(data),
    ):
        with contextlib.suppress(BrokenResponse, Malformed):
            read()


@given(
    st.lists(st.sampled_from([b"data: x\n\n", b"id: 0.7\ndata: y\n\n", b": ping\n\n", b"data: z\r\n\r\n"])),
    st.lists(st.integers(0, 999)),
)
def test_only_whole_events_go_out_and_all_of_them(parts, places):
    whole = b"".join(parts)
    events, found = RelayedEvents(1 << 20, ByteBudget(1 << 20)), b""
    for piece in cut(whole, places) if whole else []:
        out = events.take(piece)
        assert out == b"" or out.endswith((b"\n\n", b"\n\r\n"))
        found += out
    assert found == whole


def test_events_that_belong_together_go_out_together():
    first, more, last = b"id: 0.7\ndata: a\n\n", b": more\ndata: b\n\n", b"id: 0.8,9\nid: 999999999.3\ndata: c\n\n"
    whole = first + more + more + last
    for place in range(1, len(whole)):
        events = RelayedEvents(1 << 20, ByteBudget(1 << 20))
        out = events.take(whole[:place])
        assert out in (b"", first, whole)
        begun = json.loads(events.begun() or b"{}")
        assert begun.get("0", {"tokens": []})["tokens"] == ([7] if out == first else [])
        assert out + events.take(whole[place:]) == whole
    assert events.tokens() == 3
    begun = json.loads(events.begun())
    assert begun == {"0": {"tokens": [7, 8, 9], "ended": False}, "999999999": {"tokens": [3], "ended": False}}

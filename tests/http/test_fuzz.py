"""Streams of requests, whole and damaged at random: the same is seen however they are cut, and none does harm."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
from collections import Counter

import psutil
import pytest
from counts import counts
from hypothesis import given
from hypothesis import strategies as st
from malformed_requests import damaged
from serving_http import Served, serving, until

from gpuinfer.http import parser
from gpuinfer.http.parser import HttpLimits, Malformed, RequestParser

LIMITS = HttpLimits(head_bytes=2000, line_bytes=500, headers=8, body_bytes=5000)
TOKEN = st.text("abcXYZ019-_!~", min_size=1, max_size=12).map(lambda text: "x" + text)
VALUE = st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=30).map(lambda text: text.strip())
PLACES = st.lists(st.integers(0, 10_000), max_size=20)
BATCH = 500
AT_ONCE = 25
STATUS = re.compile(rb"HTTP/1\.1 ([0-9]{3}) ")
FINE = {100, 200, 400, 401, 403, 404, 405, 408, 413, 414, 417, 431, 501, 505}  # 501 and 505 name the request's fault


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, tuple[object, ...]]:
    """The bytes of a request, and what is to be seen of it."""
    method = draw(st.sampled_from(sorted(parser.METHODS)))
    path = "/" + draw(st.text("abc.-~123", max_size=10)).strip(".")
    headers = {"host": "a:1", **draw(st.dictionaries(TOKEN.map(str.lower), VALUE, max_size=4))}
    body = sent = draw(st.binary(max_size=300))
    if draw(st.booleans()):
        headers["transfer-encoding"] = "chunked"
        sent, left = b"", body
        while left:
            size = draw(st.integers(1, len(left)))
            sent += b"%x\r\n%b\r\n" % (size, left[:size])
            left = left[size:]
        sent += b"0\r\n\r\n"
    else:
        headers["content-length"] = str(len(body))
    spaces = st.sampled_from(["", " ", "\t "])
    lines = "".join([f"{name}:{draw(spaces)}{value}\r\n" for name, value in headers.items()])
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + sent, (method, path, headers, body)


def seen(pieces: list[bytes]) -> tuple[list[tuple[object, ...]], int]:
    """The requests in the pieces, and the status of the fault at their end; 0: none."""
    incoming, found, head = RequestParser(LIMITS), [], None
    try:
        for piece in pieces:
            incoming.add(piece)
            while incoming.buffer:
                if head is None:
                    head = incoming.head()
                    if head is None:
                        break
                    incoming.expect(head)
                    if (head.length or 0) > LIMITS.body_bytes:
                        raise Malformed(413, "")
                body = incoming.body()
                if body is None:
                    break
                found.append((head.method, parser.check_target(head.target), dict(head.headers), body))
                head = None
    except Malformed as fault:
        return found, fault.status
    return found, 0


def seen_alike(raw: bytes, places: list[int] = ()) -> tuple[list[tuple[object, ...]], int]:
    """What is seen of it, the same whole, cut at these places and byte by byte."""
    whole = seen([raw])
    ends = [*sorted({place % (len(raw) + 1) for place in places}), len(raw)]
    assert seen([raw[start:end] for start, end in zip([0, *ends], ends, strict=False)]) == whole
    assert seen([raw[at : at + 1] for at in range(len(raw))]) == whole
    return whole


@given(st.lists(requests(), min_size=1, max_size=4), PLACES)
def test_the_same_requests_are_seen(sent, places):
    assert seen_alike(b"".join(raw for raw, _ in sent), places) == ([wanted for _, wanted in sent], 0)


@given(st.integers(0, 1 << 32), PLACES)
def test_the_same_fault_is_found(seed, places):
    seen_alike(damaged(random.Random(seed)), places)


def test_the_same_fault_is_found_at_the_limits_of_a_line_and_of_a_head():
    for size in (499, 500, 501):
        for end in (b"", b" HTTP/1.1\r\nHost: a\r\n\r\n", b"\0"):
            seen_alike(b"GET /" + b"a" * (size - 5 - len(end.partition(b"\r")[0])) + end)
    for size in range(1990, 2010):
        raw = b"GET / HTTP/1.1\r\nHost: a\r\n" + b"".join(b"A%d: %b\r\n" % (n, b"b" * 400) for n in range(4))
        raw += b"B: " + b"b" * (size - len(raw) - 7) + b"\r\n\r\n"
        assert seen_alike(raw)[1] == (431 if size > 2000 else 0)


async def said_to(port: int, raw: bytes, at: int) -> bytes:
    """All that is said to these bytes, cut at a place, and to their end."""
    loop, said = asyncio.get_running_loop(), b""
    with socket.socket() as made:
        made.setblocking(False)
        await loop.sock_connect(made, ("127.0.0.1", port))
        with contextlib.suppress(ConnectionError):
            if at:
                await loop.sock_sendall(made, raw[:at])
                await asyncio.sleep(0)
            await loop.sock_sendall(made, raw[at:])
            made.shutdown(socket.SHUT_WR)
            while part := await loop.sock_recv(made, 65536):
                said += part
    return said


async def batch(served: Served, dice: random.Random, statuses: Counter[int]) -> None:
    requests = [damaged(dice) for _ in range(BATCH)]
    cuts = [dice.randrange(len(raw) + 1) if dice.random() < 0.3 else 0 for raw in requests]

    async def some(start: int) -> None:
        for raw, at in zip(requests[start::AT_ONCE], cuts[start::AT_ONCE], strict=True):
            said = await said_to(served.port, raw, at)
            found = [int(status) for status in STATUS.findall(said)]
            assert FINE.issuperset(found), (raw, said)
            assert not said or said.startswith(b"HTTP/1.1 "), (raw, said)
            statuses.update(found)

    async with asyncio.timeout(240), asyncio.TaskGroup() as group:
        for start in range(AT_ONCE):
            group.create_task(some(start))


@pytest.mark.parametrize("number", counts(1_500, 100_000))
async def test_damaged_requests_harm_nobody(number):
    dice, statuses = random.Random(number), Counter()
    async with serving(HttpLimits(body_bytes=1 << 20, bodies_bytes=8 << 20)) as served:
        served.seen.release.set()
        client = served.client()
        assert (await client.request("GET", "/echo")).status == 200
        before = psutil.Process().num_fds()
        for _ in range(number // BATCH):
            await batch(served, dice, statuses)
            assert (await client.request("POST", "/echo", b"good")).body == b"good"
            await until(lambda: served.server.counts["connections"] == 1)
            assert served.server.counts["body_bytes"] == 0
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert psutil.Process().num_fds() <= before
            served.seen.requests.clear()
        assert {200, 400, 404, 501} <= set(statuses)
        assert statuses[200] > number // 50, "what is damaged must not be all refused at the first byte"
        assert served.server.disconnects.watched == 0

"""Requests that were damaged at random: none is answered with a 5xx, none leaves anything behind, the good go on."""

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
from damage import damaged
from serving_http import Served, serving, until

from gpuinfer.http.parser import HttpLimits

BATCH = 500
AT_ONCE = 25
STATUS = re.compile(rb"HTTP/1\.1 ([0-9]{3}) ")
FINE = {100, 200, 400, 401, 403, 404, 405, 408, 413, 414, 417, 431, 501, 505}  # 501 and 505 name the request's fault


async def said_to(port: int, raw: bytes, at: int) -> bytes:
    """All that is said to these bytes, cut at a place, and to their end."""
    loop = asyncio.get_running_loop()
    said = b""
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
    dice = random.Random(number)
    async with serving(HttpLimits(body_bytes=1 << 20, bodies_bytes=8 << 20)) as served:
        served.seen.release.set()
        statuses: Counter[int] = Counter()
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

"""Router processes: started, told, killed, replaced, drained."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator

import pytest
from run_router import (
    Answer,
    Connection,
    Slow,
    Upstream,
    config,
    free_port,
    hang,
    member,
    post,
    response,
    saying,
    until,
)

from gpuinfer.errors import UsageError
from gpuinfer.fleet.router.processes import Routers
from gpuinfer.fleet.router.protocol import FleetMember, Roster


@contextlib.asynccontextmanager
async def processes(*upstreams: Upstream, **changes) -> AsyncIterator[tuple[Routers, int]]:
    async with contextlib.AsyncExitStack() as stack:
        for upstream in upstreams:
            await stack.enter_async_context(upstream.running())
        routers = Routers(config(**changes), told.append)
        stack.push_async_callback(routers.close)
        port = await routers.start()
        routers.update(Roster(1, tuple(member(upstream, number) for number, upstream in enumerate(upstreams))))
        yield routers, port


told: list = []


async def ask(port: int, headers: str = "") -> Answer:
    connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
    try:
        await connection.send(post(headers=headers))
        return await connection.answer()
    finally:
        connection.close()


async def test_two_processes_share_a_port_their_counters_and_what_is_in_flight():
    slow = Slow()
    upstreams = [Upstream(slow) for _ in range(4)]
    async with processes(*upstreams, processes=2) as (routers, port):
        assert len(set(routers.pids())) == 2
        asking = []
        for number in range(24):  # one after the other, so that each choice knows of the ones before
            asking.append(asyncio.create_task(ask(port)))
            await until(lambda number=number: sum(len(one.asked) for one in upstreams) > number)
        assert [len(one.asked) for one in upstreams] == [6, 6, 6, 6]
        counted = routers.counters()
        assert [counted[number].in_flight for number in range(4)] == [6, 6, 6, 6]
        assert routers.totals().connections == 24
        slow.release.set()
        assert {(await one).status for one in asking} == {200}
        await until(lambda: sum(one.in_flight for one in routers.counters().values()) == 0)
        assert sum(one.requests for one in routers.counters().values()) == 24
        assert routers.totals().requests == 24
        with pytest.raises(UsageError, match="in use"):
            await Routers(config(port=port, processes=2), told.append).start()
        assert await routers.drain(30)


async def test_a_killed_process_is_replaced_knows_the_fleet_and_nobody_is_refused_meanwhile():
    async with processes(Upstream()) as (routers, port):
        assert (await ask(port)).status == 200
        (first,) = routers.pids()
        os.kill(first, signal.SIGKILL)
        answers = await asyncio.gather(*(ask(port) for _ in range(10)), return_exceptions=True)
        lost = [one for one in answers if isinstance(one, Exception)]
        assert all(isinstance(one, (ConnectionResetError, asyncio.IncompleteReadError)) for one in lost)
        await until(lambda: routers.pids() not in ([], [first]))
        assert (await ask(port)).status == 200
        assert routers.totals().restarts == 1
        await until(lambda: routers.counters()[0].requests >= 2)
        await until(lambda: routers.counters()[0].in_flight == 0)


async def test_draining_answers_all_that_is_under_way_and_takes_in_who_is_at_the_door():
    slow = Slow()
    upstream = Upstream(slow)
    async with processes(upstream) as (routers, port):
        asking = [asyncio.create_task(ask(port)) for _ in range(8)]
        await until(lambda: len(upstream.asked) == 8)
        draining = asyncio.create_task(routers.drain(30))
        await asyncio.sleep(0)
        slow.release.set()
        answers = await asyncio.gather(*asking)
        assert {answer.status for answer in answers} == {200}
        assert await draining
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


async def test_an_error_message_of_half_characters_ends_no_hand_over_of_the_log():
    """Another server's JSON may have them, and UTF-8 does not."""
    error = json.dumps({"error": {"message": "no \ud800 here"}}).encode()
    records: list = []
    async with processes(Upstream(answers=[saying(response(400, error))]), hands_over_log=True) as (routers, port):
        routers.on_telemetry = lambda spans, found: records.extend(found)
        assert [(await ask(port)).status for _ in range(2)] == [400, 200]
        await until(lambda: len(records) == 2, "the records of both")
        assert records[0].attributes["error.message"] == "no ? here"


async def test_draining_has_an_end():
    upstream = Upstream(hang)
    async with processes(upstream) as (routers, port):
        asking = asyncio.create_task(ask(port))
        await until(lambda: upstream.asked)
        assert not await routers.drain(0.2)
        await routers.close()
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await asking


async def test_each_process_knows_what_a_key_has_spent_at_the_others():
    answer = b"HTTP/1.1 200 OK\r\nX-Gpuinfer-Used: 5 1200\r\nContent-Length: 2\r\n\r\n{}"
    keys = ("first name=alice tokens=600",)
    async with processes(Upstream(saying(answer)), processes=2, api_keys=keys) as (_, port):
        bearer = "Authorization: Bearer first\r\n"
        assert (await ask(port, bearer)).status == 200

        async def refused_everywhere() -> bool:
            """Sixteen connections are with both processes, but for one case in 32,768."""
            return {one.status for one in await asyncio.gather(*(ask(port, bearer) for _ in range(16)))} == {429}

        for _ in range(20):
            if await refused_everywhere():
                break
        else:
            pytest.fail("a process does not know what was spent at the other one")


async def test_a_port_in_use_is_named_an_older_roster_changes_nothing_and_failures_are_told_to_the_owner():
    async with Upstream().running() as upstream:
        with pytest.raises(UsageError, match=f"port {upstream.port} .* is in use"):
            await Routers(config(port=upstream.port), told.append).start()
    async with processes(Upstream()) as (routers, port):
        routers.update(Roster(0, ()))
        assert (await ask(port)).status == 200
        told.clear()
        routers.update(Roster(2, (FleetMember(7, "127.0.0.1", free_port(), "up"),)))
        asking = asyncio.create_task(ask(port))
        await until(lambda: told)
        assert told[0] == {"event": "failed", "member": 7, "kind": "refused"}
        await until(lambda: routers.counters()[7].breaker == "open")
        asking.cancel()
        await asyncio.wait((asking,))

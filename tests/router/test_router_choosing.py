"""Which replica is chosen, and what a request's affinity is."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from run_router import EVENTS, Upstream, chunk, member, post, routing, until

from gpuinfer.fleet.router.http_message import RequestHead, affinity_of
from gpuinfer.fleet.router.shared_counters import MemberCell

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"


def of(body: object, headers: bytes = b"") -> bytes | None:
    return affinity_of(RequestHead(HEAD + headers + b"\r\n"), json.dumps(body).encode())


def test_a_session_goes_before_a_user_and_a_user_before_the_prompt():
    body = {"messages": [{"role": "user", "content": "hello"}], "user": "ann"}
    assert of(body, b"X-Gpuinfer-Session: s1\r\n") == b"s1"
    assert of(body) == b"ann"
    del body["user"]
    assert of(body) not in (None, b"ann")


def test_prompts_that_begin_alike_belong_together():
    begins = "You are a helpful assistant. " * 50
    assert of({"prompt": begins + "one"}) == of({"prompt": begins + "two", "n": 1})
    assert of({"prompt": "one" + begins}) != of({"prompt": "two" + begins})
    assert of({"rows": [1, 2]}) is None


def test_a_users_name_within_a_prompt_is_no_user():
    assert of({"prompt": 'say "user": "eve"'}) == of({"prompt": 'say "user": "eve"'})
    assert of({"prompt": 'say "user": "eve"'}) != b"eve"


def test_a_user_behind_a_long_prompt_is_found():
    assert of({"prompt": "x" * 100_000, "user": "ann"}) == b"ann"


async def test_sticky_sends_a_session_to_one_replica():
    async with routing(*(Upstream() for _ in range(4)), policy="sticky") as router:
        for session in range(8):
            headers = f"X-Gpuinfer-Session: {session}\r\n"
            assert len({(await router.post(headers=headers)).route["replica"] for _ in range(4)}) == 1


async def test_load_counts_from_the_moment_of_choice():
    async def hang(request, writer):
        await asyncio.Event().wait()

    upstreams = [Upstream(hang) for _ in range(4)]
    async with routing(*upstreams) as router:
        tasks = [asyncio.create_task(router.post()) for _ in range(20)]
        await until(lambda: sum(router.cell(slot, MemberCell.IN_FLIGHT) for slot in range(4)) == 20)
        assert [router.cell(slot, MemberCell.IN_FLIGHT) for slot in range(4)] == [5, 5, 5, 5]
        for task in tasks:
            task.cancel()
        await until(lambda: router.relay.active == 0)


async def test_a_replica_that_has_just_come_up_is_given_more_little_by_little():
    async with routing(Upstream(), Upstream()) as router:
        old, new = Upstream(), Upstream()
        async with old.running(), new.running():
            router.roster(member(old, 0, since=1.0), member(new, 1, since=time.time()))
            warm, cold = (router.relay.members._all[number] for number in (0, 1))
            assert warm.speed == 1.0
            assert cold.speed < 0.5
            router.roster(member(old, 0, since=1.0), member(new, 1, since=time.time() - 5))
            assert 0.3 < router.relay.members._all[1].speed < 1.0
            router.roster(member(old, 0, since=1.0), member(new, 1, since=time.time() - 11))
            assert router.relay.members._all[1].speed == 1.0


@pytest.mark.parametrize("count", [1, 3])
async def test_a_replica_with_the_same_id_at_another_place_is_another(count):
    old, new = Upstream(), Upstream()
    async with routing(old) as router, new.running():
        for _ in range(count):
            await router.post()
        router.roster(member(new, 0))
        assert (await router.post()).status == 200
        assert (len(old.asked), len(new.asked)) == (count, 1)
        await until(lambda: old.open == 0)
        assert router.cell(0, MemberCell.REQUESTS) == count + 1


async def test_replicas_that_answer_at_once_are_asked_over_few_connections():
    upstreams = Upstream(), Upstream()
    async with routing(*upstreams) as router:
        connections = [await router.connect() for _ in range(700)]
        for _ in range(3):
            for connection in connections:
                connection.writer.write(post())
            for connection in connections:
                assert (await connection.answer()).status == 200
    assert sum(one.connections for one in upstreams) <= 700


async def test_streams_that_stay_open_get_a_connection_each():
    async def hang(request, writer):
        writer.write(EVENTS + chunk(b"data: 1\n\n"))
        await asyncio.Event().wait()

    upstream = Upstream(hang)
    async with routing(upstream) as router:
        connections = [await router.connect() for _ in range(400)]
        for connection in connections:
            await connection.send(post())
        for connection in connections:
            await connection.head()
            assert await connection.chunk() == b"data: 1\n\n"
        for connection in connections:
            connection.close()
        await until(lambda: router.relay.active == 0)
    assert upstream.connections == 400

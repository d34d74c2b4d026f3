"""What becomes of a request when its replica fails, in every way that a replica can, whole or as a stream."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from run_router import (
    ANSWER,
    DONE,
    EVENTS,
    Resumable,
    Slow,
    Upstream,
    chunk,
    flood,
    free_port,
    hang,
    member,
    post,
    reset_at_once,
    response,
    routing,
    saying,
    until,
    well,
)

from gpuinfer.fleet.router.protocol import FleetMember
from gpuinfer.fleet.router.relay import LOSSES
from gpuinfer.fleet.router.shared_counters import MemberCell, ProcessCell

TURNS: dict[str, Any] = {"policy": "round-robin"}
BUSY, WRONG = response(429, b"busy", "Retry-After: 3"), response(500, b"oops")
DRAINING = response(503, b"later", "Retry-After: 1")
LEAVING = response(503, b"{}", "X-Gpuinfer-Error: Closed")
HALF = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf"
OK = b"HTTP/1.1 200 OK\r\n"
BROKEN = {
    "reset before an answer": reset_at_once,
    "closed before an answer": saying(b"", "close"),
    "reset within the head": saying(OK + b"Content-", "reset"),
    "reset within a body": saying(HALF, "reset"),
    "closed within a body": saying(HALF, "close"),
    "another protocol": saying(b"SSH-2.0-OpenSSH\r\n"),
    "two lengths": saying(OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nx"),
    "a length and chunks": saying(OK + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"),
    "an odd length": saying(OK + b"Content-Length: -1\r\n\r\n"),
    "bare LF": saying(b"HTTP/1.1 200 OK\nContent-Length: 2\n\r\n\r\nok"),
    "more than its length": saying(OK + b"Content-Length: 2\r\n\r\nlong"),
    "another protocol by 101": saying(b"HTTP/1.1 101 Switching Protocols\r\n\r\n"),
    "a head without end": saying(OK + b"X: " + b"y" * 70_000),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
async def test_a_request_whose_replica_fails_is_answered_by_another(broken):
    """Without a budget for retries: what was lost costs none."""
    async with routing(Upstream(broken), Upstream(), **TURNS, retry_budget=0.0) as router:
        answer = await router.post()
        assert (answer.status, answer.body) == (200, b'{"answer": "ok"')
        assert (answer.route["replica"], answer.route["attempt"]) == ("1", "2")
        assert (router.cell(0, MemberCell.ERRORS), router.cell(0, MemberCell.RETRIED)) == (1, 1)
        assert [told["member"] for told in router.told] == [0]
        assert [router.cell(slot, MemberCell.IN_FLIGHT) for slot in (0, 1)] == [0, 0]


async def test_a_replica_that_refuses_or_takes_no_connection_is_passed_over():
    good = Upstream()
    async with routing(good, **TURNS) as router:
        router.roster(FleetMember(0, "127.0.0.1", free_port(), "up"), member(good, 1))
        answers = [await router.post() for _ in range(8)]
        assert {answer.status for answer in answers} == {200}
        assert {"event": "failed", "member": 0, "kind": "refused"} in router.told
        assert (router.cell(0, MemberCell.BREAKER), answers[-1].route["attempt"]) == (2, "1")
    async with routing(good, **TURNS) as router:
        router.roster(FleetMember(0, "127.0.0.1", 9, "up"), member(good, 1))
        pool = router.relay.members._all[0].pool
        pool._open_connection, pool._connect_s = lambda protocol: asyncio.Event().wait(), 0.05
        assert (await router.post()).status == 200
        assert {"event": "failed", "member": 0, "kind": "timeout"} in router.told


async def test_an_idle_connection_that_the_replica_closed_is_no_failure():
    upstream = Upstream()
    async with routing(upstream) as router:
        connection = await router.connect()
        await connection.ask(post())
        upstream.answers, upstream.always = [reset_at_once, well], reset_at_once  # as if it had closed it just before
        answer = await connection.ask(post())
        assert (answer.status, answer.route["attempt"]) == (200, "1")
        assert router.cell(0, MemberCell.ERRORS) == 0


async def test_a_request_that_replicas_die_of_is_given_up_before_all_are_dead():
    upstreams = [Upstream(reset_at_once) for _ in range(LOSSES + 2)]
    async with routing(*upstreams) as router:
        answer = await router.post()
        assert answer.status == 502
        assert f"{LOSSES} replicas failed" in answer.message
        assert sum(len(one.asked) for one in upstreams) == LOSSES


@pytest.mark.parametrize(
    ("said", "options", "status", "asked", "retried"),
    [
        (WRONG, {}, 500, 1, None),  # it may have had effects
        (response(400, b"bad"), {}, 400, 1, None),
        (response(504, b"slow"), {}, 504, 1, None),
        (DRAINING, {}, 200, 1, "503"),
        (response(502), {}, 200, 1, "502"),
        (DRAINING, {"retry_budget": 0.0}, 503, 1, None),
        (LEAVING, {"retry_budget": 0.0}, 200, 1, None),
        (BUSY, {}, 200, 1, "429"),
    ],
)
async def test_an_answer_goes_to_the_client_or_its_request_to_a_replica_that_may_take_it(
    said, options, status, asked, retried
):
    first, second = Upstream(saying(said)), Upstream()
    async with routing(first, second, **TURNS, **options) as router:
        answer = await router.post()
        assert (answer.status, len(first.asked), answer.route.get("retried")) == (status, asked, retried)
        assert answer.route["replica"] == str(int(status == 200))
        assert router.cell(0, MemberCell.BREAKER) == 0


async def test_a_replica_that_takes_nothing_new_is_left_alone_and_costs_nothing():
    upstreams = [Upstream(saying(LEAVING)), Upstream(saying(LEAVING)), Upstream()]
    async with routing(*upstreams, retry_budget=0.0) as router:
        for _ in range(20):
            assert (await router.post()).status == 200
        assert [len(one.asked) for one in upstreams[:2]] <= [1, 1]
        assert router.cell(0, MemberCell.ERRORS) == 0


async def test_retries_because_of_answers_have_a_budget():
    upstreams = Upstream(saying(DRAINING)), Upstream(saying(DRAINING))
    async with routing(*upstreams, retry_budget=0.2) as router:
        assert {(await router.post()).status for _ in range(100)} == {503}
        assert 100 + 20 <= sum(len(one.asked) for one in upstreams) <= 100 + 20 + 5


async def test_a_busy_replica_passes_a_request_to_one_with_less_to_do_and_to_no_other():
    busy, idle = Upstream(saying(BUSY)), Upstream(saying(BUSY))
    async with routing(busy, idle, **TURNS) as router:
        answer = await router.post()
        assert (answer.status, answer.headers["retry-after"]) == (429, "3")
        assert len(busy.asked) + len(idle.asked) == 2
        idle.asked.clear()
        idle.always = hang
        waiting = [asyncio.create_task(router.post()) for _ in range(4)]
        await until(lambda: len(idle.asked) >= 2)
        assert (await router.post()).status == 429
        for task in waiting:
            task.cancel()


async def test_answers_that_are_nobodys_failure_and_clients_that_go_never_open_the_breaker_and_errors_in_bursts_do():
    upstream = Upstream()
    async with routing(upstream) as router:
        for _ in range(20):
            upstream.answers = [saying(answer) for answer in (BUSY, DRAINING, response(404))]
            for _ in range(3):
                await router.post()
        upstream.always, asked = hang, len(upstream.asked)
        for number in range(6):
            connection = await router.connect()
            await connection.send(post())
            await until(lambda number=number: len(upstream.asked) > asked + number)
            if number % 2:
                connection.writer.write_eof()  # it is gone all the same
            connection.close()
        await until(lambda: router.total(ProcessCell.CLIENT_GONE) == 6)
        await until(lambda: router.cell(0, MemberCell.IN_FLIGHT) == router.relay.active == 0)
        assert (router.cell(0, MemberCell.BREAKER), router.cell(0, MemberCell.ERRORS)) == (0, 0)
    bad, good = Upstream(saying(WRONG)), Upstream()
    async with routing(bad, good, **TURNS) as router:
        for _ in range(40):
            await router.post()
        assert (router.cell(0, MemberCell.BREAKER), len(bad.asked)) == (2, 20)


async def test_an_open_breaker_lets_one_request_try_and_closes_when_that_is_answered():
    upstream = Upstream(reset_at_once)
    async with routing(upstream, breaker_open_s=0.05) as router:
        await router.post()
        assert router.cell(0, MemberCell.BREAKER) == 2
        upstream.always, before = hang, len(upstream.asked)
        connection = await router.connect()
        await connection.send(post())
        await until(lambda: len(upstream.asked) > before)
        connection.close()  # a try that says nothing does not lock the replica out
        upstream.always = well
        assert (await router.post()).status == 200
        assert router.cell(0, MemberCell.BREAKER) == 0
        assert router.relay.members.usable[0].speed < 1


async def test_a_request_waits_for_a_replica_that_starts_and_is_refused_where_none_is_in_sight():
    upstream = Upstream()
    async with upstream.running(), routing() as router:
        waiting = asyncio.create_task(router.post())  # before the first replica is named
        await until(lambda: router.relay._queue)
        router.roster(member(upstream, 0, state="starting"))
        await asyncio.sleep(0)
        assert router.relay._queue
        router.roster(member(upstream, 0))
        assert (await waiting).status == 200
        router.roster()
        answer = await router.post()
        assert (answer.status, answer.headers["retry-after"]) == (503, "2")
        assert router.total(ProcessCell.UNROUTED) == 1
    async with routing(wait_s=0.2) as router:
        router.roster(FleetMember(0, "127.0.0.1", 9, "starting"))
        assert (await router.post()).status == 503


async def test_a_draining_replica_finishes_what_it_has_and_gets_nothing_new():
    slow = Slow()
    old, new = Upstream(slow), Upstream()
    async with routing(old, new) as router:
        router.roster(member(old, 0), member(new, 1, state="starting"))
        under_way = asyncio.create_task(router.post())
        await until(lambda: old.asked)
        router.roster(member(old, 0, state="draining"), member(new, 1))
        assert {(await router.post()).route["replica"] for _ in range(5)} == {"1"}
        slow.release.set()
        assert (await under_way).route["replica"] == "0"
        router.roster(member(new, 1))
        await until(lambda: old.open == 0)


async def test_a_silent_replica_is_given_up_after_the_timeout():
    async with routing(Upstream(hang), timeout_s=0.3) as router:
        assert (await router.post()).status == 504
        assert router.told == [{"event": "failed", "member": 0, "kind": "timeout"}]
        assert router.total(ProcessCell.TIMEOUTS) == 1


async def test_an_answer_before_the_whole_request_came_is_passed_on():
    writers = []

    async def early(reader, writer):
        writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(response(413, b"large"))

    server = await asyncio.start_server(early, "127.0.0.1", 0)
    async with routing() as router:
        router.roster(FleetMember(0, "127.0.0.1", server.sockets[0].getsockname()[1], "up"))
        answer = await router.post(b"x" * (20 << 20))
        assert (answer.status, answer.body) == (413, b"large")
    server.close()
    for writer in writers:
        writer.transport.abort()
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("sent", "then", "body"),
    [
        (b"Transfer-Encoding: chunked\r\n\r\n4\r\nsome\r\n5\r\nof", "reset", b"some"),
        (b"Content-Length: 1000000\r\n\r\n" + b"x" * 5000, "close", b"x" * 5000),
    ],
    ids=["of unknown length", "large"],
)
async def test_an_answer_that_breaks_off_breaks_off_at_the_client_too(sent, then, body):
    async with routing(Upstream(saying(OK + sent, then))) as router:
        answer = await router.post()
        assert not answer.whole
        assert body.startswith(answer.body)
        await until(lambda: router.total(ProcessCell.BROKEN_OFF) == 1)


async def test_a_stream_that_is_not_ours_ends_with_an_error_event_or_starts_again_before_its_first():
    other, said = Upstream(), EVENTS + chunk(b"data: 1\n\n") + chunk(b"data: 2\n\ndata: thr")
    async with routing(Upstream(saying(said, "reset")), other, ours=False, **TURNS) as router:
        answer = await router.post()
        first, second, error, rest = answer.body.split(b"\n\n")
        assert (answer.whole, first, second, rest, other.asked) == (True, b"data: 1", b"data: 2", b"", [])
        assert b'{"error": {"message": "the replica was lost' in error
    broken = Upstream(saying(EVENTS + chunk(b"data: on"), "reset"))
    whole = Upstream(saying(EVENTS + chunk(b"data: one\n\n") + chunk(DONE) + b"0\r\n\r\n"))
    async with routing(broken, whole, ours=False, **TURNS) as router:
        assert (await router.post()).body == b"data: one\n\n" + DONE


def tokens(body: bytes, sample: int = 0) -> list[int]:
    return [int(number) for number in re.findall(rb"data: {%d: (\d+)}\n\n" % sample, body)]


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
        assert answer.body.endswith(DONE)
        assert answer.body.count(b"[DONE]") == 1
        assert len(answering.same) == 1
        assert len(answering.begun) == len(breaks) + 1
        if breaks == [8]:
            told = {str(sample): {"tokens": [0, 1, 2][: 3 - sample // 2], "ended": False} for sample in range(3)}
            assert answering.begun[1] == told
        assert sum(router.cell(slot, MemberCell.RESUMED) for slot in (0, 1)) == len(breaks)
        assert router.relay.budget.left == router.relay.config.bodies_bytes


async def test_a_stream_that_cannot_go_on_ends_with_an_error_event_unless_it_was_done_but_for_its_end():
    async with routing(Upstream(saying(EVENTS + chunk(DONE), "close"))) as router:
        answer = await router.post()
        assert (answer.whole, answer.body, router.total(ProcessCell.BROKEN_OFF)) == (True, DONE, 0)
    async with routing(Upstream(Resumable(100, 1, [90])), kept_bytes=1000) as router:  # more than is kept
        answer = await router.post()
        assert (answer.whole, b'data: {"error"' in answer.body) == (True, True)
        assert router.relay.budget.left == router.relay.config.bodies_bytes
    breaking, refusing = Upstream(Resumable(9, 1, [3, 0, 0, 0, 0, 0])), Upstream(saying(response(400, b"no")))
    async with routing(breaking, refusing, **TURNS, wait_s=0.3) as router:
        answer = await router.post()
        assert (answer.whole, tokens(answer.body), b'data: {"error"' in answer.body) == (True, [0, 1, 2], True)


async def test_a_stream_that_falls_silent_goes_on_elsewhere():
    async def silent(request, writer):
        writer.write(EVENTS + chunk(b"id: 0.0\ndata: {0: 0}\n\n"))
        await hang(request, writer)

    async with routing(Upstream(silent), Upstream(Resumable(4)), **TURNS, timeout_s=0.3) as router:
        assert tokens((await router.post()).body) == [0, 1, 2, 3]


async def test_a_client_that_reads_slowly_holds_its_replica_back_and_one_that_reads_nothing_is_cut_off():
    async with routing(Upstream(flood), kept_bytes=1 << 20) as router:
        connection = await router.connect()
        await connection.send(post())
        await until(lambda: router.relay.active)
        client = next(one for slot in router.relay.timer._slots for one in slot if one._request is not None)
        await until(lambda: client._request.paused, "holding back")
        assert client._transport.get_write_buffer_size() < 1 << 20
        read = 0
        while read < 16 << 20:  # more than the buffers on the way hold
            read += len(await connection.reader.read(1 << 20))
        connection.close()
        await until(lambda: router.relay.active == 0)
    async with routing(Upstream(flood), write_s=0.2) as router:
        connection = await router.connect()
        await connection.send(post())
        await until(lambda: router.total(ProcessCell.CLIENT_GONE) == 1)
        assert router.cell(0, MemberCell.ERRORS) == 0


async def test_several_kinds_of_bodies_go_on_as_they_come():
    slow, binary = Slow(), b"\0\n\n\1" * 1000

    async def slowly(request, writer):
        writer.write(EVENTS + chunk(b"data: 1\n\n"))
        await slow.release.wait()
        writer.write(chunk(b"data: 2\n\n") + b"0\r\n\r\n")

    said = b"data: 1\r\n\r\ndata: 2\r\n\r\ndata: 3\n\n"
    pieces = b"".join(chunk(said[at : at + 3]) for at in range(0, len(said), 3)) + b"0\r\n\r\n"
    plain = EVENTS.replace(b"text/event-stream", b"application/octet-stream") + chunk(binary) + b"0\r\n\r\n"
    async with routing(Upstream(answers=[slowly, saying(EVENTS + pieces), saying(plain), saying(ANSWER)])) as router:
        connection = await router.connect()
        await connection.send(post())
        await connection.head()
        assert await connection.chunk() == b"data: 1\n\n"
        slow.release.set()
        assert [await connection.chunk() for _ in range(2)] == [b"data: 2\n\n", b""]
        assert [(await connection.ask(post())).body for _ in range(3)] == [said, binary, b'{"answer": "ok"']

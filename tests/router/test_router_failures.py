"""What becomes of a request when its replica fails, in every way that a replica can."""

from __future__ import annotations

import asyncio

import pytest
from run_router import ANSWER, EVENTS, Upstream, chunk, free_port, member, post, reset, routing, saying, until, well

from gpuinfer.fleet.router.protocol import FleetMember
from gpuinfer.fleet.router.relay import LOSSES
from gpuinfer.fleet.router.shared_counters import MemberCell, ProcessCell

BUSY = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3\r\nContent-Length: 4\r\n\r\nbusy"
DRAINING = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 5\r\n\r\nlater"
WRONG = b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\noops"
HALF = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf"


async def hang(request, writer):
    await asyncio.Event().wait()


async def reset_at_once(request, writer):
    reset(writer)


BROKEN = [
    pytest.param(reset_at_once, id="reset before an answer"),
    pytest.param(saying(b"", "close"), id="closed before an answer"),
    pytest.param(saying(b"HTTP/1.1 200 OK\r\nContent-", "reset"), id="reset within the head"),
    pytest.param(saying(HALF, "reset"), id="reset within a body"),
    pytest.param(saying(HALF, "close"), id="closed within a body"),
    pytest.param(saying(b"SSH-2.0-OpenSSH\r\n"), id="another protocol"),
    pytest.param(saying(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx"), id="two lengths"),
    pytest.param(
        saying(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"), id="a length and chunks"
    ),
    pytest.param(saying(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"), id="an odd length"),
    pytest.param(saying(b"HTTP/1.1 200 OK\nContent-Length: 2\n\r\n\r\nok"), id="bare LF"),
    pytest.param(saying(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nlong"), id="more than its length"),
    pytest.param(saying(b"HTTP/1.1 101 Switching Protocols\r\n\r\n"), id="another protocol by 101"),
    pytest.param(saying(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000), id="a head without end"),
]


@pytest.mark.parametrize("broken", BROKEN)
async def test_a_request_whose_replica_fails_is_answered_by_another(broken):
    bad, good = Upstream(broken), Upstream()
    async with routing(bad, good, policy="round-robin") as router:
        answer = await router.post()
        assert (answer.status, answer.body) == (200, b'{"answer": "ok"')
        assert (answer.route["replica"], answer.route["attempt"]) == ("1", "2")
        assert router.cell(0, MemberCell.ERRORS) == 1
        assert router.cell(0, MemberCell.RETRIED) == 1
        assert [told["member"] for told in router.told] == [0]
        assert [router.cell(slot, MemberCell.IN_FLIGHT) for slot in (0, 1)] == [0, 0]


async def test_a_replica_that_refuses_connections_costs_its_requests_nothing():
    good = Upstream()
    async with routing(good, policy="round-robin") as router:
        router.roster(FleetMember(0, "127.0.0.1", free_port(), "up"), member(good, 1))
        answers = [await router.post() for _ in range(8)]
        assert {answer.status for answer in answers} == {200}
        assert {"event": "failed", "member": 0, "kind": "refused"} in router.told
        assert router.cell(0, MemberCell.BREAKER) == 2
        assert answers[-1].route["attempt"] == "1"


async def test_a_replica_that_takes_no_connection_in_time_is_passed_over():
    good = Upstream()
    async with routing(good, policy="round-robin") as router:

        async def never(protocol):
            await asyncio.Event().wait()

        router.roster(FleetMember(0, "127.0.0.1", 9, "up"), member(good, 1))
        pool = router.relay.members._all[0].pool
        pool._open_connection, pool._connect_s = never, 0.05
        assert (await router.post()).status == 200
        assert {"event": "failed", "member": 0, "kind": "timeout"} in router.told


async def test_an_idle_connection_that_the_replica_closed_is_no_failure():
    upstream = Upstream()
    async with routing(upstream) as router:
        connection = await router.connect()
        await connection.ask(post())
        upstream.always = reset_at_once  # as if it had closed the connection just before
        upstream.answers = [reset_at_once, well]
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


async def test_a_replica_that_takes_nothing_new_is_left_alone_and_costs_nothing():
    leaving = b"HTTP/1.1 503 Service Unavailable\r\nX-Gpuinfer-Error: Closed\r\nContent-Length: 2\r\n\r\n{}"
    upstreams = [Upstream(saying(leaving)), Upstream(saying(leaving)), Upstream()]
    async with routing(*upstreams, retry_budget=0.0) as router:
        for _ in range(20):
            assert (await router.post()).status == 200
        assert [len(one.asked) for one in upstreams[:2]] <= [1, 1]
        assert router.cell(0, MemberCell.ERRORS) == 0
        assert {"event": "failed", "member": 0, "kind": "draining"} in router.told or not upstreams[0].asked


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        pytest.param(WRONG, 500, id="an error that may have had effects"),
        pytest.param(b"HTTP/1.1 400 Bad\r\nContent-Length: 3\r\n\r\nbad", 400, id="the client's fault"),
        pytest.param(b"HTTP/1.1 504 Slow\r\nContent-Length: 4\r\n\r\nslow", 504, id="too slow"),
    ],
)
async def test_other_errors_are_their_clients_answer(answer, status):
    upstreams = Upstream(saying(answer)), Upstream(saying(answer))
    async with routing(*upstreams) as router:
        assert (await router.post()).status == status
        assert sum(len(one.asked) for one in upstreams) == 1


@pytest.mark.parametrize("said", [DRAINING, b"HTTP/1.1 502 Bad\r\nContent-Length: 0\r\n\r\n"])
async def test_a_replica_that_cannot_take_a_request_now_passes_it_to_another(said):
    async with routing(Upstream(saying(said)), Upstream(), policy="round-robin") as router:
        answer = await router.post()
        assert answer.status == 200
        assert answer.route["retried"] in ("503", "502")


async def test_retries_because_of_answers_have_a_budget():
    upstreams = Upstream(saying(DRAINING)), Upstream(saying(DRAINING))
    async with routing(*upstreams, retry_budget=0.2) as router:
        statuses = [(await router.post()).status for _ in range(100)]
        assert set(statuses) == {503}
        asked = sum(len(one.asked) for one in upstreams)
        assert 100 + 20 <= asked <= 100 + 20 + 5


async def test_without_a_budget_nothing_is_repeated_but_what_was_lost():
    async with routing(Upstream(saying(DRAINING)), Upstream(), policy="round-robin", retry_budget=0.0) as router:
        assert (await router.post()).status == 503
    async with routing(Upstream(reset_at_once), Upstream(), policy="round-robin", retry_budget=0.0) as router:
        assert (await router.post()).status == 200


async def test_a_busy_replica_passes_a_request_to_one_with_less_to_do_and_to_no_other():
    busy, idle = Upstream(saying(BUSY)), Upstream(saying(BUSY))
    async with routing(busy, idle, policy="round-robin") as router:
        answer = await router.post()
        assert (answer.status, answer.headers["retry-after"]) == (429, "3")
        assert len(busy.asked) + len(idle.asked) == 2
        busy.asked.clear()
        idle.asked.clear()
        idle.always = hang
        waiting = [asyncio.create_task(router.post()) for _ in range(4)]
        await until(lambda: len(idle.asked) >= 2)
        assert (await router.post()).status == 429
        for task in waiting:
            task.cancel()


async def test_answers_that_are_nobodys_failure_never_open_the_breaker():
    said = [BUSY, DRAINING, b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"]
    upstream = Upstream()
    async with routing(upstream) as router:
        for _ in range(20):
            upstream.answers = [saying(answer) for answer in said]
            for _ in said:
                await router.post()
        assert router.cell(0, MemberCell.BREAKER) == 0
        assert router.cell(0, MemberCell.ERRORS) == 0


async def test_clients_that_go_away_never_open_the_breaker_and_cancel_their_requests():
    upstream = Upstream(hang)
    async with routing(upstream) as router:
        for number in range(6):
            connection = await router.connect()
            await connection.send(post())
            await until(lambda number=number: len(upstream.asked) > number)
            if number % 2:
                connection.writer.write_eof()  # it is gone all the same
            connection.close()
        await until(lambda: router.total(ProcessCell.CLIENT_GONE) == 6)
        await until(lambda: router.cell(0, MemberCell.IN_FLIGHT) == 0)
        assert router.cell(0, MemberCell.BREAKER) == 0
        assert router.relay.active == 0


async def test_an_open_breaker_lets_one_request_try_and_closes_when_that_is_answered():
    upstream = Upstream(reset_at_once)
    async with routing(upstream, breaker_open_s=0.05) as router:
        await router.post()
        assert router.cell(0, MemberCell.BREAKER) == 2
        upstream.always = well
        assert (await router.post()).status == 200
        assert router.cell(0, MemberCell.BREAKER) == 0
        replica = router.relay.members.usable[0]
        assert replica.speed < 1


async def test_a_try_that_says_nothing_does_not_lock_the_replica_out():
    upstream = Upstream(reset_at_once)
    async with routing(upstream, breaker_open_s=0.05) as router:
        await router.post()
        upstream.always = hang
        connection = await router.connect()
        before = len(upstream.asked)
        await connection.send(post())
        await until(lambda: len(upstream.asked) > before)
        connection.close()
        upstream.always = well
        assert (await router.post()).status == 200


async def test_errors_in_bursts_open_the_breaker():
    bad, good = Upstream(saying(WRONG)), Upstream()
    async with routing(bad, good, policy="round-robin") as router:
        for _ in range(40):
            await router.post()
        assert router.cell(0, MemberCell.BREAKER) == 2
        assert len(bad.asked) == 20


async def test_with_no_replica_a_request_waits_for_one_that_starts():
    upstream = Upstream()
    async with routing(upstream) as router:
        router.roster(member(upstream, 0, state="starting"))
        waiting = asyncio.create_task(router.post())
        await until(lambda: router.relay._waiting)
        router.roster(member(upstream, 0, state="up"))
        assert (await waiting).status == 200


async def test_before_the_first_replica_is_named_a_request_waits_for_one():
    async with Upstream().running() as upstream, routing() as router:
        waiting = asyncio.create_task(router.post())
        await until(lambda: router.relay._waiting)
        router.roster(member(upstream, 0))
        assert (await waiting).status == 200


async def test_with_no_replica_in_sight_a_request_is_refused_at_once():
    async with routing(Upstream()) as router:
        router.roster()
        answer = await router.post()
        assert (answer.status, answer.headers["retry-after"]) == (503, "2")
        assert router.total(ProcessCell.UNROUTED) == 1


async def test_waiting_for_a_replica_has_an_end():
    async with routing(wait_s=0.2) as router:
        router.roster(FleetMember(0, "127.0.0.1", 9, "starting"))
        assert (await router.post()).status == 503


async def test_a_draining_replica_finishes_what_it_has_and_gets_nothing_new():
    release = asyncio.Event()

    async def slow(request, writer):
        await release.wait()
        writer.write(ANSWER)

    old, new = Upstream(slow), Upstream()
    async with routing(old, new) as router:
        router.roster(member(old, 0), member(new, 1, state="starting"))
        under_way = asyncio.create_task(router.post())
        await until(lambda: old.asked)
        router.roster(member(old, 0, state="draining"), member(new, 1))
        assert {(await router.post()).route["replica"] for _ in range(5)} == {"1"}
        release.set()
        assert (await under_way).route["replica"] == "0"
        router.roster(member(new, 1))
        await until(lambda: old.open == 0)


async def test_a_silent_replica_is_given_up_after_the_timeout():
    async with routing(Upstream(hang), timeout_s=0.3) as router:
        answer = await router.post()
        assert answer.status == 504
        assert router.told == [{"event": "failed", "member": 0, "kind": "timeout"}]
        assert router.total(ProcessCell.TIMEOUTS) == 1


async def test_an_answer_before_the_whole_request_came_is_passed_on():
    writers = []

    async def early(reader, writer):
        writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 5\r\n\r\nlarge")

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
    async with routing(Upstream(saying(b"HTTP/1.1 200 OK\r\n" + sent, then))) as router:
        answer = await router.post()
        assert not answer.whole
        assert body.startswith(answer.body)
        await until(lambda: router.total(ProcessCell.BROKEN_OFF) == 1)


async def test_somebody_elses_stream_that_breaks_off_ends_with_an_error_event():
    other = Upstream()
    said = EVENTS + chunk(b"data: 1\n\n") + chunk(b"data: 2\n\ndata: thr")
    async with routing(Upstream(saying(said, "reset")), other, ours=False, policy="round-robin") as router:
        answer = await router.post()
        first, second, error, rest = answer.body.split(b"\n\n")
        assert (answer.whole, first, second, rest) == (True, b"data: 1", b"data: 2", b"")
        assert b'{"error": {"message": "the replica was lost' in error
        assert other.asked == []


async def test_a_stream_of_which_no_event_went_out_starts_again_elsewhere():
    broken = Upstream(saying(EVENTS + chunk(b"data: on"), "reset"))
    whole = Upstream(saying(EVENTS + chunk(b"data: one\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"))
    async with routing(broken, whole, ours=False, policy="round-robin") as router:
        answer = await router.post()
        assert answer.body == b"data: one\n\ndata: [DONE]\n\n"

"""The router's queue: bounds of requests at a replica, the order of those that wait, and every end of their wait."""

from __future__ import annotations

import asyncio
import math

from hypothesis import given
from hypothesis import strategies as st
from run_router import ANSWER, Answer, Request, Router, Upstream, member, response, routing, until, well

from gpuinfer.api import Priority, RoutingPolicy
from gpuinfer.fleet.router.request_queue import RequestQueue, back_in_front
from gpuinfer.fleet.router.shared_counters import MemberCell, ProcessCell


class OneByOne:
    """Answers in the order in which requests came, each once `go` allows one more."""

    def __init__(self) -> None:
        self.go = asyncio.Semaphore(0)
        self.order: list[bytes] = []

    async def __call__(self, request: Request, writer: asyncio.StreamWriter) -> None:
        self.order.append(request.body)
        await self.go.acquire()
        writer.write(response(200, request.body))


async def sent(router: Router, body: bytes, headers: str = "") -> asyncio.Task[Answer]:
    """A request that has come to the router, under way or waiting."""
    before = router.total(ProcessCell.REQUESTS)
    task = asyncio.create_task(router.post(body, headers=headers))
    await until(lambda: router.total(ProcessCell.REQUESTS) > before, "its arrival")
    return task


async def test_requests_wait_for_room_by_class_then_deadline_then_arrival():
    answering = OneByOne()
    async with routing(Upstream(answering), queue="global", max_inputs=1) as router:
        tasks = [await sent(router, b"first")]
        for body, headers in [
            (b"low", "X-Gpuinfer-Priority: low\r\n"),
            (b"normal", ""),
            (b"late", "X-Gpuinfer-Timeout: 900\r\n"),
            (b"soon", "X-Gpuinfer-Timeout: 500\r\n"),
            (b"high", "X-Gpuinfer-Priority: high\r\n"),
            (b"normal 2", "X-Gpuinfer-Priority: nonsense\r\n"),
        ]:
            tasks.append(await sent(router, body, headers))
        assert (router.total(ProcessCell.QUEUED), router.cell(0, MemberCell.IN_FLIGHT)) == (6, 1)
        for _ in tasks:
            answering.go.release()
        answers = await asyncio.gather(*tasks)
        assert answering.order == [b"first", b"high", b"soon", b"late", b"normal", b"normal 2", b"low"]
        assert {answer.status for answer in answers} == {200}
        assert (router.total(ProcessCell.QUEUED), router.total(ProcessCell.QUEUE_TAKEN)) == (0, 6)
        assert router.total(ProcessCell.QUEUE_WAIT_US) > 0


async def test_a_replica_takes_as_many_as_it_has_room_for_wherever_its_room_is_said():
    answering = OneByOne()
    for said, changes in ((2, {}), (None, {"max_inputs": 2}), (7, {"max_inputs": 2})):
        upstream = Upstream(answering)
        async with upstream.running(), routing(queue="global", **changes) as router:
            router.roster(member(upstream, 0, room=said))
            tasks = [await sent(router, b"%d" % number) for number in range(5)]
            assert (router.cell(0, MemberCell.IN_FLIGHT), router.total(ProcessCell.QUEUED)) == (2, 3)
            router.roster(member(upstream, 0, room=said))  # the same again: nothing is lost by it
            for _ in tasks:
                answering.go.release()
            assert [(await task).status for task in tasks] == [200] * 5


async def test_room_that_grows_is_used_at_once():
    answering = OneByOne()
    upstream = Upstream(answering)
    async with upstream.running(), routing(queue="global") as router:
        router.roster(member(upstream, 0, room=1))
        tasks = [await sent(router, b"%d" % number) for number in range(4)]
        assert router.total(ProcessCell.QUEUED) == 3
        router.roster(member(upstream, 0, room=3))
        await until(lambda: router.total(ProcessCell.QUEUED) == 1)
        for _ in tasks:
            answering.go.release()
        assert [(await task).status for task in tasks] == [200] * 4


async def test_a_full_queue_refuses_the_last_in_its_order_and_says_when_to_come_again():
    answering = OneByOne()
    async with routing(Upstream(answering), queue="global", max_inputs=1, queue_limit=2) as router:
        kept = [await sent(router, b"first"), await sent(router, b"normal")]
        low = await sent(router, b"low", "X-Gpuinfer-Priority: low\r\n")
        refused = await router.post(b"low 2", headers="X-Gpuinfer-Priority: low\r\n")
        assert (refused.status, refused.headers["x-gpuinfer-error"]) == (429, "QueueFull")
        assert int(refused.headers["retry-after"]) >= 1
        high = await sent(router, b"high", "X-Gpuinfer-Priority: high\r\n")
        assert (await low).status == 429  # it made room for one that goes before it
        for _ in range(3):
            answering.go.release()
        assert [(await task).status for task in (*kept, high)] == [200] * 3
        assert answering.order == [b"first", b"high", b"normal"]
        assert router.total(ProcessCell.QUEUE_FULL) == 2


async def test_without_a_global_queue_what_is_over_the_bound_is_refused():
    answering = OneByOne()
    async with routing(Upstream(answering), Upstream(answering), max_inputs=1) as router:
        tasks = [await sent(router, b"%d" % number) for number in range(2)]
        assert [router.cell(slot, MemberCell.IN_FLIGHT) for slot in (0, 1)] == [1, 1]
        assert (await router.post()).status == 429
        connection = await router.connect()
        listing = asyncio.create_task(connection.ask(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"))
        await until(lambda: len(answering.order) == 3, "a question about models, which is not bounded")
        for _ in range(3):
            answering.go.release()
        assert [(await task).status for task in (*tasks, listing)] == [200] * 3


async def test_what_a_dead_replica_had_goes_before_all_that_waits_even_where_nothing_else_may_wait():
    for queue in ("global", "replica"):
        answering, dies = OneByOne(), asyncio.Event()

        async def dying(request, writer, dies=dies):
            await dies.wait()
            writer.transport.abort()

        changes = {"queue": queue, "max_inputs": 1, "breaker_failures": 1}
        async with routing(Upstream(dying), Upstream(answering), **changes) as router:
            first = await sent(router, b"1")
            second = await sent(router, b"2")
            waiting = [await sent(router, b"high", "X-Gpuinfer-Priority: high\r\n")] if queue == "global" else []
            had = b"2" if answering.order == [b"1"] else b"1"
            dies.set()
            there = len(waiting) + 1
            await until(lambda there=there: router.total(ProcessCell.QUEUED) == there, "its return to the queue")
            for _ in range(3):
                answering.go.release()
            assert [(await task).status for task in (first, second, *waiting)] == [200] * (2 + len(waiting))
            assert answering.order[1] == had


async def test_a_request_that_one_replica_has_refused_waits_for_room_at_another_and_lets_others_go_ahead():
    """The one that refuses has room all the time: it would be sent there again and again until it is given up."""

    async def refusing(request, writer):
        writer.write(response(503, b'{"error": {"message": "later"}}') if request.body == b"2" else ANSWER)

    for queue in ("global", "replica"):
        answering, other = OneByOne(), Upstream(refusing)
        async with routing(Upstream(answering), other, queue=queue, max_inputs=1, policy="round-robin") as router:
            first = await sent(router, b"1")
            await until(lambda answering=answering: answering.order == [b"1"])
            second = await sent(router, b"2")
            await until(lambda router=router: router.total(ProcessCell.QUEUED) == 1, "its return to the queue")
            assert (await router.post(b"3")).status == 200  # the place that it does not want is no obstacle
            assert [request.body for request in other.asked] == [b"2", b"3"]
            answering.go.release()
            answering.go.release()
            assert [(await task).status for task in (first, second)] == [200, 200]
            assert answering.order == [b"1", b"2"]


async def test_a_request_whose_deadline_passes_while_it_waits_costs_a_replica_nothing():
    answering = OneByOne()
    async with routing(Upstream(answering), queue="global", max_inputs=1) as router:
        first = await sent(router, b"first")
        late = await router.post(b"late", headers="X-Gpuinfer-Timeout: 0.05\r\n")
        assert (late.status, late.headers["x-gpuinfer-error"]) == (408, "Expired")
        answering.go.release()
        assert (await first).status == 200
        assert answering.order == [b"first"]
        assert (router.total(ProcessCell.QUEUE_EXPIRED), router.total(ProcessCell.QUEUED)) == (1, 0)


async def test_a_replica_is_told_what_is_left_of_the_time():
    answering = OneByOne()
    upstream = Upstream(answering)
    async with routing(upstream, queue="global", max_inputs=1) as router:
        first = await sent(router, b"first")
        waits = await sent(router, b"waits", "X-Gpuinfer-Timeout: 300\r\n")
        await asyncio.sleep(0.05)
        answering.go.release()
        answering.go.release()
        assert [(await task).status for task in (first, waits)] == [200, 200]
        assert 0 < float(upstream.asked[1].headers["x-gpuinfer-timeout"]) < 299.96


async def test_a_client_that_leaves_takes_its_request_out_of_the_queue():
    answering = OneByOne()
    async with routing(Upstream(answering), queue="global", max_inputs=1) as router:
        first = await sent(router, b"first")
        connection = await router.connect()
        await connection.send(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\ngone")
        await until(lambda: router.total(ProcessCell.QUEUED) == 1)
        connection.close()
        await until(lambda: router.total(ProcessCell.QUEUED) == 0)
        answering.go.release()
        assert (await first).status == 200
        assert (answering.order, router.relay.active) == ([b"first"], 0)


async def test_no_request_waits_for_room_for_longer_than_for_an_answer():
    answering = OneByOne()
    async with routing(Upstream(answering), queue="global", max_inputs=1, timeout_s=0.5) as router:
        first, waits = await sent(router, b"first"), await sent(router, b"waits")
        answers = [await first, await waits]
        assert [answer.status for answer in answers] in ([504, 503], [504, 504])  # it may get its turn just then
        if answers[1].status == 503:
            assert "no replica had room for this request within 0.5 s" in answers[1].message
            assert "retry-after" in answers[1].headers
        assert router.total(ProcessCell.QUEUED) == 0


async def test_what_waits_while_no_replica_is_up_is_refused_after_a_while_or_sent_when_one_comes():
    upstream = Upstream(well)
    async with upstream.running(), routing(queue="global", wait_s=0.3) as router:
        router.roster(member(upstream, 0, state="starting"))
        assert (await router.post()).status == 503
        waits = await sent(router, b"waits")
        router.roster(member(upstream, 0, room=1))
        assert (await waits).status == 200
        assert router.total(ProcessCell.QUEUED) == 0


async def test_a_policy_that_changes_what_it_is_shown_costs_no_request_its_answer():
    class Clearing(RoutingPolicy):
        def choose(self, loads, asking):
            loads.clear()

    async with routing(Upstream(well), queue="global", max_inputs=1) as router:
        router.relay._policy.policy = Clearing()
        assert (await router.post()).status == 200
        assert "AttributeError" in router.told[0]["fault"]


# The queue itself

arrivals = st.lists(
    st.tuples(st.sampled_from(list(Priority)), st.sampled_from([1.0, 2.0, math.inf]), st.booleans()), max_size=40
)


@given(arrivals, st.integers(1, 10))
def test_the_queue_is_sorted_bounded_and_loses_nothing(asked, limit):
    queue: RequestQueue[int] = RequestQueue(limit)
    there, refused = {}, set()
    for number, (priority, deadline, had) in enumerate(asked):
        key = queue.place(priority, deadline)
        there[number] = key = back_in_front(key) if had else key
        if (turned_away := queue.push(number, key)) is not None:
            refused.add(turned_away)
            assert all(there[one] < there[turned_away] for one in queue)
    kept = list(queue)
    assert kept == sorted(kept, key=there.__getitem__)
    assert set(kept) | refused == set(range(len(asked)))
    assert not refused & set(kept)
    assert not any(asked[one][2] for one in refused)  # what a replica has had is never refused
    assert sum(not asked[one][2] for one in kept) <= limit
    for one in kept:
        assert queue.at(0) == one
        assert queue.remove(there[one]) == one
    assert not queue

"""What a router passes on, adds, takes away, refuses and counts; who is let in; and which replica is chosen."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
import time

import pytest
from run_router import (
    ANSWER,
    DONE,
    EVENTS,
    Slow,
    Upstream,
    chunk,
    hang,
    member,
    post,
    read_request,
    reset,
    response,
    routing,
    saying,
    until,
)

from gpuinfer.fleet.router.http_message import RequestHead, affinity_of
from gpuinfer.fleet.router.shared_counters import MemberCell, ProcessCell, SharedCounters

KEY = "Authorization: Bearer right\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
OLD = {"head_s": 1e6, "body_s": 1e6, "idle_s": 1e6}


async def echo(request, writer):
    writer.write(response(200, request.body))


async def test_a_request_goes_on_with_its_own_lines_and_the_routers_and_its_answer_says_who_gave_it():
    upstream = Upstream()
    lines = {"x-custom": "\t kept ", "x-gpuinfer-priority": "high", "traceparent": "00-1-2-03", "x-request-id": "mine"}
    async with routing(upstream) as router:
        headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        answer = await router.post(b'{"x": 1}', "/v1/chat/completions?a=b", headers)
        ids = [(await router.post()).headers["x-request-id"] for _ in range(2)]
    assert (answer.status, answer.body, answer.headers["x-request-id"]) == (200, b'{"answer": "ok"', "mine")
    assert (answer.route["replica"], answer.route["attempt"]) == ("0", "1")
    assert answer.route["why"].startswith("least-loaded")
    assert int(answer.route["queued_us"]) >= 0
    asked = upstream.asked[0]
    assert (asked.first, asked.body) == ("POST /v1/chat/completions?a=b HTTP/1.1", b'{"x": 1}')
    assert asked.headers["host"] == f"127.0.0.1:{upstream.port}"
    assert {name: asked.headers[name] for name in lines} == {name: value.strip() for name, value in lines.items()}
    assert int(asked.headers["x-gpuinfer-created"]) > 1_700_000_000
    assert ids == [asked.headers["x-request-id"] for asked in upstream.asked[1:]]
    assert len(set(ids)) == 2


async def test_what_is_for_one_hop_alone_or_not_for_clients_to_say_does_not_go_on():
    upstream = Upstream()
    lines = [
        "Connection: x-secret\r\nX-Secret: 1", "Keep-Alive: timeout=5", "TE: trailers", "Trailer: Expires",
        "Upgrade: websocket", "Proxy-Authorization: Basic x", "Authorization: Bearer client", "X-Gpuinfer-Begun: 12",
        "x-gpuinfer-created: 5", "X-Gpuinfer-Control-Key: guess",
    ]  # fmt: skip
    async with routing(upstream) as router:
        for line in lines:
            assert (await router.post(headers=line + "\r\n")).status == 200
            for one in line.split("\r\n"):
                assert one.encode() not in upstream.asked[-1].raw
            assert "x-gpuinfer-begun" not in upstream.asked[-1].headers
        router.roster(member(upstream, 0, key="for the replica"))
        await router.post(headers="Authorization: Bearer client\r\n")
        assert upstream.asked[-1].headers["authorization"] == "Bearer for the replica"
        hop = b"Connection: close, X-Inner\r\nKeep-Alive: timeout=9\r\nX-Inner: 1\r\nX-Outer: 2\r\nUpgrade: h2\r\n"
        upstream.always = saying(ANSWER.replace(b"\r\n\r\n", b"\r\n" + hop + b"\r\n", 1), then="close")
        answer = await router.post()
    assert "x-outer" in answer.headers
    assert not answer.headers.keys() & {"connection", "keep-alive", "x-inner", "upgrade"}


async def test_requests_are_answered_in_order_however_many_come_at_once_and_bodies_of_each_length():
    upstream = Upstream(echo)
    async with routing(upstream) as router:
        connection = await router.connect()
        bodies = [b"%03d" % number + b"x" * (number % 7 * 9000) for number in range(200)]
        sending = asyncio.create_task(connection.send(b"".join(map(post, bodies))))
        assert [(await connection.answer()).body for _ in bodies] == bodies
        await sending
        await until(lambda: router.relay.budget.left == router.relay.config.bodies_bytes)
        lines = "X-A: 1\r\nX-B: 2\r\n"  # heads that differ in their length alone are told apart
        for size in (5, 12, 0, 5, 100, 7):
            assert (await connection.ask(post(b"x" * size, headers=lines))).body == b"x" * size
        twice = post(headers=lines).replace(b"Content-Length: 2", b"Content-Length: 2, 2\r\nX-B: 2")
        assert (await connection.ask(twice)).status == 400


async def test_a_body_in_chunks_goes_on_with_its_length_and_a_client_that_asks_is_told_to_send():
    upstream = Upstream()
    async with routing(upstream) as router:
        connection = await router.connect()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        await connection.send(head + chunk(b"he"))
        assert (await connection.ask(chunk(b"llo") + b"0\r\n\r\n" + post(b"next"))).status == 200
        assert (await connection.answer()).status == 200
        head, _, body = post(b"body", headers="Expect: 100-continue\r\n").partition(b"\r\n\r\n")
        await connection.send(head + b"\r\n\r\n")
        assert (await connection.head()).status == 100
        assert (await connection.ask(body)).status == 200
    assert [asked.body for asked in upstream.asked] == [b"hello", b"next", b"body"]
    assert upstream.asked[0].headers["content-length"] == "5"
    assert not {"transfer-encoding", "expect"} & {*upstream.asked[0].headers, *upstream.asked[2].headers}


@pytest.mark.parametrize(  # the grammar is that of the server: tests/http/malformed_requests.py has all of it
    ("head", "status"),
    [
        (b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST /v1/%2e%2e/admin HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"POST /v1/x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"POST /v1/x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nab\r\n0\r\n\r\n", 400),
        (b"X" * 40_000, 431),
        (b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: 65\r\n\r\n", 413),
        (b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: 999999999999999999\r\n\r\n", 413),
    ],
)
async def test_what_two_programs_could_read_in_two_ways_or_is_too_large_is_refused(head, status):
    upstream = Upstream()
    async with routing(upstream, body_bytes=64) as router:
        connection = await router.connect()
        answer = await connection.ask(head)
        assert (answer.status, await connection.closed()) == (status, b"")
        assert answer.message
    assert upstream.asked == []


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 55\r\n\r\n", 304, b""),
        (response(200), 200, b""),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + ANSWER, 200, b'{"answer": "ok"'),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"one") + b"3\r\ntwo\r\n0\r\nX: y\r\n\r\n", 200, b"onetwo"),
    ],
)
async def test_bodies_end_where_their_framing_says(answer, status, body):
    upstream = Upstream(saying(answer))
    async with routing(upstream) as router:
        connection = await router.connect()
        for _ in range(2):
            await connection.send(post())
            told = await connection.answer(body=status not in (204, 304))
            assert (told.status, told.body) == (status, body)
        assert router.cell(0, MemberCell.ERRORS) == 0
        connection.close()
    assert upstream.connections == 1


async def test_bodies_without_a_length_of_their_own():
    """Of a HEAD request, of one that lasts until its connection ends, and for an old client."""
    upstream = Upstream(saying(OK + b"Content-Length: 500\r\n\r\n"))
    async with routing(upstream) as router:
        connection = await router.connect()
        for _ in range(2):
            await connection.send(b"HEAD /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (await connection.answer(body=False)).headers["content-length"] == "500"
        for first in (b"HTTP/1.0 200 OK\r\n\r\n", OK + b"Connection: close\r\n\r\n"):
            upstream.always = saying(first + b"x" * 1000, then="close")
            assert (await connection.ask(post())).body == b"x" * 1000
        upstream.always = saying(EVENTS + chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n") + b"0\r\n\r\n")
        answer = await connection.ask(b"POST /v1/x HTTP/1.0\r\nContent-Length: 0\r\n\r\n")
        assert (answer.headers["connection"], answer.body) == ("close", b"data: 1\n\ndata: 2\n\n")


@pytest.mark.parametrize(
    ("part", "whole"),
    [
        (b"", 0),
        (b"POST /v1/compl", 0),
        (post(b"body")[:-2], 0),
        (post() + b"POST /v1/compl", 1),
        (post() + post(b"body")[:-2], 1),
        (post() + b"nonsense\r\n\r\n", 1),
        (post(b"1") + post(b"2") + post(b"3"), 3),
    ],
)
async def test_a_client_that_sends_no_more_is_answered_and_then_closed(part, whole):
    """At once, not when its time is over."""

    async def slowly(request, writer):
        await asyncio.sleep(0.02)
        writer.write(ANSWER)

    upstream = Upstream(slowly)
    async with routing(upstream, **OLD) as router:
        connection = await router.connect()
        await connection.send(part)
        connection.writer.write_eof()
        assert [(await connection.answer()).status for _ in range(whole)] == [200] * whole
        await connection.closed()
        connection.close()
        await until(lambda: router.total(ProcessCell.CONNECTIONS) == 0)
        assert router.total(ProcessCell.CLIENT_GONE) == 0
    assert len(upstream.asked) == whole


async def test_without_a_key_or_under_another_name_nothing_reaches_a_replica():
    """As http/test_access.py has it, of a server."""
    upstream = Upstream()
    async with routing(upstream, api_keys=("other", "right"), hosts=("127.0.0.1", "localhost")) as router:
        for path in ("/v1/completions", "/predict", "/v1/%6dodels"):
            for headers in ("", "Authorization: Bearer wrong\r\n", "Authorization: Basic right\r\n"):
                answer = await router.post(path=path, headers=headers)
                assert (answer.status, answer.headers["www-authenticate"][:6]) == (401, "Bearer")
            assert (await router.post(path=path, headers=KEY)).status == 200
        for host, origin, status in (
            (b"LocalHost:8000", "", 200),
            (b"evil.example", "", 403),
            (b"127.0.0.1", "Origin: http://127.0.0.1\r\n", 200),
            (b"127.0.0.1", "Origin: null\r\n", 403),
        ):
            connection = await router.connect()
            answer = await connection.ask(post(headers=KEY + origin).replace(b"Host: 127.0.0.1", b"Host: " + host))
            assert answer.status == status
            assert b"evil" not in host or "--allowed-hosts evil.example " in answer.message
        connection = await router.connect()
        probe = b"GET /v1/models HTTP/1.0\r\nAuthorization: Bearer right\r\n\r\n"
        assert (await connection.ask(probe)).status == 200, "and no browser"
    assert len(upstream.asked) == 6


async def test_other_paths_go_to_the_control_application_and_one_that_is_gone_is_said_to_be(tmp_path):
    asked = []

    async def control(reader, writer):
        asked.append(await read_request(reader))
        writer.write(response(200, b"ok", "Connection: close"))
        writer.close()

    server = await asyncio.start_unix_server(control, tmp_path / "control")
    async with routing(Upstream(), control=str(tmp_path / "control"), api_keys=("right",)) as router:
        headers = "Authorization: Bearer admin\r\nX-Gpuinfer-Control-Key: guess\r\n"
        answer = await router.post(b"body", "/workers", headers)
        assert (answer.status, answer.body, asked[0].body) == (200, b"ok", b"body")
        told = {"authorization": "Bearer admin", "x-gpuinfer-control-key": "the control key", "host": "127.0.0.1"}
        assert {name: asked[0].headers[name] for name in told} == told
        server.close()
        await server.wait_closed()
        (tmp_path / "control").unlink(missing_ok=True)
        answer = await router.post(path="/workers")
        assert answer.status == 502
        assert "control application" in answer.message
        assert (await router.post(headers=KEY)).status == 200


@pytest.mark.thorough
async def test_connections_over_the_limit_are_told_so_and_still_more_are_closed_at_once(caplog):
    async with routing(Upstream(), connections=2) as router:
        first, _, third = [await router.connect() for _ in range(3)]
        await third.send(b"POST /v1/compl")  # what is not read yet resets nobody
        assert ((await third.answer()).status, await third.closed()) == (503, b"")
        assert "more than 2 connections at once" in caplog.text
        third.close()
        first.close()
        await until(lambda: router.total(ProcessCell.CONNECTIONS) == 1)
        assert (await (await router.connect()).ask(post())).status == 200
    async with routing(Upstream(), connections=1, refusals=2, head_s=1e6) as router:
        made = [await router.connect() for _ in range(10)]
        await until(lambda: router.total(ProcessCell.CONNECTIONS) <= 3)
        assert (await made[-1].answer()).status == 503


@pytest.mark.parametrize(
    ("sent", "limits", "said"),
    [
        (b"POST /v1/completions HT", {"head_s": 0.2}, b"408"),
        (post(b"body")[:-2], {"body_s": 0.2}, b"408"),
        (b"", {"head_s": 0.2, "idle_s": 1e6}, b""),
        (post(), {"idle_s": 0.2, "head_s": 1e6}, b"200"),
    ],
)
async def test_slow_clients_are_not_waited_for_and_between_two_requests_for_another_time(sent, limits, said):
    async with routing(Upstream(), **limits) as router:
        other, connection = await router.connect(), await router.connect()
        if "idle_s" in limits and not sent:
            assert (await other.ask(post())).status == 200
        await connection.send(sent)
        assert (await connection.closed())[9:12] == said
        if "idle_s" in limits:
            assert (await other.ask(post())).status == 200


async def test_what_all_requests_keep_has_a_bound_and_a_client_that_is_refused_while_it_sends_hears_why():
    async with routing(Upstream(), bodies_bytes=1 << 20, body_bytes=1 << 20) as router:
        first = await router.connect()
        await first.send(post(b"x" * 900_000)[:-1])
        await until(lambda: router.relay.budget.left < 500_000)
        answer = await router.post(b"x" * 900_000)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        first.close()
        await until(lambda: router.relay.budget.left == 1 << 20)
        assert (await router.post(b"x" * 900_000)).status == 200
        connection = await router.connect()
        sending = asyncio.create_task(connection.send(post(b"x" * (4 << 20))))
        assert (await connection.answer()).status == 413
        await sending


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.INFO, "gpuinfer.requests")
    return lambda: [record.request for record in caplog.records if hasattr(record, "request")]


async def test_an_answer_is_logged_with_who_asked_and_what_it_cost_and_its_client_sees_none_of_it(logged):
    lines = ("X-Gpuinfer-Model: a%20model", "X-Gpuinfer-Used: 5 16")
    refusal = response(400, b'{"error": {"message": "n is too large"}}')
    keys = ("right name=alice tokens=2000",)
    upstream = Upstream(answers=[saying(response(200, b"{}", *lines)), saying(refusal)])
    async with routing(upstream, api_keys=keys) as router:
        trace = f"traceparent: 00-{'1' * 32}-{'2' * 16}-01\r\n"
        answer = await router.post(path="/v1/completions?a=secret", headers=f"{KEY}X-Request-Id: mine\r\n{trace}")
        assert (await router.post(headers=KEY)).status == 400
        assert (await router.post()).status == 401
        assert (await router.post(headers=f"{KEY}Host: twice\r\n")).status == 400
    assert not {"x-gpuinfer-used", "x-gpuinfer-model"} & set(answer.headers)
    told, bad, without, malformed = logged()
    wanted = {"method": "POST", "path": "/v1/completions", "status": 200, "id": "mine", "key": "alice"}
    wanted |= {"model": "a model", "input_tokens": 5, "output_tokens": 16, "replica": 0}
    assert {name: told.get(name) for name in wanted} == wanted
    assert told["trace"].startswith("00-1111")
    assert (bad["status"], bad["refused"]) == (400, "n is too large")
    assert (without["status"], malformed["status"]) == (401, 400)
    assert "no key" in without["refused"]


async def test_a_key_pays_for_a_stream_what_its_end_says_or_what_was_sent(logged):
    keys, used = ("right name=alice tokens=20",), b"0\r\nX-Gpuinfer-Used: 5 30\r\n\r\n"
    upstream = Upstream(saying(EVENTS + chunk(b"id: 0.1\ndata: {}\n\n") + chunk(DONE) + used))
    async with routing(upstream, api_keys=keys) as router:
        assert (await router.post(headers=KEY)).whole
        refused = await router.post(headers=KEY)
        assert (refused.status, int(refused.headers["retry-after"]) > 0) == (429, True)
        assert "'alice' has used its 20 tokens a minute" in refused.message
    first, second = logged()
    assert (first["input_tokens"], first["output_tokens"], second["status"], second["key"]) == (5, 30, 429, "alice")
    assert len(upstream.asked) == 1
    sent = EVENTS + chunk(b"id: 0." + b",".join(b"7" for _ in range(30)) + b"\ndata: {}\n\n")
    async with routing(Upstream(saying(sent)), api_keys=keys) as router:
        connection = await router.connect()
        await connection.send(post(headers=KEY))
        await connection.head()
        await connection.reader.readuntil(b"data: {}")
        reset(connection.writer)
        await until(lambda: len(logged()) == 3)
        assert (await router.post(headers=KEY)).status == 429
    assert (logged()[2]["status"], logged()[2]["output_tokens"]) == (499, 30)


def test_a_session_goes_before_a_user_and_a_user_before_the_prompt():
    def of(body: object, headers: bytes = b"") -> bytes | None:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n" + headers + b"\r\n"
        return affinity_of(RequestHead(head), json.dumps(body).encode())

    body = {"messages": [{"role": "user", "content": "hello"}], "user": "ann"}
    assert of(body, b"X-Gpuinfer-Session: s1\r\n") == b"s1"
    assert of(body) == of({"prompt": "x" * 100_000, "user": "ann"}) == b"ann"
    assert of({"messages": body["messages"]}) not in (None, b"ann")
    begins = "You are a helpful assistant. " * 50
    assert of({"prompt": begins + "one"}) == of({"prompt": begins + "two", "n": 1})
    assert of({"prompt": "one" + begins}) != of({"prompt": "two" + begins})
    assert of({"rows": [1, 2]}) is None
    quoted = {"prompt": 'say "user": "eve"'}
    assert of(quoted) == of(quoted) != b"eve"


async def test_sticky_sends_a_session_to_one_replica_and_load_counts_from_the_moment_of_choice():
    async with routing(*(Upstream() for _ in range(4)), policy="sticky") as router:
        for session in range(8):
            headers = f"X-Gpuinfer-Session: {session}\r\n"
            assert len({(await router.post(headers=headers)).route["replica"] for _ in range(4)}) == 1
    async with routing(*(Upstream(hang) for _ in range(4))) as router:
        tasks = [asyncio.create_task(router.post()) for _ in range(20)]
        await until(lambda: sum(router.cell(slot, MemberCell.IN_FLIGHT) for slot in range(4)) == 20)
        assert [router.cell(slot, MemberCell.IN_FLIGHT) for slot in range(4)] == [5, 5, 5, 5]
        for task in tasks:
            task.cancel()
        await until(lambda: router.relay.active == 0)


async def test_a_replica_that_has_just_come_up_is_given_more_little_by_little():
    old, new = Upstream(), Upstream()
    async with routing(old, new) as router:
        for since, least, most in ((0, 0.0, 0.5), (5, 0.3, 1.0), (11, 1.0, 1.0)):
            router.roster(member(old, 0, since=1.0), member(new, 1, since=time.time() - since))
            warm, cold = (router.relay.members._all[number] for number in (0, 1))
            assert warm.speed == 1.0
            assert least <= cold.speed <= most


async def test_a_replica_with_the_same_id_at_another_place_is_another():
    old, new = Upstream(), Upstream()
    async with routing(old) as router, new.running():
        for _ in range(3):
            await router.post()
        router.roster(member(new, 0))
        assert (await router.post()).status == 200
        assert (len(old.asked), len(new.asked)) == (3, 1)
        await until(lambda: old.open == 0)
        assert router.cell(0, MemberCell.REQUESTS) == 4


async def test_replicas_are_asked_over_few_connections_but_streams_that_stay_open_get_one_each():
    quick, slow = Upstream(), Slow()

    async def stay(request, writer):
        writer.write(EVENTS + chunk(b"data: 1\n\n"))
        await slow.release.wait()

    async with routing(quick) as router:
        connections = [await router.connect() for _ in range(400)]
        for _ in range(3):
            for connection in connections:
                connection.writer.write(post())
            for connection in connections:
                assert (await connection.answer()).status == 200
        assert quick.connections <= 400
        quick.always = stay
        for connection in connections:
            await connection.send(post())
        for connection in connections:
            await connection.head()
            assert await connection.chunk() == b"data: 1\n\n"
        assert quick.open == 400
        for connection in connections:
            connection.close()
        await until(lambda: router.relay.active == 0)


def test_shared_counters_keep_what_a_dead_process_has_counted_in_memory_for_its_owner_alone():
    def open_files() -> dict[int, str]:
        listed = {one: f"/proc/self/fd/{one}" for one in os.listdir("/proc/self/fd")}
        return {int(one): os.readlink(path) for one, path in listed.items() if os.path.lexists(path)}

    before = open_files()
    board = SharedCounters(2)
    new = {number: name for number, name in open_files().items() if number not in before}
    assert new
    assert all(name.startswith("/memfd:gpuinfer-router") for name in new.values())
    assert {stat.S_IMODE(os.fstat(number).st_mode) for number in new} == {0o600}
    for row in range(2):
        board.cells[board.total_at(row, ProcessCell.REQUESTS)] = 5
        board.cells[board.total_at(row, ProcessCell.CONNECTIONS)] = 3
        board.cells[board.member_at(row, 7) + MemberCell.REQUESTS] = 4
        board.cells[board.member_at(row, 7) + MemberCell.IN_FLIGHT] = 2
    board.bury(0)
    assert (board.total(ProcessCell.REQUESTS), board.total(ProcessCell.CONNECTIONS)) == (10, 3)
    assert (board.sum_of(7, MemberCell.REQUESTS), board.sum_of(7, MemberCell.IN_FLIGHT)) == (8, 2)
    board.clear(7)
    assert [board.sum_of(7, cell) for cell in MemberCell] == [0] * len(MemberCell)
    assert board.total(ProcessCell.REQUESTS) == 10
    del board
    assert open_files().keys() == before.keys()

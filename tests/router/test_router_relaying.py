"""What a router passes on, and what it adds, takes away or refuses."""

from __future__ import annotations

import asyncio

import pytest
from run_router import ANSWER, EVENTS, Upstream, chunk, post, routing, saying, until

from gpuinfer.fleet.router.shared_counters import MemberCell, ProcessCell


async def test_an_answer_says_which_replica_gave_it_and_why():
    async with routing(Upstream()) as router:
        answer = await router.post()
    assert (answer.status, answer.body) == (200, b'{"answer": "ok"')
    assert answer.route["replica"] == "0"
    assert answer.route["why"].startswith("least-loaded")
    assert answer.route["attempt"] == "1"
    assert int(answer.route["queued_us"]) >= 0


async def test_a_request_goes_on_with_its_own_lines_and_the_routers():
    upstream = Upstream()
    headers = "X-Custom: \t kept \r\nX-Gpuinfer-Priority: high\r\ntraceparent: 00-1-2-03\r\nX-Request-Id: mine\r\n"
    async with routing(upstream) as router:
        answer = await router.post(b'{"x": 1}', "/v1/chat/completions?a=b", headers)
    asked = upstream.asked[0]
    assert asked.first == "POST /v1/chat/completions?a=b HTTP/1.1"
    assert asked.body == b'{"x": 1}'
    assert asked.headers["host"] == f"127.0.0.1:{upstream.port}"
    assert {
        name: asked.headers[name] for name in ("x-custom", "x-gpuinfer-priority", "traceparent", "x-request-id")
    } == {
        "x-custom": "kept",
        "x-gpuinfer-priority": "high",
        "traceparent": "00-1-2-03",
        "x-request-id": "mine",
    }
    assert int(asked.headers["x-gpuinfer-created"]) > 1_700_000_000
    assert answer.headers["x-request-id"] == "mine"


async def test_a_request_without_an_id_gets_one_that_its_client_hears_too():
    upstream = Upstream()
    async with routing(upstream) as router:
        ids = [(await router.post()).headers["x-request-id"] for _ in range(2)]
    assert ids == [asked.headers["x-request-id"] for asked in upstream.asked]
    assert len(set(ids)) == 2


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("Connection: x-secret\r\nX-Secret: 1", id="a header that Connection lists"),
        pytest.param("Keep-Alive: timeout=5", id="Keep-Alive"),
        pytest.param("TE: trailers", id="TE"),
        pytest.param("Trailer: Expires", id="Trailer"),
        pytest.param("Upgrade: websocket", id="Upgrade"),
        pytest.param("Proxy-Authorization: Basic x", id="Proxy-Authorization"),
        pytest.param("Authorization: Bearer client", id="the client's key"),
        pytest.param("X-Gpuinfer-Begun: 12", id="what only the router may say"),
        pytest.param("x-gpuinfer-created: 5", id="what only the router may say, in lower case"),
        pytest.param("X-Gpuinfer-Control-Key: guess", id="the control key"),
    ],
)
async def test_what_is_for_one_hop_alone_or_not_for_clients_to_say_does_not_go_on(line):
    upstream = Upstream()
    async with routing(upstream) as router:
        assert (await router.post(headers=line + "\r\n")).status == 200
    asked = upstream.asked[0].raw
    for one in line.split("\r\n"):
        assert one.encode() not in asked
    assert upstream.asked[0].headers.get("x-gpuinfer-begun") is None


async def test_headers_of_one_hop_do_not_go_back():
    lines = b"Connection: close, X-Inner\r\nKeep-Alive: timeout=9\r\nX-Inner: 1\r\nX-Outer: 2\r\nUpgrade: h2\r\n"
    upstream = Upstream(saying(ANSWER.replace(b"\r\n\r\n", b"\r\n" + lines + b"\r\n", 1), then="close"))
    async with routing(upstream) as router:
        answer = await router.post()
    assert answer.headers.keys() >= {"x-outer"}
    assert not answer.headers.keys() & {"connection", "keep-alive", "x-inner", "upgrade"}


async def test_a_members_key_goes_to_that_member():
    upstream = Upstream()
    async with routing(upstream) as router:
        from run_router import member

        router.roster(member(upstream, 0, key="for the replica"))
        await router.post(headers="Authorization: Bearer client\r\n")
    assert upstream.asked[0].headers["authorization"] == "Bearer for the replica"


async def test_requests_that_come_at_once_are_answered_in_order():
    upstream = Upstream(saying(b""))

    async def echo(request, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(request.body), request.body))

    upstream.always = echo
    async with routing(upstream) as router:
        connection = await router.connect()
        assert [
            (await connection.ask(b"".join(post(b"%d" % number) for number in range(300)))).body for _ in range(300)
        ] == [b"%d" % number for number in range(300)]


async def test_a_body_in_chunks_goes_on_with_its_length():
    upstream = Upstream()
    async with routing(upstream) as router:
        connection = await router.connect()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        await connection.send(head + chunk(b"he"))
        assert (await connection.ask(chunk(b"llo") + b"0\r\n\r\n" + post(b"next"))).status == 200
        assert (await connection.answer()).status == 200
    assert [asked.body for asked in upstream.asked] == [b"hello", b"next"]
    assert upstream.asked[0].headers["content-length"] == "5"
    assert "transfer-encoding" not in upstream.asked[0].headers


async def test_a_client_that_asks_whether_to_send_its_body_is_told_to():
    upstream = Upstream()
    async with routing(upstream) as router:
        connection = await router.connect()
        head, _, body = post(b"body", headers="Expect: 100-continue\r\n").partition(b"\r\n\r\n")
        await connection.send(head + b"\r\n\r\n")
        assert (await connection.head()).status == 100
        assert (await connection.ask(body)).status == 200
    assert "expect" not in upstream.asked[0].headers


@pytest.mark.parametrize(  # the grammar is that of the server: tests/http/malformed_requests.py has all of it
    ("head", "status"),
    [
        pytest.param(
            b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, id="lengths"
        ),
        pytest.param(b"POST /v1/%2e%2e/admin HTTP/1.1\r\nHost: a\r\n\r\n", 400, id="hidden dots in the path"),
        pytest.param(b"POST /v1/x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 501, id="an unknown coding"),
        pytest.param(
            b"POST /v1/x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nab\r\n0\r\n\r\n",
            400,
            id="a chunk's extension",
        ),
        pytest.param(b"X" * 40_000, 431, id="a head without end"),
    ],
)
async def test_what_two_programs_could_read_in_two_ways_is_refused(head, status):
    upstream = Upstream()
    async with routing(upstream) as router:
        connection = await router.connect()
        answer = await connection.ask(head)
        assert answer.status == status
        assert answer.message
        assert await connection.closed() == b""
    assert upstream.asked == []


@pytest.mark.parametrize("length", [b"65", b"9" * 18])
async def test_a_body_over_the_limit_is_refused_before_it_comes(length):
    async with routing(Upstream(), body_bytes=64) as router:
        connection = await router.connect()
        assert (
            await connection.ask(b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: " + length + b"\r\n\r\n")
        ).status == 413
        assert await connection.closed() == b""


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        pytest.param(b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", id="no content"),
        pytest.param(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 55\r\n\r\n", 304, b"", id="not modified"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, b"", id="empty"),
        pytest.param(
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + ANSWER,
            200,
            b'{"answer": "ok"',
            id="1xx first",
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"one") + b"3\r\ntwo\r\n0\r\nX: y\r\n\r\n",
            200,
            b"onetwo",
            id="chunks and a trailer",
        ),
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
        connection.close()
        assert router.cell(0, MemberCell.ERRORS) == 0
    assert upstream.connections == 1


async def test_a_head_request_has_no_body_however_long_it_would_be():
    upstream = Upstream(saying(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n"))
    async with routing(upstream) as router:
        connection = await router.connect()
        for _ in range(2):
            await connection.send(b"HEAD /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
            answer = await connection.answer(body=False)
            assert answer.headers["content-length"] == "500"


@pytest.mark.parametrize("first", [b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"])
async def test_a_body_that_lasts_until_its_connection_ends_keeps_the_clients_open(first):
    upstream = Upstream(saying(first + b"x" * 1000, then="close"))
    async with routing(upstream) as router:
        connection = await router.connect()
        for _ in range(2):
            assert (await connection.ask(post())).body == b"x" * 1000


async def test_an_old_client_gets_a_body_without_chunks():
    body = chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n") + b"0\r\n\r\n"
    async with routing(Upstream(saying(EVENTS + body))) as router:
        connection = await router.connect()
        answer = await connection.ask(b"POST /v1/x HTTP/1.0\r\nContent-Length: 0\r\n\r\n")
        assert answer.headers["connection"] == "close"
        assert answer.body == b"data: 1\n\ndata: 2\n\n"


async def test_heads_that_differ_in_their_length_alone_are_told_apart():
    upstream = Upstream()
    bodies = [b"x" * size for size in (5, 12, 0, 5, 100, 7)]
    async with routing(upstream, body_bytes=200) as router:
        connection = await router.connect()
        for body in bodies:
            assert (
                await connection.ask(post(body, headers="X-A: 1\r\n").replace(b"\r\n\r\n", b"\r\nX-B: 2\r\n\r\n", 1))
            ).status == 200
        assert (
            await connection.ask(post(headers="X-A: 1\r\n").replace(b": 2\r\n\r\n", b": 2, 2\r\nX-B: 2\r\n\r\n", 1))
        ).status == 400
    assert [asked.body for asked in upstream.asked] == bodies
    assert [asked.headers["content-length"] for asked in upstream.asked] == ["5", "12", "0", "5", "100", "7"]


async def test_much_that_comes_before_it_is_asked_for_is_held_back_and_answered_in_order():
    async def echo(request, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n%b" % request.body[:3])

    upstream = Upstream(echo)
    async with routing(upstream) as router:
        connection = await router.connect()
        bodies = [b"%03d" % number + b"x" * (number % 7 * 9000) for number in range(200)]
        sending = asyncio.create_task(connection.send(b"".join(map(post, bodies))))
        assert [(await connection.answer()).body for _ in bodies] == [body[:3] for body in bodies]
        await sending
        connection.close()
        await until(lambda: router.relay.budget.left == router.relay.config.bodies_bytes)


async def test_requests_of_a_client_that_has_said_all_are_all_answered():
    async def slowly(request, writer):
        await asyncio.sleep(0.02)
        writer.write(ANSWER)

    upstream = Upstream(slowly)
    async with routing(upstream) as router:
        connection = await router.connect()
        await connection.send(post(b"1") + post(b"2") + post(b"3"))
        connection.writer.write_eof()
        assert [(await connection.answer()).status for _ in range(3)] == [200] * 3
        assert await connection.closed() == b""
        connection.close()
        assert [asked.body for asked in upstream.asked] == [b"1", b"2", b"3"]
        await until(lambda: router.total(ProcessCell.CONNECTIONS) == 0)
        assert router.total(ProcessCell.CLIENT_GONE) == 0


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"POST /v1/compl", id="half a head"),
        pytest.param(post(b"body")[:-2], id="half a body"),
        pytest.param(post() + b"POST /v1/compl", id="a request, and half a head"),
        pytest.param(post() + post(b"body")[:-2], id="a request, and half a body"),
        pytest.param(post() + b"nonsense\r\n\r\n", id="a request, and nonsense"),
    ],
)
async def test_whoever_has_said_all_and_too_little_is_closed(part):
    """At once, not when its time is over."""
    async with routing(Upstream(), head_s=1e6, body_s=1e6, idle_s=1e6) as router:
        connection = await router.connect()
        await connection.send(part)
        connection.writer.write_eof()
        said = await connection.closed()
        connection.close()
        assert said.startswith(b"HTTP/1.1 200 OK\r\n" if part.startswith(post()) else b"")
        await until(lambda: router.total(ProcessCell.CONNECTIONS) == 0)

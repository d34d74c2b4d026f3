"""Who is let in: keys, names, limits; and the way to the control application."""

from __future__ import annotations

import asyncio

import pytest
from run_router import Connection, Upstream, post, read_request, routing, until

from gpuinfer.fleet.router.shared_counters import ProcessCell

OPEN = "Authorization: Bearer right\r\n"


@pytest.mark.parametrize("headers", ["", "Authorization: Bearer wrong\r\n", "Authorization: Basic right\r\n"])
@pytest.mark.parametrize("path", ["/v1/completions", "/predict", "/v1/%6dodels"])
async def test_without_a_key_nothing_reaches_a_replica(path, headers):
    upstream = Upstream()
    async with routing(upstream, api_keys=("other", "right")) as router:
        answer = await router.post(path=path, headers=headers)
        assert answer.status == 401
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert (await router.post(path=path, headers=OPEN)).status == 200
    assert len(upstream.asked) == 1


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param("", 200, id="its own name"),
        pytest.param("Origin: http://127.0.0.1\r\n", 200, id="its own page"),
        pytest.param("Origin: http://evil.example\r\n", 403, id="another's page"),
        pytest.param("Origin: null\r\n", 403, id="a page from nowhere"),
    ],
)
async def test_on_loopback_only_its_own_names_and_pages_are_let_in(headers, status):
    async with routing(Upstream(), hosts=("127.0.0.1", "localhost")) as router:
        assert (await router.post(headers=headers)).status == status


async def test_a_name_that_was_bound_to_this_address_is_not_let_in():
    async with routing(Upstream(), hosts=("127.0.0.1", "localhost")) as router:
        connection = await router.connect()
        answer = await connection.ask(post().replace(b"Host: 127.0.0.1", b"Host: evil.example"))
        assert answer.status == 403
        assert "--allowed-hosts evil.example " in answer.message
        connection.close()
        connection = await router.connect()
        assert (await connection.ask(b"GET /v1/models HTTP/1.0\r\n\r\n")).status == 200, "a probe, and no browser"
        connection.close()
        connection = await router.connect()
        assert (await connection.ask(post().replace(b"Host: 127.0.0.1", b"Host: LocalHost:8000"))).status == 200


async def test_other_paths_go_to_the_control_application(tmp_path):
    asked = []

    async def control(reader, writer):
        asked.append(await read_request(reader))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
        writer.close()

    server = await asyncio.start_unix_server(control, tmp_path / "control")
    async with routing(control=str(tmp_path / "control"), api_keys=("right",)) as router:
        headers = "Authorization: Bearer admin\r\nX-Gpuinfer-Control-Key: guess\r\n"
        answer = await router.post(b"body", "/workers", headers)
        assert (answer.status, answer.body) == (200, b"ok")
    server.close()
    assert asked[0].headers["authorization"] == "Bearer admin"
    assert asked[0].headers["x-gpuinfer-control-key"] == "the control key"
    assert asked[0].headers["host"] == "127.0.0.1"
    assert asked[0].body == b"body"


async def test_a_control_application_that_is_gone_is_said_so():
    async with routing(Upstream()) as router:
        answer = await router.post(path="/workers")
        assert answer.status == 502
        assert "control application" in answer.message
        assert (await router.post()).status == 200


async def test_connections_over_the_limit_are_told_so(caplog):
    async with routing(Upstream(), connections=2) as router:
        first, _, third = [await router.connect() for _ in range(3)]
        await third.send(b"POST /v1/compl")  # what is not read yet resets nobody
        assert (await third.answer()).status == 503
        assert await third.closed() == b""
        assert "more than 2 connections at once" in caplog.text
        third.close()
        first.close()
        await until(lambda: router.total(ProcessCell.CONNECTIONS) == 1)
        fourth = await router.connect()
        assert (await fourth.ask(post())).status == 200


async def test_connections_far_over_the_limit_are_closed_at_once():
    async with routing(Upstream(), connections=1, refusals=2, head_s=1e6) as router:
        made = [await router.connect() for _ in range(10)]
        await until(lambda: router.total(ProcessCell.CONNECTIONS) <= 3)
        assert (await made[-1].answer()).status == 503


async def slowly(connection: Connection) -> None:
    await connection.send(b"POST /v1/completions HT")


async def slow_body(connection: Connection) -> None:
    await connection.send(post(b"body")[:-2])


@pytest.mark.parametrize(
    ("begin", "limit", "said"),
    [
        pytest.param(slowly, "head_s", b"408", id="a head that does not come"),
        pytest.param(slow_body, "body_s", b"408", id="a body that does not come"),
        pytest.param(None, "head_s", b"", id="nothing"),
    ],
)
async def test_slow_clients_are_not_waited_for(begin, limit, said):
    upstream = Upstream()
    async with routing(upstream, **{limit: 0.2}) as router:
        connection = await router.connect()
        if begin is not None:
            await begin(connection)
        assert (await connection.closed())[9:12] == said
    assert upstream.asked == []


async def test_a_client_between_two_requests_is_waited_for_longer_than_one_that_has_sent_none():
    async with routing(Upstream(), head_s=0.2, idle_s=1e6) as router:
        fresh, used = [await router.connect() for _ in range(2)]
        assert (await used.ask(post())).status == 200
        assert await fresh.closed() == b""
        assert (await used.ask(post())).status == 200
    async with routing(Upstream(), idle_s=0.2, head_s=1e6) as router:
        used = await router.connect()
        assert (await used.ask(post())).status == 200
        assert await used.closed() == b""


async def test_what_all_requests_keep_has_a_bound():
    async with routing(Upstream(), bodies_bytes=1 << 20, body_bytes=1 << 20) as router:
        first = await router.connect()
        await first.send(post(b"x" * 900_000)[:-1])
        await until(lambda: router.relay.budget.left < 500_000)
        answer = await router.post(b"x" * 900_000)
        assert answer.status == 503
        assert answer.headers["retry-after"] == "1"
        first.close()
        await until(lambda: router.relay.budget.left == 1 << 20)
        assert (await router.post(b"x" * 900_000)).status == 200


async def test_a_client_that_is_refused_while_it_sends_hears_why():
    async with routing(Upstream(), body_bytes=1 << 20) as router:
        connection = await router.connect()
        sending = asyncio.create_task(connection.send(post(b"x" * (4 << 20))))
        assert (await connection.answer()).status == 413
        await sending

"""What a router logs of each request, and what keys pay: by what replicas say of their answers."""

from __future__ import annotations

import logging

import pytest
from run_router import DONE, EVENTS, Connection, Upstream, chunk, post, reset, routing, saying, until

KEY = "Authorization: Bearer right\r\n"
LINES = ("right name=alice tokens=20",)
TRAILER = b"0\r\nX-Gpuinfer-Used: 5 30\r\n\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\nX-Gpuinfer-Model: a%20model\r\nX-Gpuinfer-Used: 5 16\r\nContent-Length: 2\r\n\r\n{}"


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.INFO, "gpuinfer.requests")
    return lambda: [record.request for record in caplog.records if hasattr(record, "request")]


async def test_an_answer_is_logged_with_who_asked_who_answered_and_what_it_cost_and_its_client_sees_none_of_it(logged):
    upstream = Upstream(saying(WHOLE))
    async with routing(upstream, api_keys=LINES) as router:
        trace = f"traceparent: 00-{'1' * 32}-{'2' * 16}-01\r\n"
        answer = await router.post(path="/v1/completions?a=secret", headers=f"{KEY}X-Request-Id: mine\r\n{trace}")
    assert answer.status == 200
    assert not {"x-gpuinfer-used", "x-gpuinfer-model"} & set(answer.headers)
    (told,) = logged()
    wanted = {"method": "POST", "path": "/v1/completions", "status": 200, "id": "mine", "key": "alice"}
    wanted |= {"model": "a model", "input_tokens": 5, "output_tokens": 16, "replica": 0}
    assert {name: told.get(name) for name in wanted} == wanted
    assert told["trace"].startswith("00-1111")


@pytest.mark.parametrize(
    ("request_line", "headers", "status", "why"),
    [
        pytest.param("/v1/completions", "", 401, "no key", id="no key"),
        pytest.param("/v1/completions", f"{KEY}Host: twice\r\n", 400, "", id="no request"),
    ],
)
async def test_what_the_router_refuses_is_logged_with_why(logged, request_line, headers, status, why):
    async with routing(Upstream(), api_keys=LINES) as router:
        assert (await router.post(path=request_line, headers=headers)).status == status
    (told,) = logged()
    assert told["status"] == status
    assert why in told["refused"]


async def test_what_a_replica_refuses_is_logged_with_its_words(logged):
    body = b'{"error": {"message": "n is too large"}}'
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with routing(Upstream(saying(head + body))) as router:
        assert (await router.post()).status == 400
    (told,) = logged()
    assert (told["status"], told["refused"]) == (400, "n is too large")


async def test_a_stream_says_at_its_end_what_it_cost_and_the_key_pays(logged):
    upstream = Upstream(saying(EVENTS + chunk(b"id: 0.1\ndata: {}\n\n") + chunk(DONE) + TRAILER))
    async with routing(upstream, api_keys=LINES) as router:
        assert (await router.post(headers=KEY)).whole
        refused = await router.post(headers=KEY)
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) > 0
        assert "'alice' has used its 20 tokens a minute" in refused.message
    first, second = logged()
    assert (first["input_tokens"], first["output_tokens"]) == (5, 30)
    assert (second["status"], second["key"]) == (429, "alice")
    assert len(upstream.asked) == 1


async def test_who_breaks_a_stream_off_pays_for_what_was_sent(logged):
    sent = EVENTS + chunk(b"id: 0." + b",".join(b"7" for _ in range(30)) + b"\ndata: {}\n\n")
    async with routing(Upstream(saying(sent)), api_keys=LINES) as router:
        connection: Connection = await router.connect()
        await connection.send(post(headers=KEY))
        await connection.head()
        await connection.reader.readuntil(b"data: {}")
        reset(connection.writer)
        await until(logged)
        assert (await router.post(headers=KEY)).status == 429
    assert (logged()[0]["status"], logged()[0]["output_tokens"]) == (499, 30)

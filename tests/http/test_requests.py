"""Requests as clients send them: what is fine is answered, what is malformed is refused however it arrives."""

from __future__ import annotations

import json
import logging

import pytest
from counts import SOAK
from malformed_requests import CASES, LONG, chunked, get, post
from serving_http import Raw, Served, answers, said_to, serving

from gpuinfer.fleet.router.http_message import RequestHead
from gpuinfer.http.http_exchange import Exchange
from gpuinfer.http.parser import HttpLimits, Malformed, check_target
from gpuinfer.http.server import HttpServer

CLOSE = b"Connection: close"
SMUGGLED = get(target=b"/smuggled")
LIMITS = HttpLimits(body_bytes=1 << 20)
CHUNKS = b"Transfer-Encoding: Chunked"
FINE = [
    (get(CLOSE), b"nothing"),
    (get(CLOSE, target=b"/echo?a=b"), b"nothing"),
    (get(b"cOnNeCtIoN:close"), b"nothing"),
    (get(b"Connection:\t  close \t"), b"nothing"),
    (get(b"Connection: x, Close"), b"nothing"),
    (get(CLOSE, b"A:", b"B: \xe4"), b"nothing"),
    (get(CLOSE, b"A: b", b"A: c"), b"nothing"),
    (b"GET /echo HTTP/1.0\r\n\r\n", b"nothing"),
    (b"GET /echo HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", b"nothing"),
    (post(CLOSE, b"Content-Length: 5", body=b"hello"), b"hello"),
    (post(CLOSE, b"Content-Length: 0005", body=b"hello"), b"hello"),
    (post(CLOSE, b"Content-Length: 0"), b"nothing"),
    (post(CLOSE), b"nothing"),
    (post(CLOSE, CHUNKS, body=b"5\r\nhello\r\n00006\r\n world\r\n0\r\n\r\n"), b"hello world"),
    (post(CLOSE, CHUNKS, body=b"0\r\n\r\n"), b"nothing"),
    (post(CLOSE, CHUNKS, body=b"00a\r\n0123456789\r\n000\r\n\r\n"), b"0123456789"),
]


async def test_what_is_fine_is_answered_in_whatever_pieces_it_comes():
    async with serving() as served:
        for raw, body in FINE:
            for pieces in ([raw], [raw[at : at + 1] for at in range(len(raw))]):
                (answer,) = await said_to(served.port, *pieces)
                assert (answer.status, answer.body, answer.headers["connection"]) == (200, body, "close"), raw
                assert answer.headers["content-type"] == "text/plain"
                assert answer.headers["date"].endswith(" GMT")


def cuts(raw: bytes) -> list[tuple[bytes, ...]]:
    """Ways in which it may arrive: in two pieces, cut at some places (`make soak`: each), byte by byte."""
    if len(raw) > LONG:
        return [(raw[:at], raw[at:]) for at in (100, len(raw) // 2, len(raw) - 1)]
    bytewise = tuple(raw[at : at + 1] for at in range(len(raw)))
    return [(raw,), bytewise, *[(raw[:at], raw[at:]) for at in range(1, len(raw), 1 if SOAK else 9)]]


async def refusal(served: Served, *pieces: bytes) -> int:
    """The status of the one answer, in OpenAI's shape, which says that the connection closes."""
    (answer,) = await said_to(served.port, *pieces)
    assert (answer.headers["connection"], answer.error["type"]) == ("close", "invalid_request_error")
    return answer.status


@pytest.mark.property
@pytest.mark.parametrize("part", range(4))
async def test_what_is_malformed_is_refused_however_it_is_cut_and_nothing_after_it_is_heard(part):
    async with serving(LIMITS) as served:
        for status, raw in CASES[part::4]:
            for pieces in ((raw + SMUGGLED,), *cuts(raw)):
                assert await refusal(served, *pieces) == status, pieces
        for raw in (  # bodies that two parsers would end at two places
            post(b"Content-Length: 0", b"Content-Length: 60", body=SMUGGLED),
            post(b"Content-Length: 60", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n" + SMUGGLED),
            chunked(b"0;\n60\r\n" + SMUGGLED + b"\r\n0\r\n\r\n"),
        ):
            assert await refusal(served, raw) == 400
        assert served.seen.requests == []
        assert served.server.counts["body_bytes"] == 0


def test_a_head_is_refused_by_itself_as_a_relay_sees_it():
    for status, raw in CASES:
        head = raw[: raw.find(b"\r\n\r\n") + 4] if b"\r\n\r\n" in raw else raw + b"\r\n\r\n"
        if status in (400, 501, 505) and head != chunked(b""):  # chunks are read by another
            with pytest.raises(Malformed) as refused:
                RequestHead(head)
            assert refused.value.status == status


async def test_good_requests_before_a_bad_one_are_answered_and_a_refusal_arrives_while_a_body_is_sent():
    async with serving(LIMITS) as served:
        for pieces in ([get() + b"BAD\r\n\r\n"], [get(), b"BAD\r\n\r\n"]):
            assert [one.status for one in await said_to(served.port, *pieces)] == [200, 400]
        assert await refusal(served, post(b"Content-Length: 99999999", body=b"x" * 500_000)) == 413


def test_a_path_is_decoded_once():
    decoded = {b"/": "/", b"/v1/models/": "/v1/models/", b"/a%20b": "/a b", b"/%C3%A4": "/ä", b"/a%252Fb": "/a%2Fb"}
    for target, path in {**decoded, b"/a.b/..c": "/a.b/..c", b"/a?b=/../c%00": "/a"}.items():
        assert check_target(target) == path


@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_requests_sent_at_once_are_answered_in_order(size):
    """Some on the spot, some by tasks; cut anyhow."""
    raw = b"".join(
        get(target=b"/health")
        + post(b"Content-Length: 2", body=b"%02d" % number)
        + chunked(b"2\r\n%02d\r\n0\r\n\r\n" % (number + 30))
        for number in range(30)
    ) + get(CLOSE)
    async with serving() as served:
        found = [
            one.body for one in await said_to(served.port, *[raw[at : at + size] for at in range(0, len(raw), size)])
        ]
        wanted = [body for number in range(30) for body in (b"{}", b"%02d" % number, b"%02d" % (number + 30))]
        assert found == [*wanted, b"nothing"]
        assert served.server.counts["accepted"] == 1
        many = await said_to(served.port, get(target=b"/health") * 2000 + get(CLOSE))
        assert [one.body for one in many] == [b"{}"] * 2000 + [b"nothing"]


async def test_a_request_waits_for_the_response_before_it():
    async with serving() as served:
        raw = await Raw.connect(served.port)
        await raw.send(get(target=b"/wait"), get(CLOSE))
        assert (served.seen.begun, served.seen.requests) == (1, [])
        served.seen.release.set()
        assert [one.body for one in answers(await raw.rest())] == [b"at last", b"nothing"]


async def test_a_body_that_is_waited_for_is_asked_for_and_one_that_is_refused_is_not():
    async with serving() as served:
        raw = await Raw.connect(served.port)
        await raw.send(post(CLOSE, b"Content-Length: 5", b"Expect: 100-Continue"))
        assert await raw.receive() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await raw.send(b"hello")
        assert answers(await raw.rest())[0].body == b"hello"
        raw = await Raw.connect(served.port)
        await raw.send(post(b"Content-Length: 999999999", b"Expect: 100-continue"))
        assert (await raw.rest()).startswith(b"HTTP/1.1 413 ")


async def test_a_head_has_no_body_and_a_stream_comes_in_chunks_and_for_old_clients_until_the_end():
    async with serving() as served:
        served.seen.release.set()
        for path in (b"/echo", b"/health", b"/events", b"/nowhere"):
            raw = await Raw.connect(served.port)
            await raw.send(b"HEAD " + path + b" HTTP/1.1\r\nHost: a\r\n\r\n" + get(CLOSE))
            first, second = answers(await raw.rest(), ["HEAD"])
            assert (first.status, second.body) == (404 if path == b"/nowhere" else 200, b"nothing")
            assert path != b"/echo" or first.headers["content-length"] == "7"
        (new,) = await said_to(served.port, get(CLOSE, target=b"/events"))
        (old,) = await said_to(served.port, b"GET /events HTTP/1.0\r\n\r\n")
        assert new.body == old.body == b"data: 1\n\ndata: 2\n\n"
        assert (new.headers["transfer-encoding"], "transfer-encoding" in old.headers) == ("chunked", False)


async def test_queries_and_parameters_reach_the_handler():
    async with serving() as served:
        client = served.client()
        asked = await client.request("GET", "/ask?a=1&b=x%20y+z&a=2&c=&%C3%A4=%00")
        assert json.loads(asked.body) == {"a": "2", "b": "x y z", "c": "", "ä": "\0"}
        for query in ("&".join(["a=b"] * 200), "a=%ff"):
            assert (await client.request("GET", f"/ask?{query}")).status == 400


async def test_a_handler_that_fails_is_500_and_says_nothing_of_the_inside(caplog):
    async with serving() as served:
        client = served.client()
        for path, message in (("/fail", "its log says how"), ("/forget", "no answer"), ("/neglect", "failed")) * 2:
            answer = await client.request("GET", path)
            error = json.loads(answer.body)["error"]
            assert (answer.status, error["type"]) == (500, "server_error")
            assert message in error["message"]
            assert "secret" not in error["message"]
            assert path in caplog.text
        assert served.server.counts["accepted"] == 1
        raw = await Raw.connect(served.port)
        await raw.send(get(target=b"/fail-late"))
        said = await raw.rest()
        assert b"so far" in said
        assert not said.endswith(b"0\r\n\r\n"), "half a response does not look whole"
    assert "a secret of the inside" in caplog.text


@pytest.mark.parametrize("behind_router", [True, False])
async def test_what_a_router_has_sent_is_logged_by_the_router_alone(caplog, behind_router):
    async def handle(exchange: Exchange) -> None:
        exchange.respond(200, b"{}")

    server = HttpServer(handle, behind_router=behind_router)
    port = await server.listen("127.0.0.1", 0)
    try:
        with caplog.at_level(logging.INFO, "gpuinfer.requests"):
            for headers in (b"X-Gpuinfer-Created: 1\r\n", b""):
                await said_to(port, b"GET /asked HTTP/1.1\r\nHost: a\r\nConnection: close\r\n" + headers + b"\r\n")
    finally:
        await server.close()
    assert len([one for one in caplog.records if one.name == "gpuinfer.requests"]) == (1 if behind_router else 2)

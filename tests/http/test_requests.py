"""Requests that are fine, in all the forms that clients send."""

from __future__ import annotations

import json

import pytest
from malformed_requests import chunked, get, post
from serving_http import Raw, answers, said_to, serving

CLOSE = b"Connection: close"


@pytest.mark.parametrize(
    ("raw", "body"),
    [
        pytest.param(get(CLOSE), b"nothing", id="GET"),
        pytest.param(get(CLOSE, target=b"/echo?a=b"), b"nothing", id="with a query"),
        pytest.param(get(b"cOnNeCtIoN:close"), b"nothing", id="names in any case, no space"),
        pytest.param(get(b"Connection:\t  close \t"), b"nothing", id="white space around a value"),
        pytest.param(get(b"Connection: x, Close"), b"nothing", id="close in a list"),
        pytest.param(get(CLOSE, b"A:", b"B: \xe4"), b"nothing", id="empty and Latin-1 values"),
        pytest.param(get(CLOSE, b"A: b", b"A: c"), b"nothing", id="a header twice"),
        pytest.param(b"GET /echo HTTP/1.0\r\n\r\n", b"nothing", id="HTTP/1.0 without Host"),
        pytest.param(b"GET /echo HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", b"nothing", id="HTTP/1.0 is not kept"),
        pytest.param(post(CLOSE, b"Content-Length: 5", body=b"hello"), b"hello", id="a length"),
        pytest.param(post(CLOSE, b"Content-Length: 0005", body=b"hello"), b"hello", id="zeros before a length"),
        pytest.param(post(CLOSE, b"Content-Length: 0"), b"nothing", id="a length of nothing"),
        pytest.param(post(CLOSE), b"nothing", id="no length"),
        pytest.param(
            post(CLOSE, b"Transfer-Encoding: Chunked", body=b"5\r\nhello\r\n00006\r\n world\r\n0\r\n\r\n"),
            b"hello world",
            id="chunks",
        ),
        pytest.param(post(CLOSE, b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"), b"nothing", id="no chunks"),
        pytest.param(
            post(CLOSE, b"Transfer-Encoding: chunked", body=b"00a\r\n0123456789\r\n000\r\n\r\n"),
            b"0123456789",
            id="00a",
        ),
    ],
)
async def test_it_is_answered(raw, body):
    async with serving() as served:
        for pieces in ([raw], [raw[at : at + 1] for at in range(len(raw))]):
            (answer,) = answers(await said_to(served.port, pieces))
            assert (answer.status, answer.body) == (200, body)
            assert answer.headers["connection"] == "close"
            assert answer.headers["content-type"] == "text/plain"
            assert answer.headers["date"].endswith(" GMT")


@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_requests_sent_at_once_are_answered_in_order(size):
    """Some on the spot, some by tasks; cut anyhow."""
    numbers = range(30)
    raw = b"".join(
        [
            get(target=b"/health")
            + post(b"Content-Length: 2", body=b"%02d" % number)
            + chunked(b"2\r\n%02d\r\n0\r\n\r\n" % (number + 30))
            for number in numbers
        ]
    ) + get(CLOSE)
    async with serving() as served:
        pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
        found = [one.body for one in answers(await said_to(served.port, pieces))]
        wanted = [body for number in numbers for body in (b"{}", b"%02d" % number, b"%02d" % (number + 30))]
        assert found == [*wanted, b"nothing"]
        assert served.server.counts["accepted"] == 1


async def test_many_requests_on_the_spot_leave_others_their_turn():
    async with serving() as served:
        raw = await Raw.connect(served.port)
        await raw.send(get(target=b"/health") * 2000 + get(CLOSE))
        found = answers(await raw.rest())
        assert [one.body for one in found] == [b"{}"] * 2000 + [b"nothing"]


async def test_a_request_waits_for_the_response_before_it():
    async with serving() as served:
        raw = await Raw.connect(served.port)
        await raw.send(get(target=b"/wait"), get(CLOSE))
        assert served.seen.begun == 1
        assert served.seen.requests == []
        served.seen.release.set()
        assert [one.body for one in answers(await raw.rest())] == [b"at last", b"nothing"]


async def test_a_body_that_is_waited_for_is_asked_for():
    async with serving() as served:
        raw = await Raw.connect(served.port)
        await raw.send(post(CLOSE, b"Content-Length: 5", b"Expect: 100-Continue"))
        assert await raw.receive() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await raw.send(b"hello")
        assert answers(await raw.rest())[0].body == b"hello"

        said = await said_to(served.port, [post(b"Content-Length: 999999999", b"Expect: 100-continue")])
        assert answers(said)[0].status == 413
        assert b"100 Continue" not in said


@pytest.mark.parametrize("path", [b"/echo", b"/health", b"/events", b"/nowhere"])
async def test_a_head_has_no_body(path):
    async with serving() as served:
        served.seen.release.set()
        said = await said_to(served.port, [b"HEAD " + path + b" HTTP/1.1\r\nHost: a\r\n\r\n" + get(CLOSE)])
        first, second = answers(said, ["HEAD"])
        assert first.status == (404 if path == b"/nowhere" else 200)
        assert second.body == b"nothing"
        if path == b"/echo":
            assert first.headers["content-length"] == "7"


async def test_a_stream_comes_in_chunks_and_for_old_clients_until_the_end():
    async with serving() as served:
        served.seen.release.set()
        (new,) = answers(await said_to(served.port, [get(CLOSE, target=b"/events")]))
        old_said = await said_to(served.port, [b"GET /events HTTP/1.0\r\n\r\n"])
        (old,) = answers(old_said)
        assert new.body == old.body == b"data: 1\n\ndata: 2\n\n"
        assert new.headers["transfer-encoding"] == "chunked"
        assert b"ransfer" not in old_said


async def test_queries_and_parameters_reach_the_handler():
    async with serving() as served:
        client = served.client()
        asked = await client.request("GET", "/ask?a=1&b=x%20y+z&a=2&c=&%C3%A4=%00")
        assert json.loads(asked.body) == {"a": "2", "b": "x y z", "c": "", "ä": "\0"}
        assert (await client.request("GET", "/ask?" + "&".join(["a=b"] * 200))).status == 400
        assert (await client.request("GET", "/ask?a=%ff")).status == 400


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/fail", "the server failed at this request; its log says how. Try another."),
        ("/forget", "no answer"),
        ("/neglect", "failed"),
    ],
)
async def test_a_handler_that_fails_is_500_and_says_nothing_of_the_inside(path, message, caplog):
    async with serving() as served:
        client = served.client()
        for _ in range(2):
            answer = await client.request("GET", path)
            assert answer.status == 500
            error = json.loads(answer.body)["error"]
            assert error["type"] == "server_error"
            assert message in error["message"]
            assert b"secret" not in answer.body
        assert served.server.counts["accepted"] == 1
    assert path in caplog.text


async def test_a_response_that_fails_half_way_does_not_look_whole(caplog):
    async with serving() as served:
        said = await said_to(served.port, [get(target=b"/fail-late")])
        assert b"so far" in said
        assert not said.endswith(b"0\r\n\r\n")
    assert "a secret of the inside" in caplog.text

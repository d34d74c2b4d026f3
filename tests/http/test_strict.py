"""What is malformed is refused: the right status, OpenAI's shape, however it arrives, and nothing after it is heard."""

from __future__ import annotations

import pytest
from counts import SOAK
from malformed_requests import CASES, LONG, chunked, get, post
from serving_http import Served, answers, said_to, serving

from gpuinfer.fleet.router.http_message import RequestHead
from gpuinfer.http.parser import HttpLimits, Malformed, check_target

SMUGGLED = get(target=b"/smuggled")
LIMITS = HttpLimits(body_bytes=1 << 20)


def cuts(raw: bytes) -> list[tuple[bytes, ...]]:
    """Ways in which it may arrive: whole, in two pieces, cut at some places (`make soak`: each), byte by byte."""
    if len(raw) > LONG:
        middle = len(raw) // 2
        return [(raw,), (raw[:100], raw[100:]), (raw[:middle], raw[middle:]), (raw[:-1], raw[-1:])]
    bytewise = tuple(raw[at : at + 1] for at in range(len(raw)))
    return [(raw,), bytewise, *[(raw[:at], raw[at:]) for at in range(1, len(raw), 1 if SOAK else 9)]]


async def outcome(served: Served, pieces: tuple[bytes, ...]) -> tuple[int, str, str]:
    """Status and error of the one answer, which says that the connection closes."""
    (answer,) = answers(await said_to(served.port, pieces))
    assert answer.headers["connection"] == "close"
    return answer.status, answer.error["type"], answer.error["message"]


@pytest.mark.property
@pytest.mark.parametrize("name", CASES)
async def test_it_is_refused_however_it_is_cut(name):
    status, raw = CASES[name]
    async with serving(LIMITS) as served:
        whole = await outcome(served, (raw + SMUGGLED,))
        assert whole[0] == status
        assert whole[1] == "invalid_request_error"
        for pieces in cuts(raw):
            assert (await outcome(served, pieces))[0] == status, pieces
        assert served.seen.requests == []
        assert served.server.counts["body_bytes"] == 0


async def test_what_follows_a_refused_body_is_never_heard():
    """A body that two parsers would end at two places."""
    async with serving(LIMITS) as served:
        for raw in (
            post(b"Content-Length: 0", b"Content-Length: 60", body=SMUGGLED),
            post(b"Content-Length: 60", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n" + SMUGGLED),
            chunked(b"0;\n60\r\n" + SMUGGLED + b"\r\n0\r\n\r\n"),
        ):
            assert len(answers(await said_to(served.port, [raw]))) == 1
        assert served.seen.requests == []


async def test_a_good_request_before_a_bad_one_is_answered():
    async with serving() as served:
        for pieces in ([get() + b"BAD\r\n\r\n"], [get(), b"BAD\r\n\r\n"]):
            assert [one.status for one in answers(await said_to(served.port, pieces))] == [200, 400]


async def test_requests_sent_at_once_may_go_on_while_a_bad_one_is_answered():
    """A client that sends a large body with a bad head still reads why it was refused."""
    async with serving(LIMITS) as served:
        said = await said_to(served.port, [post(b"Content-Length: 99999999", body=b"x" * 500_000)])
        assert answers(said)[0].status == 413
        assert await served.client().request("GET", "/health")


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/", "/"),
        (b"/v1/models", "/v1/models"),
        (b"/v1/models/", "/v1/models/"),
        (b"/a%20b", "/a b"),
        (b"/%C3%A4", "/ä"),
        (b"/a%252Fb", "/a%2Fb"),
        (b"/a.b/..c", "/a.b/..c"),
        (b"/a?b=/../c%00", "/a"),
    ],
)
def test_a_path_is_decoded_once(target, path):
    assert check_target(target) == path


@pytest.mark.parametrize("name", [name for name, (status, raw) in CASES.items() if status in (400, 501, 505)])
def test_a_head_is_refused_by_itself(name):
    """As a relay sees it, without the body; what is wrong with the body is another's business."""
    status, raw = CASES[name]
    head = raw[: raw.find(b"\r\n\r\n") + 4] if b"\r\n\r\n" in raw else raw + b"\r\n\r\n"
    if head == chunked(b""):
        RequestHead(head)
        return
    with pytest.raises(Malformed) as refused:
        RequestHead(head)
    assert refused.value.status == status

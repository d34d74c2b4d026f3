"""However a stream of requests is cut, the same requests are seen, and the same fault found."""

from __future__ import annotations

import random

import pytest
from damage import damaged
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.http import parser
from gpuinfer.http.parser import HttpLimits, Malformed, RequestParser

LIMITS = HttpLimits(head_bytes=2000, line_bytes=500, headers=8, body_bytes=5000)

TOKEN = st.text("abcXYZ019-_!~", min_size=1, max_size=12).map(lambda text: "x" + text)
VALUE = st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=30).map(lambda text: text.strip())
BODY = st.binary(max_size=300)


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, tuple[object, ...]]:
    """The bytes of a request, and what is to be seen of it."""
    method = draw(st.sampled_from(sorted(parser.METHODS)))
    path = "/" + draw(st.text("abc.-~123", max_size=10)).strip(".")
    headers = {"host": "a:1", **draw(st.dictionaries(TOKEN.map(str.lower), VALUE, max_size=4))}
    body = draw(BODY)
    if draw(st.booleans()):
        headers["transfer-encoding"] = "chunked"
        sent = b""
        left = body
        while left:
            size = draw(st.integers(1, len(left)))
            sent += b"%x\r\n%b\r\n" % (size, left[:size])
            left = left[size:]
        sent += b"0\r\n\r\n"
    else:
        headers["content-length"] = str(len(body))
        sent = body
    spaces = st.sampled_from(["", " ", "\t "])
    lines = "".join([f"{name}:{draw(spaces)}{value}\r\n" for name, value in headers.items()])
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + sent, (method, path, headers, body)


def seen(pieces: list[bytes]) -> tuple[list[tuple[object, ...]], int]:
    """The requests in the pieces, and the status of the fault at their end; 0: none."""
    incoming, found, head = RequestParser(LIMITS), [], None
    try:
        for piece in pieces:
            incoming.add(piece)
            while incoming.buffer:
                if head is None:
                    head = incoming.head()
                    if head is None:
                        break
                    incoming.expect(head)
                    if (head.length or 0) > LIMITS.body_bytes:
                        raise Malformed(413, "")
                body = incoming.body()
                if body is None:
                    break
                path = parser.check_target(head.target)
                found.append((head.method, path, dict(head.headers), body))
                head = None
    except Malformed as fault:
        return found, fault.status
    return found, 0


def cut(raw: bytes, places: list[int]) -> list[bytes]:
    ends = [*sorted({place % (len(raw) + 1) for place in places}), len(raw)]
    return [raw[start:end] for start, end in zip([0, *ends], ends, strict=False)]


PLACES = st.lists(st.integers(0, 10_000), max_size=20)


@given(st.lists(requests(), min_size=1, max_size=4), PLACES)
def test_the_same_requests_are_seen(sent, places):
    raw = b"".join([one for one, _ in sent])
    wanted = [one for _, one in sent]
    assert seen(cut(raw, places)) == (wanted, 0)
    assert seen([raw[at : at + 1] for at in range(len(raw))]) == (wanted, 0)


@given(st.integers(0, 1 << 32), PLACES)
def test_the_same_fault_is_found(seed, places):
    raw = damaged(random.Random(seed))
    whole = seen([raw])
    assert seen(cut(raw, places)) == whole
    assert seen([raw[at : at + 1] for at in range(len(raw))]) == whole


@pytest.mark.parametrize("size", [499, 500, 501])
@pytest.mark.parametrize("end", [b"", b" HTTP/1.1\r\nHost: a\r\n\r\n", b"\0"])
def test_the_same_fault_is_found_at_the_limit_of_a_line(size, end):
    raw = b"GET /" + b"a" * (size - 5 - len(end.partition(b"\r")[0])) + end
    assert seen([raw]) == seen([raw[at : at + 1] for at in range(len(raw))])


@pytest.mark.parametrize("size", range(1990, 2010))
def test_the_same_fault_is_found_at_the_limit_of_a_head(size):
    raw = b"GET / HTTP/1.1\r\nHost: a\r\n" + b"".join([b"A%d: %b\r\n" % (number, b"b" * 400) for number in range(4)])
    raw += b"B: " + b"b" * (size - len(raw) - 7) + b"\r\n\r\n"
    assert len(raw) == size
    whole = seen([raw])
    assert seen([raw[at : at + 1] for at in range(len(raw))]) == whole
    assert whole[1] == (431 if size > 2000 else 0)

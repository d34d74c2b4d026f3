"""Requests that are refused, with the status of the refusal, and requests that are damaged at random."""

from __future__ import annotations

import random

HOST = b"Host: 127.0.0.1\r\n"


def get(*headers: bytes, target: bytes = b"/echo") -> bytes:
    return b"GET " + target + b" HTTP/1.1\r\n" + HOST + b"".join(line + b"\r\n" for line in headers) + b"\r\n"


def post(*headers: bytes, body: bytes = b"") -> bytes:
    return b"POST /echo HTTP/1.1\r\n" + HOST + b"".join(line + b"\r\n" for line in headers) + b"\r\n" + body


def chunked(body: bytes) -> bytes:
    return post(b"Transfer-Encoding: chunked", body=body)


LENGTHS = (b"5, 5", b"+5", b"-5", b"1 0", b"0x5", b"1_0", b"\xb2", b"", b'"5"')
CODINGS = (b"gzip", b"gzip, chunked", b"chunked, identity", b"chunked, chunked", b"identity", b'"chunked"', b"")
CHUNKS = (
    b"5;a=b\r\nhello\r\n0\r\n\r\n", b"5\r\nhello\r\n0;a\r\n\r\n", b"5 \r\nhello\r\n0\r\n\r\n",
    b"0x5\r\nhello\r\n0\r\n\r\n", b"+5\r\nhello\r\n0\r\n\r\n", b"\r\nhello\r\n0\r\n\r\n", b"xyz\r\nhello\r\n0\r\n\r\n",
    b"FFFFFFFFFFFFFFFFF\r\nhello\r\n0\r\n\r\n", b"5\nhello\r\n0\r\n\r\n", b"3\r\nhello\r\n0\r\n\r\n",
    b"5\r\nhello\n0\r\n\r\n", b"5\r\nhello\r\n0\r\nX: y\r\n\r\n",
)  # fmt: skip
FIELDS = (
    b"A: b\nC: d", b"A: b\rC: d", b"A: b\r", b"A: b\r\n c", b"A: b\r\n\tc", b"A : b", b"Transfer-Encoding\t: chunked",
    b"A b: c", b": b", b"nothing", b"(A): b", b"\xc3\x84: b", b"A: b\0c", b"A\0: b", b"A: b\x07c", b"A: b\x7f",
    b"A: \x1b[31m", b"Host: 127.0.0.1", b"Authorization: Bearer a\r\nAuthorization: Bearer b",
)  # fmt: skip
TARGETS = (
    b"/echo\0", b"http://127.0.0.1/echo", b"127.0.0.1:80", b"/\xc3\xa4", b"/echo#a", b"/echo?a=b#c", b"/echo\\..",
    b"/echo%00", b"/workers%2f3", b"/workers%5C3", b"/echo%0d%0aA:b", b"/echo/../workers", b"/echo/%2e%2E/workers",
    b"/echo/.%2e/workers", b"/./echo", b"/echo/..", b"//echo", b"/workers//3", b"/echo%", b"/echo%zz", b"/%ff",
    b"/%c0%af",
)  # fmt: skip
LINES = {
    400: (
        b"GET HTTP/1.1", b"GET  /echo HTTP/1.1", b"GET /echo HTTP/1.1 ", b"GET\t/echo HTTP/1.1",
        b"GET /ec ho HTTP/1.1", b"G\0ET /echo HTTP/1.1", b"GET /echo\r HTTP/1.1", b"(GET) /echo HTTP/1.1",
        b"OPTIONS * HTTP/1.1", b"GET /echo http/1.1", b"GET /echo HTTP/1.10", b"GET /echo ICY/1.1",
    ),
    501: (b"get /echo HTTP/1.1", b"BREW /echo HTTP/1.1", b"TRACE /echo HTTP/1.1", b"CONNECT 127.0.0.1:80 HTTP/1.1"),
    505: (b"PRI * HTTP/2.0", b"GET /echo HTTP/1.2", b"GET /echo HTTP/0.9", b"GET /echo HTTP/3"),
}  # fmt: skip
HOSTS = (b"Host: a/b", b"Host: a@b", b"Host: a, b", b"Host: a:80:81")
CASES: list[tuple[int, bytes]] = [
    (400, post(b"Content-Length: 5", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n")),
    (400, post(b"Transfer-Encoding: chunked", b"Content-Length: 5", body=b"0\r\n\r\n")),
    (400, post(b"Content-Length: 5", b"Content-Length: 6", body=b"hello!")),
    (400, post(b"Content-Length: 5", b"Content-Length: 5", body=b"hello")),
    *[(400, post(b"Content-Length: " + one, body=b"hello")) for one in LENGTHS],
    (413, post(b"Content-Length: 99999999999")),
    (413, post(b"Content-Length: " + b"9" * 30)),
    *[(501, post(b"Transfer-Encoding: " + one)) for one in CODINGS],
    (400, post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked")),
    (400, post(b"Transfer-Encoding: \x0bchunked")),
    (400, b"POST /echo HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    *[(400, chunked(one)) for one in CHUNKS],
    (413, chunked(b"FFFFFFF\r\nhello\r\n0\r\n\r\n")),
    (400, b"GET /echo HTTP/1.1\nHost: 127.0.0.1\n\n"),
    (400, b"GET /echo HTTP/1.1\nHost: 127.0.0.1\r\n\r\n"),
    (400, b"GET /echo HTTP/1.1\r\nHost: 127.0.0.1\r\n\n"),
    (400, b"GET /echo HTTP/1.1\r\n Host: 127.0.0.1\r\n\r\n"),
    *[(400, get(one)) for one in FIELDS],
    (400, b"\r\n" + get()),
    (400, b"\r\n\r\n"),
    (400, b"GET /echo\r\n\r\n"),
    *[(status, line + b"\r\n" + HOST + b"\r\n") for status, lines in LINES.items() for line in lines],
    (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),  # TLS
    (400, b"GET /echo HTTP/1.1\r\n\r\n"),
    *[(400, b"GET /echo HTTP/1.1\r\n" + one + b"\r\n\r\n") for one in HOSTS],
    *[(400, get(target=one)) for one in TARGETS],
    (414, get(target=b"/" + b"a" * 20_000)),
    (431, get(b"A: " + b"b" * 20_000)),
    (431, get(b"A" * 20_000 + b": b")),
    (431, get(*[b"A%d: " % number + b"b" * 5000 for number in range(10)])),
    (431, get(*[b"A%d: b" % number for number in range(101)])),
    (417, post(b"Content-Length: 5", b"Expect: miracles")),
]
"""A status, and everything that a client sends."""
LONG = 400  # bytes: all but the last piece of longer cases are of one kind, and these are cut at a few places

GOOD = [
    get(),
    get(target=b"/health"),
    get(target=b"/ask?a=b&c=%20d"),
    get(target=b"/workers/3"),
    get(target=b"/events"),
    b"GET /echo HTTP/1.0\r\n\r\n",
    b"HEAD /echo HTTP/1.1\r\nHost: a\r\n\r\n",
    post(b"Content-Length: 11", body=b"hello world"),
    post(b"Content-Length: 11", b"Expect: 100-continue", body=b"hello world"),
    chunked(b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"),
    post(b"Content-Length: 3", body=b"abc") + get() + chunked(b"1\r\na\r\n0\r\n\r\n") + get(target=b"/health"),
]
SEEDS = GOOD * 10 + [raw for _, raw in CASES if len(raw) < LONG]
TOKENS = [
    b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b";", b",", b"%", b"%00", b"%2f", b"..", b"/", b"//", b"?", b"#",
    b"\xff", b"\r\n\r\n", b"0\r\n\r\n", b"Content-Length: 5\r\n", b"Content-Length: -1\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip\r\n", b"Host: b\r\n", b"Connection: close\r\n",
    b"Expect: 100-continue\r\n", b"HTTP/1.1", b"HTTP/2.0", b"GET ", b"POST ", b"99999999999999999999", b"ffffffff",
    b"\xc3\xa4", b"A: b\r\n",
]  # fmt: skip


def damaged(dice: random.Random) -> bytes:
    """A seed with a few changes."""
    raw = bytearray(dice.choice(SEEDS))
    for _ in range(dice.choice((1, 1, 1, 2, 3, 8))):
        at, to = sorted((dice.randrange(len(raw) + 1), dice.randrange(len(raw) + 1)))
        match dice.randrange(8):
            case 0 if raw:
                raw[dice.randrange(len(raw))] ^= 1 << dice.randrange(8)
            case 1 if raw:
                raw[dice.randrange(len(raw))] = dice.randrange(256)
            case 2 | 3:
                raw[at:at] = dice.choice(TOKENS)
            case 4:
                del raw[at : min(to, at + 12)]
            case 5:
                raw[at:at] = raw[at:to]
            case 6:
                other = dice.choice(SEEDS)
                raw[at:] = other[dice.randrange(len(other)) :]
            case _:
                raw[at:to] = dice.choice(TOKENS)
        del raw[4000:]
    return bytes(raw)

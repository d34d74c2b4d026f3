"""Requests damaged at random."""

from __future__ import annotations

import random

from malformed_requests import CASES, LONG, chunked, get, post

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
SEEDS = GOOD * 10 + [raw for _, raw in CASES.values() if len(raw) < LONG]
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

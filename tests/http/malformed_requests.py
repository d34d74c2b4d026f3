"""Requests that are refused, and with which status. Each is everything that a client sends."""

from __future__ import annotations

HOST = b"Host: 127.0.0.1\r\n"


def get(*headers: bytes, target: bytes = b"/echo") -> bytes:
    return b"GET " + target + b" HTTP/1.1\r\n" + HOST + b"".join(line + b"\r\n" for line in headers) + b"\r\n"


def post(*headers: bytes, body: bytes = b"") -> bytes:
    return b"POST /echo HTTP/1.1\r\n" + HOST + b"".join(line + b"\r\n" for line in headers) + b"\r\n" + body


def chunked(body: bytes) -> bytes:
    return post(b"Transfer-Encoding: chunked", body=body)


CASES: dict[str, tuple[int, bytes]] = {
    # Two opinions on where a body ends
    "length and chunks": (400, post(b"Content-Length: 5", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n")),
    "chunks and length": (400, post(b"Transfer-Encoding: chunked", b"Content-Length: 5", body=b"0\r\n\r\n")),
    "two lengths": (400, post(b"Content-Length: 5", b"Content-Length: 6", body=b"hello!")),
    "the same length twice": (400, post(b"Content-Length: 5", b"Content-Length: 5", body=b"hello")),
    "a list of lengths": (400, post(b"Content-Length: 5, 5", body=b"hello")),
    "a length with a plus": (400, post(b"Content-Length: +5", body=b"hello")),
    "a length with a minus": (400, post(b"Content-Length: -5", body=b"hello")),
    "a length with a space inside": (400, post(b"Content-Length: 1 0", body=b"hello")),
    "a hexadecimal length": (400, post(b"Content-Length: 0x5", body=b"hello")),
    "a length with an underscore": (400, post(b"Content-Length: 1_0", body=b"hello")),
    "a length of other digits": (400, post("Content-Length: ²".encode("latin-1"), body=b"hello")),
    "an empty length": (400, post(b"Content-Length:", body=b"hello")),
    "a length in quotes": (400, post(b'Content-Length: "5"', body=b"hello")),
    "a length beyond the limit": (413, post(b"Content-Length: 99999999999")),
    "a length of thirty digits": (413, post(b"Content-Length: " + b"9" * 30)),
    "another coding": (501, post(b"Transfer-Encoding: gzip")),
    "two codings": (501, post(b"Transfer-Encoding: gzip, chunked")),
    "chunked in the middle": (501, post(b"Transfer-Encoding: chunked, identity")),
    "chunked twice": (501, post(b"Transfer-Encoding: chunked, chunked")),
    "two lines of codings": (400, post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked")),
    "the coding identity": (501, post(b"Transfer-Encoding: identity")),
    "a coding in quotes": (501, post(b'Transfer-Encoding: "chunked"')),
    "a coding behind a vertical tab": (400, post(b"Transfer-Encoding: \x0bchunked")),
    "an empty coding": (501, post(b"Transfer-Encoding:")),
    "chunks in HTTP/1.0": (400, b"POST /echo HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    # Chunks
    "a chunk extension": (400, chunked(b"5;a=b\r\nhello\r\n0\r\n\r\n")),
    "an extension of the last chunk": (400, chunked(b"5\r\nhello\r\n0;a\r\n\r\n")),
    "a space after the size": (400, chunked(b"5 \r\nhello\r\n0\r\n\r\n")),
    "a size with 0x": (400, chunked(b"0x5\r\nhello\r\n0\r\n\r\n")),
    "a size with a sign": (400, chunked(b"+5\r\nhello\r\n0\r\n\r\n")),
    "no size": (400, chunked(b"\r\nhello\r\n0\r\n\r\n")),
    "a size of words": (400, chunked(b"xyz\r\nhello\r\n0\r\n\r\n")),
    "a size that overflows": (400, chunked(b"FFFFFFFFFFFFFFFFF\r\nhello\r\n0\r\n\r\n")),
    "a size beyond the limit": (413, chunked(b"FFFFFFF\r\nhello\r\n0\r\n\r\n")),
    "a size line that ends in LF": (400, chunked(b"5\nhello\r\n0\r\n\r\n")),
    "a chunk that is longer than it says": (400, chunked(b"3\r\nhello\r\n0\r\n\r\n")),
    "a chunk that ends in LF": (400, chunked(b"5\r\nhello\n0\r\n\r\n")),
    "a trailer": (400, chunked(b"5\r\nhello\r\n0\r\nX: y\r\n\r\n")),
    # Lines
    "bare LF throughout": (400, b"GET /echo HTTP/1.1\nHost: 127.0.0.1\n\n"),
    "a bare LF after the request line": (400, b"GET /echo HTTP/1.1\nHost: 127.0.0.1\r\n\r\n"),
    "a bare LF between headers": (400, get(b"A: b\nC: d")),
    "a bare LF as the empty line": (400, b"GET /echo HTTP/1.1\r\nHost: 127.0.0.1\r\n\n"),
    "a bare CR in a value": (400, get(b"A: b\rC: d")),
    "a bare CR in the request line": (400, b"GET /echo\r HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
    "CR CR LF": (400, get(b"A: b\r")),
    "a folded line": (400, get(b"A: b", b" c")),
    "a folded line with a tab": (400, get(b"A: b", b"\tc")),
    "a first header that is folded": (400, b"GET /echo HTTP/1.1\r\n Host: 127.0.0.1\r\n\r\n"),
    "a space before the colon": (400, get(b"A : b")),
    "a tab before the colon": (400, get(b"Transfer-Encoding\t: chunked")),
    "a name with a space": (400, get(b"A b: c")),
    "no name": (400, get(b": b")),
    "no colon": (400, get(b"nothing")),
    "a name in brackets": (400, get(b"(A): b")),
    "a name that is not ASCII": (400, get("Ä: b".encode())),
    "a NUL in a value": (400, get(b"A: b\0c")),
    "a NUL in a name": (400, get(b"A\0: b")),
    "a NUL in the target": (400, get(target=b"/echo\0")),
    "a NUL in the method": (400, b"G\0ET /echo HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
    "a control character in a value": (400, get(b"A: b\x07c")),
    "a delete in a value": (400, get(b"A: b\x7f")),
    "an escape in a value": (400, get(b"A: \x1b[31m")),
    "an empty line first": (400, b"\r\n" + get()),
    "nothing but an empty line": (400, b"\r\n\r\n"),
    # The request line
    "no version": (400, b"GET /echo\r\n\r\n"),
    "no target": (400, b"GET HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
    "two spaces": (400, b"GET  /echo HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
    "a space at the end": (400, b"GET /echo HTTP/1.1 \r\nHost: 127.0.0.1\r\n\r\n"),
    "a tab for a space": (400, b"GET\t/echo HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
    "a space in the target": (400, b"GET /ec ho HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
    "a small method": (501, b"get /echo HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
    "an unknown method": (501, b"BREW /echo HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
    "TRACE": (501, b"TRACE /echo HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
    "CONNECT": (501, b"CONNECT 127.0.0.1:80 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
    "a method in brackets": (400, b"(GET) /echo HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
    "an absolute target": (400, get(target=b"http://127.0.0.1/echo")),
    "an authority": (400, get(target=b"127.0.0.1:80")),
    "an asterisk": (400, b"OPTIONS * HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
    "a target that is not ASCII": (400, get(target="/ä".encode())),
    "a fragment": (400, get(target=b"/echo#a")),
    "a fragment after the query": (400, get(target=b"/echo?a=b#c")),
    "a backslash": (400, get(target=b"/echo\\..")),
    "HTTP/2": (505, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "HTTP/1.2": (505, b"GET /echo HTTP/1.2\r\nHost: 127.0.0.1\r\n\r\n"),
    "HTTP/0.9": (505, b"GET /echo HTTP/0.9\r\nHost: 127.0.0.1\r\n\r\n"),
    "HTTP/3": (505, b"GET /echo HTTP/3\r\nHost: 127.0.0.1\r\n\r\n"),
    "a version in small letters": (400, b"GET /echo http/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
    "a version of two digits": (400, b"GET /echo HTTP/1.10\r\nHost: 127.0.0.1\r\n\r\n"),
    "another protocol": (400, b"GET /echo ICY/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
    "TLS": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    # Whose server it is
    "no Host": (400, b"GET /echo HTTP/1.1\r\n\r\n"),
    "two Hosts": (400, get(b"Host: 127.0.0.1")),
    "a Host with a path": (400, b"GET /echo HTTP/1.1\r\nHost: a/b\r\n\r\n"),
    "a Host with a user": (400, b"GET /echo HTTP/1.1\r\nHost: a@b\r\n\r\n"),
    "a list of Hosts": (400, b"GET /echo HTTP/1.1\r\nHost: a, b\r\n\r\n"),
    "a Host with two ports": (400, b"GET /echo HTTP/1.1\r\nHost: a:80:81\r\n\r\n"),
    "two keys": (400, get(b"Authorization: Bearer a", b"Authorization: Bearer b")),
    # Paths that are not what they seem
    "an encoded NUL": (400, get(target=b"/echo%00")),
    "an encoded slash": (400, get(target=b"/workers%2f3")),
    "an encoded backslash": (400, get(target=b"/workers%5C3")),
    "an encoded line end": (400, get(target=b"/echo%0d%0aA:b")),
    "a segment of two dots": (400, get(target=b"/echo/../workers")),
    "two encoded dots": (400, get(target=b"/echo/%2e%2E/workers")),
    "a dot and an encoded one": (400, get(target=b"/echo/.%2e/workers")),
    "a segment of one dot": (400, get(target=b"/./echo")),
    "dots at the end": (400, get(target=b"/echo/..")),
    "two slashes": (400, get(target=b"//echo")),
    "two slashes inside": (400, get(target=b"/workers//3")),
    "a percent sign alone": (400, get(target=b"/echo%")),
    "a percent sign before a letter": (400, get(target=b"/echo%zz")),
    "a path that is not UTF-8": (400, get(target=b"/%ff")),
    "UTF-8 that is too long": (400, get(target=b"/%c0%af")),
    # Sizes
    "a long target": (414, get(target=b"/" + b"a" * 20_000)),
    "a long header": (431, get(b"A: " + b"b" * 20_000)),
    "a long name": (431, get(b"A" * 20_000 + b": b")),
    "a long head": (431, get(*[b"A%d: " % number + b"b" * 5000 for number in range(10)])),
    "many headers": (431, get(*[b"A%d: b" % number for number in range(101)])),
    # What is not known
    "an unknown expectation": (417, post(b"Content-Length: 5", b"Expect: miracles")),
}

# All but the last piece of the long ones are of one kind: these are cut at a few places.
LONG = 400

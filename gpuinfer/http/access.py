"""Who may use a route: API keys, Host and Origin, and quotas of requests and tokens a minute by key.

Keys are kept as SHA-256 only; their file is read again when it changes. A quota is a token bucket (J. Turner, "New
directions in communications", 1986) that begins with a minute's worth and fills at the rate of the limit; what an
answer cost is known at its end, and the balance may fall below zero.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import os
import re
import shlex
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from gpuinfer.errors import UsageError
from gpuinfer.host.files import read_regular
from gpuinfer.http.network import file_version

log = logging.getLogger(__name__)

FILE_BYTES = 1 << 20
REREAD_S = 1.0  # how often it is looked whether a file has changed
KEY, COUNT = re.compile(r"[!-~]+"), re.compile(r"[1-9][0-9]{0,11}")
COUNTS = "a whole number from 1 to 999,999,999,999"
FIELDS = {  # of a line of a key file, behind the key
    "name": (re.compile(r"[A-Za-z0-9._@-]{1,64}"), "1 to 64 letters, digits and . _ @ -"),
    "requests": (COUNT, COUNTS),
    "tokens": (COUNT, COUNTS),
}
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
EXPOSED = ", ".join(
    [
        *("X-Request-Id", "Retry-After", "X-Gpuinfer-Route"),
        *(f"X-RateLimit-{what}-{kind}" for what in ("Limit", "Remaining", "Reset") for kind in ("Requests", "Tokens")),
    ]
)
HEADER_NAMES = re.compile(r"[A-Za-z0-9-]{1,64}(?:, ?[A-Za-z0-9-]{1,64}){0,63}")
NAME = re.compile(r"[a-z0-9._-]{1,100}|\[[0-9a-f:.]{2,45}\]")  # a host's, as it may be repeated in an error


@dataclass(frozen=True, slots=True)
class RequestRefusal:
    """Why a request is refused: status and message, headers of the answer, `kind` and `code` of OpenAI's error.

    `kind` None: as the status says.
    """

    status: int
    message: str
    headers: Sequence[tuple[str, str]] = ()
    kind: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Key:
    """One that is let in, without the key itself. `requests` and `tokens` a minute; None: as many as there are."""

    digest: bytes
    name: str
    requests: float | None = None
    tokens: float | None = None

    def limits(self) -> list[tuple[str, float]]:
        """Those that it has."""
        both = (("requests", self.requests), ("tokens", self.tokens))
        return [(kind, limit) for kind, limit in both if limit is not None]


class Keys:
    """Keys that are let in. Only their SHA-256 is kept."""

    def __init__(self, lines: Iterable[str], path: Path | None = None) -> None:
        """`lines` as `read_lines` has them."""
        self.path = path
        self._version = file_version(path)
        self.replace(lines)

    @classmethod
    def read(cls, path: str | Path) -> Keys:
        """Of a file. Raises UsageError."""
        return cls(read_key_lines(path), Path(path))

    def replace(self, lines: Iterable[str]) -> None:
        """These are let in from now on, and no others."""
        self._keys = tuple(_key(line) for line in lines)

    def find(self, authorization: str | None) -> Key | None:
        """Whose an Authorization header, `Bearer KEY`, is; the time tells nothing of the keys."""
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for one in self._keys:
            if hmac.compare_digest(one.digest, digest):
                found = one
        return found if scheme.lower() == "bearer" else None

    def allow(self, authorization: str | None) -> bool:
        """Whether it is one of the keys."""
        return self.find(authorization) is not None

    def reload(self) -> list[str] | None:
        """Read the file again if it was written or touched since the last look; its lines if it has other keys.

        Raises UsageError, once, for a file that is wrong: the keys stay as they were.
        """
        version = file_version(self.path)
        if self.path is None or version == self._version:
            return None
        self._version = version
        lines = read_key_lines(self.path)
        before = self._keys
        self.replace(lines)
        if self._keys == before:
            return None
        return lines


def read_keys(path: str | Path) -> list[str]:
    """The keys of a file, for whoever asks with one. Raises UsageError."""
    return [line.partition(" ")[0] for line in read_key_lines(path)]


def read_key_lines(path: str | Path) -> list[str]:
    """Of a file of keys, one a line: `KEY`, or `KEY name=alice requests=60 tokens=100000`, each with a name.

    Empty lines and those that begin with # are skipped. Raises UsageError.
    """
    path = Path(path)
    try:
        text, info = read_regular(path, FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"cannot read the key file {path} ({error.strerror}). Put a regular file there, with one key a line."
        ) from None
    others = stat.S_IRWXG | stat.S_IRWXO
    if info.st_uid == 0 != os.geteuid():  # handed to a service by systemd or Kubernetes, whose group it is
        others &= ~stat.S_IRGRP
    if info.st_mode & others:
        raise UsageError(f"the key file {path} can be read by others. Run: chmod 600 {shlex.quote(str(path))}")
    if len(text) > FILE_BYTES:
        raise UsageError(f"the key file {path} has more than {FILE_BYTES:,} bytes. Write one key a line.")
    found: list[str] = []
    limits: dict[str, Key] = {}
    for number, raw in enumerate(text.split(b"\n"), 1):
        line = raw.decode("latin-1").strip()
        if not line or line.startswith("#"):
            continue
        if wrong := _wrong(line):
            raise UsageError(
                f"line {number} of the key file {path}: {wrong}. Write KEY, in ASCII without spaces, or "
                "KEY name=alice requests=60 tokens=100000, with what it may ask in a minute."
            )
        if not _key(line).name:
            line += f" name=line-{number}"
        key = _key(line)
        before = limits.setdefault(key.name, key)
        if before.limits() != key.limits():
            raise UsageError(f"line {number} of the key file {path} gives '{key.name}' other limits. Give the same.")
        found.append(line)
    if not found:
        raise UsageError(
            f"the key file {path} has no key. Write one a line: openssl rand -hex 32 > {shlex.quote(str(path))}"
        )
    return found


def _wrong(line: str) -> str | None:
    """What is wrong with it, without a word that may be part of a key."""
    key, *words = line.split()
    if not KEY.fullmatch(key):
        return "a key has letters, digits and signs of ASCII alone"
    fields = [word.partition("=") for word in words]
    for field, equals, value in fields:
        if field not in FIELDS or not equals:
            shown = equals and re.fullmatch(r"[a-z_]{1,16}", field)
            said = f"'{field}' is no field of a key" if shown else "what stands behind the key is no field"
            return f"{said}; there are {', '.join(FIELDS)}"
        pattern, takes = FIELDS[field]
        if not pattern.fullmatch(value):
            return f"'{field}' takes {takes}"
    given = [field for field, _, _ in fields]
    return next((f"'{field}' is there twice" for field in FIELDS if given.count(field) > 1), None)


def _key(line: str) -> Key:
    key, *words = line.split()
    told = dict(word.split("=", 1) for word in words)
    requests, tokens = (float(told[kind]) if kind in told else None for kind in ("requests", "tokens"))
    return Key(hashlib.sha256(key.encode("ascii")).digest(), told.get("name", ""), requests, tokens)


class ReloadableFile(Protocol):
    """A file that is read again while the server runs. `reload` is called beside the event loop."""

    @property
    def path(self) -> Path | None: ...

    def reload(self) -> list[str] | None: ...


async def reload_changed_files(
    files: Sequence[ReloadableFile], changed: Callable[[ReloadableFile, list[str]], None] | None = None
) -> None:
    """Read files again that change, until this is cancelled; of one that is wrong what was read before holds."""
    while True:
        await asyncio.sleep(REREAD_S)
        for one in files:
            try:
                lines = await asyncio.to_thread(one.reload)
            except UsageError as error:
                log.error("%s What was read before holds.", error)
                continue
            if lines is not None:
                log.warning("%s has changed, and was read again.", one.path)
                if changed is not None:
                    changed(one, lines)


@dataclass
class Access:
    """Which keys open which routes, and which names this server is called by.

    `hosts`: names, with or without a port, that Host may have; None: any. A server on loopback takes only `LOOPBACK`,
    so that no page in a browser reaches it under a name of its own (DNS rebinding). `origins`: whose pages may ask
    beside the server's own, `https://a.example`; with `*` all.
    """

    api: Keys | None = None
    admin: Keys | None = None
    hosts: frozenset[str] | None = None
    origins: frozenset[str] = frozenset()

    def check_host(self, headers: Mapping[str, str]) -> RequestRefusal | None:
        """Why a request is refused by its Host or Origin, if so."""
        if self.hosts is None:
            return None
        host = headers.get("host", "").lower()  # which browsers always send
        if "host" in headers and host not in self.hosts and host_name(host) not in self.hosts:
            name = host_name(host)
            cure = f"--allowed-hosts {name}" if NAME.fullmatch(name) else "--allowed-hosts NAME"
            return RequestRefusal(
                403,
                "this server is not called by the name in Host. Ask it by its own, such as localhost, or start it with "
                f"{cure} (behind a proxy: by the name that clients use).",
            )
        origin = headers.get("origin")
        if origin is None or self.origins & {"*", origin.lower()}:
            return None
        if origin.lower() in (f"http://{host}", f"https://{host}"):
            return None
        return RequestRefusal(
            403,
            "a page of another origin than this server's asks. Start the server with --allowed-origins and that "
            "origin; if it is the server's own, have the proxy in front pass Host on as it came, and name it with "
            "--allowed-hosts.",
        )

    def check_key(self, level: Literal["api", "admin"], authorization: str | None) -> Key | RequestRefusal | None:
        """The key in an Authorization header, or why the request is refused; None where no key is needed."""
        if level == "admin" and self.admin is None:
            return RequestRefusal(
                403, "this needs an admin key, and the server has none. Start it with --admin-key-file."
            )
        if level == "api" and self.api is None:
            return None
        for keys in (self.admin,) if level == "admin" else (self.api, self.admin):
            if keys is not None and (key := keys.find(authorization)) is not None:
                return key
        which = "admin key" if level == "admin" else "API key"
        return RequestRefusal(
            401,
            f"{'a wrong key' if authorization else 'no key'}. Send the {which}: Authorization: Bearer KEY.",
            [("WWW-Authenticate", 'Bearer realm="gpuinfer"')],
            code="invalid_api_key",
        )

    @property
    def files(self) -> list[Keys]:
        """Key files that may change."""
        return [keys for keys in (self.api, self.admin) if keys is not None and keys.path is not None]


def cors(origins: frozenset[str], origin: str | None) -> list[tuple[str, str]]:
    """What lets a page of this origin read an answer (Fetch, "CORS protocol"); nothing where it may not."""
    if origin is None or not origins & {"*", origin.lower()}:
        return []
    allowed = "*" if "*" in origins else origin
    return [("Access-Control-Allow-Origin", allowed), ("Access-Control-Expose-Headers", EXPOSED), ("Vary", "Origin")]


def preflight_headers(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """What a browser asks for before it sends a request of another origin's page that it lets read answers."""
    told = [("Access-Control-Allow-Methods", "GET, POST, DELETE"), ("Access-Control-Max-Age", "600")]
    asked = headers.get("access-control-request-headers", "")
    if HEADER_NAMES.fullmatch(asked):
        told.append(("Access-Control-Allow-Headers", asked))
    if "access-control-request-private-network" in headers:
        told.append(("Access-Control-Allow-Private-Network", "true"))
    return told


def host_name(host: str) -> str:
    """A Host header's value without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


MINUTE_S = 60.0


@dataclass(slots=True)
class _Bucket:
    level: float
    at: float


class Quotas:
    """The quotas of all keys. Processes with the same clients exchange what was spent (`take_news`, `add_news`)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, str], _Bucket] = {}
        self._spent: Counter[tuple[str, str]] = Counter()  # here, since the last news
        self._elsewhere: Counter[tuple[str, str]] = Counter()  # and elsewhere, of what no bucket knows yet

    def take(self, key: Key) -> RequestRefusal | None:
        """Take one request's worth; why not, where the quota is used up."""
        for kind, limit in key.limits():
            bucket = self._bucket(key.name, kind, limit)
            needed = 1.0 if kind == "requests" else 1e-9
            if bucket.level < needed:
                wait_s = math.ceil((needed - bucket.level) * MINUTE_S / limit)
                message = f"the key '{key.name}' has used its {limit:g} {kind} a minute. Ask again in {wait_s} s."
                return RequestRefusal(429, message, [("Retry-After", str(wait_s))], kind, "rate_limit_exceeded")
        if key.requests is not None:
            self._pay(key.name, "requests", key.requests, 1)
        return None

    def spend(self, key: Key, tokens: int) -> None:
        """An answer is over that cost so much."""
        if key.tokens is not None and tokens:
            self._pay(key.name, "tokens", key.tokens, tokens)

    def take_news(self) -> list[tuple[str, str, int]]:
        """Names, kinds and amounts spent here since the last call."""
        news = [(name, kind, amount) for (name, kind), amount in self._spent.items()]
        self._spent.clear()
        return news

    def add_news(self, news: Iterable[tuple[str, str, int]]) -> None:
        """What was spent in another process."""
        for name, kind, amount in news:
            self._elsewhere[name, kind] += amount

    def headers(self, key: Key) -> list[tuple[str, str]]:
        """What is left, as OpenAI tells it."""
        told = []
        for kind, limit in key.limits():
            bucket = self._bucket(key.name, kind, limit)
            full_s = (limit - bucket.level) * MINUTE_S / limit
            told += [
                (f"x-ratelimit-limit-{kind}", f"{limit:g}"),
                (f"x-ratelimit-remaining-{kind}", f"{max(0, math.floor(bucket.level))}"),
                (f"x-ratelimit-reset-{kind}", f"{full_s:.3f}s"),
            ]
        return told

    def _pay(self, name: str, kind: str, limit: float, amount: int) -> None:
        self._bucket(name, kind, limit).level -= amount
        self._spent[name, kind] += amount

    def _bucket(self, name: str, kind: str, limit: float) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.setdefault((name, kind), _Bucket(limit, now))
        level = min(limit, bucket.level + (now - bucket.at) * limit / MINUTE_S)
        bucket.level, bucket.at = level - self._elsewhere.pop((name, kind), 0), now
        return bucket

"""Who may use a route: keys, and requests that a browser was tricked into."""

from __future__ import annotations

import hashlib
import hmac
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpuinfer.errors import UsageError
from gpuinfer.http.exchange import Exchange

FILE_BYTES = 1 << 20
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
NAME = re.compile(r"[a-z0-9._-]{1,100}|\[[0-9a-f:.]{2,45}\]")  # a host's, as it may be repeated in an error


class Keys:
    """Keys that are let in. Only their SHA-256 is kept."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode("ascii")).digest() for key in keys]

    @classmethod
    def read(cls, path: str | Path) -> Keys:
        """Of a file, as `read_keys` has it."""
        return cls(read_keys(path))

    def allow(self, authorization: str | None) -> bool:
        """Whether an Authorization header, `Bearer KEY`, has one of the keys; the time tells nothing of them."""
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = False
        for one in self._digests:
            found |= hmac.compare_digest(one, digest)
        return found and scheme.lower() == "bearer"


def read_keys(path: str | Path) -> list[str]:
    """Of a file: one key a line; empty lines and those that begin with # are skipped. Raises UsageError."""
    path = Path(path)
    try:
        mode = path.stat().st_mode
        text = path.read_bytes()[: FILE_BYTES + 1]
    except OSError as error:
        raise UsageError(f"cannot read the key file {path} ({error.strerror}). Write one key a line.") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(f"the key file {path} can be read by others. Run: chmod 600 {path}")
    if len(text) > FILE_BYTES:
        raise UsageError(f"the key file {path} has more than {FILE_BYTES:,} bytes. Write one key a line.")
    return _keys(path, text)


def _keys(path: Path, text: bytes) -> list[str]:
    found = []
    for number, line in enumerate(text.split(b"\n"), 1):
        line = line.strip()
        if not line or line.startswith(b"#"):
            continue
        if not all(0x21 <= byte <= 0x7E for byte in line):
            raise UsageError(f"line {number} of the key file {path} is no key: use ASCII without spaces.")
        found.append(line.decode("ascii"))
    if not found:
        raise UsageError(f"the key file {path} has no key. Write one a line: openssl rand -hex 32 > {path}")
    return found


@dataclass
class Access:
    """Which keys open which routes, and which names this server is called by.

    `hosts`: names, with or without a port, that Host may have; None: any. A server on loopback takes only `LOOPBACK`,
    so that no page in a browser reaches it under a name of its own (DNS rebinding).
    """

    api: Keys | None = None
    admin: Keys | None = None
    hosts: frozenset[str] | None = None

    def host_refused(self, exchange: Exchange) -> str | None:
        """Why this request does not come from where it should, if so."""
        if self.hosts is None:
            return None
        host = exchange.headers.get("host", "").lower()  # which browsers always send
        if "host" in exchange.headers and host not in self.hosts and name_of(host) not in self.hosts:
            return not_called(host)
        origin = exchange.headers.get("origin")
        if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
            return other_origin()
        return None


def not_called(host: str) -> str:
    """Why a request for this Host is refused."""
    name = name_of(host)
    cure = f"--allowed-hosts {name}" if NAME.fullmatch(name) else "--allowed-hosts NAME"
    return (
        f"this server is not called by the name in Host. Ask it by its own, such as localhost, or start it with {cure} "
        "(behind a proxy: by the name that clients use)."
    )


def other_origin() -> str:
    """Why a request of a page from another origin is refused, which a proxy that changes Host brings about too."""
    return (
        "a page of another origin than this server's asks, and only its own may. A proxy in front must pass Host on as "
        "it came; start the server with --allowed-hosts and the name in it."
    )


def name_of(host: str) -> str:
    """Without the port."""
    """Without the port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]

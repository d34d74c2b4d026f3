"""Who may use a route: keys, and requests that a browser was tricked into."""

from __future__ import annotations

import hashlib
import hmac
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpuinfer.errors import UsageError
from gpuinfer.http.exchange import Exchange

FILE_BYTES = 1 << 20
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


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
        if "host" in exchange.headers and host not in self.hosts and _name(host) not in self.hosts:
            return "this server is not called by that name. Use one of: " + ", ".join(sorted(self.hosts)) + "."
        origin = exchange.headers.get("origin")
        if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
            return "a page of another origin asks. Only this server's own page may."
        return None


def _name(host: str) -> str:
    """Without the port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]

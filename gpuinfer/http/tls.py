"""TLS by a certificate's file and its key's, which may be renewed while the server runs."""

from __future__ import annotations

import shlex
import ssl
import stat
from pathlib import Path
from typing import Any

from gpuinfer.errors import UsageError
from gpuinfer.host.files import read_regular

SHUTDOWN_S = 2.0  # for a client to confirm the end of a connection; one that idles does not read it


class Certificate:
    """`context` serves what the files held when they last were right."""

    def __init__(self, path: Path, key: Path) -> None:
        """Raises UsageError for files that are no certificate with its key."""
        self.path, self._key = path, key
        self._version = self._now()
        self.context = _context()
        self._load(self.context)

    def of_server(self, handshake_s: float) -> dict[str, Any]:
        """What asyncio's `create_server` takes of it."""
        return {"ssl": self.context, "ssl_handshake_timeout": handshake_s, "ssl_shutdown_timeout": SHUTDOWN_S}

    def look(self) -> list[str] | None:
        """Read them again if they have changed; something, if so. Raises UsageError, once, where they are wrong."""
        version = self._now()
        if version == self._version:
            return None
        self._version = version
        self._load(_context())  # a context that has failed to load serves nothing any more
        self._load(self.context)
        return []

    def _now(self) -> object:
        try:
            found = [one.stat() for one in (self.path, self._key)]
        except OSError:
            return None
        return [(one.st_ctime_ns, one.st_mtime_ns, one.st_size, one.st_ino) for one in found]

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            read_regular(self.path, 0)  # OpenSSL would wait for a FIFO's writer
            if read_regular(self._key, 0)[1].st_mode & stat.S_IRWXO:
                raise UsageError(
                    f"the key {self._key} can be read by others. Run: chmod 600 {shlex.quote(str(self._key))}"
                )
            context.load_cert_chain(self.path, self._key, password=lambda: b"")
        except ssl.SSLError as error:
            why = (error.reason or "no PEM").lower().replace("_", " ")
            raise UsageError(
                f"{self.path} and {self._key} are no certificate with its key ({why}). Give --tls-cert the certificate "
                "and its chain, --tls-key the key without a password, both in PEM."
            ) from None
        except OSError as error:
            raise UsageError(
                f"cannot read {error.filename or self.path} ({error.strerror}). Give regular files to --tls-cert and "
                "--tls-key."
            ) from None


def _context() -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # 1.2 and on
    made.set_alpn_protocols(["http/1.1"])
    return made

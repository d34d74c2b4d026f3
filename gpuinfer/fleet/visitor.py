"""A member that was added by its URL: probed like any other, never started and never killed.

Its streams are not resumed, since nobody here knows how it draws its tokens, and who else asks it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import urlsplit

from gpuinfer.errors import UsageError
from gpuinfer.fleet.probe import Health
from gpuinfer.fleet.worker import Worker

HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}")


class Visitor(Worker):
    ours = False

    def __init__(
        self, id: int, url: str, key: str | None, changed: Callable[[], None], tell: Callable[[str], None]
    ) -> None:
        super().__init__(id, key, changed, tell)
        self.host, self.port = address_of(url)
        self.attempts = 1

    async def run(self) -> None:
        async with self._probed(self.host, self.port):
            while True:
                beat = await self._look()
                if beat != "well" and self.state == "up":
                    self.failure = "it gave no sign of life" if beat == "late" else "it says that it is stuck"
                    self._tell(f"{self.url}: {self.failure}; it gets no requests until it answers again.")
                    self._become("down")
                elif beat == "late" and self.state == "starting":
                    self.failure = "it has never answered"
                    self._become("down")

    def _answered(self, health: Health) -> None:
        if health.ready:
            self._become("up")
        elif self.state == "up":
            self.failure = "it says that it is not ready"
            self._become("down")

    async def end(self, within_s: float) -> None:
        await self._over()
        self.state = "down"


def address_of(url: str) -> tuple[str, int]:
    """Host and port of `http://HOST:PORT`. Raises `UsageError` for anything beyond that."""
    try:
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError:
        raise _refused("its port is none") from None
    if parts.scheme != "http":
        raise _refused("a worker is reached by http only")
    if "@" in parts.netloc or parts.path not in ("", "/") or "?" in url or "#" in url:
        raise _refused("it has a user, a path or a query")
    if not parts.hostname or not HOST.fullmatch(parts.hostname):
        raise _refused("its host is none")
    return parts.hostname, port


def _refused(why: str) -> UsageError:
    return UsageError(f"the worker's URL is refused: {why}. Write it as http://HOST:PORT.")

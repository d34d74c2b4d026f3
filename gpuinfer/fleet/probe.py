"""Asking a replica how it is, on a connection of its own: no load of clients is ahead of it, in no queue or pool."""

from __future__ import annotations

import msgspec

from gpuinfer.errors import GpuinferError
from gpuinfer.http.client import Client

ANSWER_S = 10.0  # far beyond what is late: whether an answer is late is counted in looks, not here
MOST_BYTES = 64 << 10


class Health(msgspec.Struct, frozen=True):
    """What `/health` says. Of a server that is not ours only `ready` is known, from the status of its answer."""

    server: str = ""
    status: str = ""
    ready: bool = False
    busy: bool = False
    stuck: bool = False
    heartbeat_age_s: float = 0.0
    in_flight: int = 0
    waiting_rows: int = 0
    model: str = ""
    kind: str = ""

    @property
    def draining(self) -> bool:
        return self.status == "draining"


class Probe:
    """Of one replica, at one address."""

    def __init__(self, host: str, port: int) -> None:
        self._client = Client(f"http://{bracketed(host)}:{port}", connections=1, timeout_s=ANSWER_S)

    async def ask(self) -> Health | None:
        """None: it gave no answer that is one of HTTP."""
        try:
            response = await self._client.request("GET", "/health")
        except GpuinferError:
            return None
        return read(response.status, response.body)

    async def close(self) -> None:
        await self._client.close()


def read(status: int, body: bytes) -> Health:
    """From an answer. A body that is none of ours says nothing, and does no harm."""
    try:
        health = msgspec.json.decode(body[:MOST_BYTES], type=Health)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        health = Health()
    if health.server != "gpuinfer":
        return Health(ready=status == 200)
    return msgspec.structs.replace(health, ready=health.ready and status == 200)


def bracketed(host: str) -> str:
    """As it stands in a URL."""
    return f"[{host}]" if ":" in host else host

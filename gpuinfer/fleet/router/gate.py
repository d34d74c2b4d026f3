"""Who may come in: keys and what each may ask, and requests that a page in a browser was tricked into. Before a body is
read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuinfer.fleet.router.config import RouterConfig
from gpuinfer.fleet.router.request_head import RequestHead
from gpuinfer.http.access import Key, Keys, cors, name_of, not_called, other_origin
from gpuinfer.http.quotas import CODE, Quotas

REMEMBERED = 256  # names that were let in


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer in place of the replicas'. `kind` and `code` as OpenAI's errors have them; None: as the status says."""

    status: int
    message: str
    retry_s: int = 0
    kind: str | None = None
    code: str | None = None


@dataclass(slots=True)
class Admission:
    """What the gate has found of a request. `headers` are those that each answer to it has."""

    key: Key | None = None
    headers: list[tuple[str, str]] = field(default_factory=list)
    refusal: Refusal | None = None


ANYBODY = Admission()


class Gate:
    """Looks at each request; one that is open lets everybody in."""

    def __init__(self, config: RouterConfig) -> None:
        self.keys = Keys(config.api_keys) if config.api_keys else None
        self.origins = frozenset(config.origins)
        self.quotas = Quotas()
        self._hosts = frozenset(host.lower() for host in config.hosts)
        self._known: set[bytes] = set()
        self.open = not self._hosts and self.keys is None and not self.origins

    def look(self, head: RequestHead, for_replicas: bool) -> Admission:
        """The control application looks at keys itself, since some of its routes need none and others another one."""
        found = Admission()
        if self._hosts and (why := self._called_wrong(head)):
            found.refusal = Refusal(403, why)
        elif for_replicas:
            origin = None if head.origin is None else head.origin.decode("latin-1")
            found.headers += cors(self.origins, origin)
            if self.keys is not None:
                self._ask_for_key(self.keys, head, found)
        return found

    def _ask_for_key(self, keys: Keys, head: RequestHead, found: Admission) -> None:
        given = None if head.authorization is None else head.authorization.decode("latin-1")
        found.key = key = keys.find(given)
        if key is None:
            found.refusal = Refusal(401, "no valid API key. Send one: Authorization: Bearer KEY.")
        elif head.method == b"POST" and key.limits():
            exceeded = self.quotas.take(key)
            found.headers += self.quotas.headers(key)
            if exceeded is not None:
                found.refusal = Refusal(429, exceeded.message, exceeded.retry_s, exceeded.kind, CODE)

    def _called_wrong(self, head: RequestHead) -> str | None:
        if head.host is None:  # no browser asks: a probe by HTTP/1.0
            return None
        host = head.host.lower()
        if host not in self._known:
            name = host.decode("latin-1")
            if name not in self._hosts and name_of(name) not in self._hosts:
                return not_called(name)
            if len(self._known) < REMEMBERED:
                self._known.add(host)
        origin = None if head.origin is None else head.origin.lower()
        if origin is None or self.origins & {"*", origin.decode("latin-1")}:
            return None
        return None if origin in (b"http://" + host, b"https://" + host) else other_origin()

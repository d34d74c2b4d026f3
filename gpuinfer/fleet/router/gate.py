"""Who may come in: keys, and requests that a page in a browser was tricked into. Before a body is read."""

from __future__ import annotations

from gpuinfer.fleet.router.config import RouterConfig
from gpuinfer.fleet.router.request_head import RequestHead
from gpuinfer.http.access import Keys, name_of, not_called, other_origin

REMEMBERED = 256  # names that were let in


class Gate:
    """Answers with a status and why, or None for a request that may come in."""

    def __init__(self, config: RouterConfig) -> None:
        self._keys = Keys(config.api_keys) if config.api_keys else None
        self._hosts = frozenset(host.lower() for host in config.hosts)
        self._known: set[bytes] = set()
        self.open = not self._hosts and self._keys is None  # to everybody

    def refused(self, head: RequestHead, for_replicas: bool) -> tuple[int, str] | None:
        """The control application looks at keys itself, since some of its routes need none and others another one."""
        if self._hosts and (why := self._called_wrong(head)):
            return 403, why
        if for_replicas and self._keys is not None:
            given = None if head.authorization is None else head.authorization.decode("latin-1")
            if not self._keys.allow(given):
                return 401, "no valid API key. Send one: Authorization: Bearer KEY."
        return None

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
        if head.origin is not None and head.origin.lower() not in (b"http://" + host, b"https://" + host):
            return other_origin()
        return None

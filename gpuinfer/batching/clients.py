"""Who may ask again soon: the live clients, how many of them think, and for how long they usually do.

Nothing here reads a clock; every call costs the same whatever the number of clients.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable

MEMORY = 16  # the average think time forgets over this many samples
OUTLIER = 4.0  # a sample counts as no more than this many times the average, so that a pause does not spoil it
JITTER_S = 20e-6  # … and this much more, so that an average of nothing can grow again
DORMANT = 20.0  # a client that has thought for this many times the average is waited for no longer,
DORMANT_S = 0.020  # unless that is less than this


class Clients:
    """Live clients, and which of them think: those that neither wait nor are being served.

    A client that thinks for unusually long is dormant: it does not count as thinking until it has asked again. While no
    think time is known, none is unusual.
    """

    __slots__ = ("_answered", "_live", "_of", "_samples", "_thinking", "outstanding", "think_s")

    def __init__(self) -> None:
        self.outstanding = 0  # requests that are not settled, whoever asked
        self.think_s = math.inf  # from an answer to the same client's next request; inf: not known
        self._live: set[Hashable] = set()
        self._of: dict[Hashable, int] = {}  # each client's outstanding requests
        self._answered: dict[Hashable, float] = {}  # when each that neither waits nor is being served had its answer
        self._thinking: OrderedDict[Hashable, float] = OrderedDict()  # since when; the longest first
        self._samples = 0

    def __len__(self) -> int:
        return len(self._live)

    def join(self, client: Hashable, now: float | None = None) -> None:
        """Count this client as live: it may ask from `now` on. Without a time it is dormant until it asks."""
        if client in self._live:
            return
        self._live.add(client)
        if now is not None and client not in self._of:
            self._thinking[client] = now

    def leave(self, client: Hashable) -> None:
        """Wait no longer for this client. Its outstanding requests still have to be answered."""
        self._live.discard(client)
        self._thinking.pop(client, None)
        self._answered.pop(client, None)

    def asked(self, client: Hashable, now: float) -> None:
        """One more outstanding request; `client` is None for one that has not said who it is."""
        if client is None:
            self.outstanding += 1
            return
        count = self._of[client] = self._of.get(client, 0) + 1  # raises for one that cannot be hashed: nothing is done
        self.outstanding += 1
        if count == 1 and client in self._live:
            self._thinking.pop(client, None)
            answered = self._answered.pop(client, None)
            if answered is not None:
                self._learn(max(0.0, now - answered))

    def answered(self, client: Hashable, now: float) -> None:
        """One outstanding request less: answered, failed or withdrawn."""
        self.outstanding -= 1
        if client is None:
            return
        count = self._of.pop(client) - 1
        if count:
            self._of[client] = count
        elif client in self._live:
            self._thinking[client] = self._answered[client] = now

    def thinking_at(self, now: float) -> int:
        """How many clients may well ask soon. `now` never goes back by much."""
        while self._thinking and self.next_dormant() <= now:
            self._thinking.popitem(last=False)
        return len(self._thinking)

    def next_dormant(self) -> float:
        """When the first of those that think will have thought for unusually long; inf when there is none."""
        if not self._thinking:
            return math.inf
        return next(iter(self._thinking.values())) + max(DORMANT * self.think_s, DORMANT_S)

    def _learn(self, seconds: float) -> None:
        """A moving average: plain over the first samples, then with exponentially decaying weights."""
        if not self._samples:
            self.think_s = seconds
        self._samples = min(self._samples + 1, MEMORY)
        seconds = min(seconds, OUTLIER * self.think_s + JITTER_S)
        self.think_s += (seconds - self.think_s) / self._samples

"""What each named key may ask in a minute: requests, and tokens of prompts and answers.

A token bucket each (J. Turner, "New directions in communications", 1986): a minute's worth to begin with, and it fills
at the rate of the limit. A request needs one of its own, and something left of the tokens. What an answer cost is known
at its end, so the tokens may fall below nothing, and then nothing is taken until they are back.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gpuinfer.http.access import Key

CODE = "rate_limit_exceeded"  # of OpenAI's error
MINUTE_S = 60.0


@dataclass(slots=True)
class _Bucket:
    level: float
    at: float

    def fill(self, limit: float, now: float) -> None:
        self.level = min(limit, self.level + (now - self.at) * limit / MINUTE_S)
        self.at = now


@dataclass(frozen=True, slots=True)
class Exceeded:
    """Why a request is refused with 429; `kind` is requests or tokens, as OpenAI's error has its type."""

    kind: str
    message: str
    retry_s: int


class Quotas:
    """Of all keys. Processes that share the clients tell one another now and then what was spent (`news`, `hear`)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, str], _Bucket] = {}
        self._spent: Counter[tuple[str, str]] = Counter()  # here, since the last news
        self._elsewhere: Counter[tuple[str, str]] = Counter()  # and elsewhere, of what no bucket knows yet

    def take(self, key: Key) -> Exceeded | None:
        """One request's worth, or why not."""
        for kind, limit in key.limits():
            bucket = self._bucket(key.name, kind, limit)
            needed = 1.0 if kind == "requests" else 1e-9
            if bucket.level < needed:
                wait_s = math.ceil((needed - bucket.level) * MINUTE_S / limit)
                message = f"the key '{key.name}' has used its {limit:g} {kind} a minute. Ask again in {wait_s} s."
                return Exceeded(kind, message, wait_s)
        if key.requests is not None:
            self._pay(key.name, "requests", key.requests, 1)
        return None

    def spend(self, key: Key, tokens: int) -> None:
        """An answer is over that cost so much."""
        if key.tokens is not None and tokens:
            self._pay(key.name, "tokens", key.tokens, tokens)

    def news(self) -> list[tuple[str, str, int]]:
        """Names, kinds and how much was spent here since this was asked last."""
        told = [(name, kind, amount) for (name, kind), amount in self._spent.items()]
        self._spent.clear()
        return told

    def hear(self, news: Iterable[tuple[str, str, int]]) -> None:
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
        bucket.fill(limit, now)
        bucket.level -= self._elsewhere.pop((name, kind), 0)
        return bucket

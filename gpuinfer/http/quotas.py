"""What each named key may ask in a minute: requests, and tokens of prompts and answers.

A token bucket each (J. Turner, "New directions in communications", 1986): a minute's worth to begin with, and it fills
at the rate of the limit. A request needs one of its own, and something left of the tokens. What an answer cost is known
at its end, so the tokens may fall below nothing, and then nothing is taken until they are back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
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
    """Of all keys of one process. `processes` that share the clients each give out their part of a limit."""

    def __init__(self, processes: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._part, self._clock = 1 / processes, clock
        self._buckets: dict[tuple[str, str], _Bucket] = {}

    def take(self, key: Key) -> Exceeded | None:
        """One request's worth, or why not."""
        for kind, limit in key.limits():
            bucket = self._bucket(key.name, kind, limit)
            needed = 1.0 if kind == "requests" else 1e-9
            if bucket.level < needed:
                wait_s = math.ceil((needed - bucket.level) * MINUTE_S / self._share(limit))
                message = f"the key '{key.name}' has used its {limit:g} {kind} a minute. Ask again in {wait_s} s."
                return Exceeded(kind, message, wait_s)
        if key.requests is not None:
            self._bucket(key.name, "requests", key.requests).level -= 1
        return None

    def spend(self, key: Key, tokens: int) -> None:
        """An answer is over that cost so much."""
        if key.tokens is not None and tokens:
            self._bucket(key.name, "tokens", key.tokens).level -= tokens

    def headers(self, key: Key) -> list[tuple[str, str]]:
        """What is left, as OpenAI tells it."""
        told = []
        for kind, limit in key.limits():
            bucket, part = self._bucket(key.name, kind, limit), self._share(limit)
            full_s = (part - bucket.level) * MINUTE_S / part
            told += [
                (f"x-ratelimit-limit-{kind}", f"{limit:g}"),
                (f"x-ratelimit-remaining-{kind}", f"{max(0, math.floor(bucket.level))}"),
                (f"x-ratelimit-reset-{kind}", f"{full_s:.3f}s"),
            ]
        return told

    def _share(self, limit: float) -> float:
        return max(1.0, limit * self._part)

    def _bucket(self, name: str, kind: str, limit: float) -> _Bucket:
        now, part = self._clock(), self._share(limit)
        bucket = self._buckets.setdefault((name, kind), _Bucket(part, now))
        bucket.fill(part, now)
        return bucket

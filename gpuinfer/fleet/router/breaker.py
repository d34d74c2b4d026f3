"""Whether a replica is worth sending requests to: a circuit breaker that only its own failures open.

What counts is connections refused, lost and too slow to come about, and broken framing, each by itself; and answers of
500, 502 and 504, by their share. Refusals of what the client sent, of load (429, 503), and clients that went away
never do.
"""

from __future__ import annotations

from collections import deque

from gpuinfer.fleet.router.config import RouterConfig

CLOSED, HALF_OPEN, OPEN = 0, 1, 2


class Breaker:
    """Closed: requests go there. Open: none until a time has passed. Half-open: one, and what becomes of it decides.

    Times are on any one clock. Methods return whether the state has changed.
    """

    __slots__ = ("_config", "_failures", "_open_s", "_recent", "_wrong", "opens_at", "state", "trying")

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.state = CLOSED
        self.trying = False  # half-open: whether the one request is under way
        self.opens_at = 0.0  # open: when it becomes half-open
        self._failures = 0  # in a row
        self._open_s = config.breaker_open_s
        self._recent: deque[bool] = deque(maxlen=config.breaker_window)
        self._wrong = 0  # of the recent answers

    @property
    def sound(self) -> bool:
        """Nothing has gone wrong lately: an ordinary answer changes nothing."""
        return not (self.state or self._failures or self._wrong)

    def answered(self, status: int, now: float) -> bool:
        """It has answered, with whatever status."""
        self._failures = 0
        wrong = status >= 500 and status != 503
        if self.state == HALF_OPEN:
            return self._close() if not wrong else self._open(now)
        if status not in (429, 503) and (wrong or self._wrong):
            return self._weigh(wrong, now)
        return False

    def failed(self, now: float) -> bool:
        """It has not answered, by a fault of its own."""
        self._failures += 1
        if self.state == OPEN:
            return False
        if self.state == HALF_OPEN or self._failures >= self._config.breaker_failures:
            return self._open(now)
        return False

    def tried(self) -> bool:
        """The one request of a half-open breaker has ended without saying anything about the replica."""
        was, self.trying = self.trying, False
        return was

    def ready(self, now: float) -> bool:
        """Let one request through if it is time."""
        if self.state != OPEN or now < self.opens_at:
            return False
        self.state, self.trying = HALF_OPEN, False
        return True

    def _weigh(self, wrong: bool, now: float) -> bool:
        recent = self._recent
        if len(recent) == recent.maxlen:
            self._wrong -= recent[0]
        recent.append(wrong)
        self._wrong += wrong
        full = len(recent) == recent.maxlen
        return full and self._wrong >= self._config.breaker_share * len(recent) and self._open(now)

    def _open(self, now: float) -> bool:
        self.opens_at = now + self._open_s
        self._open_s = min(2 * self._open_s, self._config.breaker_longest_s)
        self.state, self.trying, self._failures, self._wrong = OPEN, False, 0, 0
        self._recent.clear()
        return True

    def _close(self) -> bool:
        self.state, self.trying = CLOSED, False
        self._open_s = self._config.breaker_open_s
        return True

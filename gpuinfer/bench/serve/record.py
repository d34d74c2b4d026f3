"""What became of one request. All times are of `time.perf_counter`."""

from __future__ import annotations

from array import array
from time import perf_counter

clock = perf_counter


class Record:
    """`due`: when it was to be sent, from which all its latencies count. `lag_s`: how late the sender itself was."""

    __slots__ = ("due", "ended", "error", "events", "first", "input_tokens", "lag_s", "last", "route", "rows", "tokens")

    def __init__(self, due: float) -> None:
        self.due = due
        self.lag_s = 0.0
        self.first = 0.0  # the first event that carries content; without a stream, the first byte. 0: there was none
        self.last = 0.0  # the last event that carries content
        self.ended = 0.0  # the last byte, or the failure
        self.events: array[float] | None = None  # when each event with content came; None: not streamed
        self.tokens: int | None = None  # of the answer, as its usage says
        self.input_tokens: int | None = None
        self.rows = 0  # of an evaluation
        self.error: str | None = None  # its kind, such as `HTTP 429` or `timeout`
        self.route: str | None = None  # who answered and why, as the router says

    @property
    def e2e_s(self) -> float:
        return self.ended - self.due

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token, from when the request was due; None where nobody can tell."""
        return self.first - self.due if self.events is not None and self.first else None

    @property
    def counted(self) -> int:
        """Tokens of the answer: of its usage, else its events, of which each is taken for one."""
        return self.tokens if self.tokens is not None else len(self.events or ())

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for an answer of fewer than two."""
        if self.ttft_s is None or self.counted < 2:
            return None
        return (self.last - self.first) / (self.counted - 1)

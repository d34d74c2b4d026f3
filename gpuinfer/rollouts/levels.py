"""How long something was how much: integrals over time of what is under way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

Clock = Callable[[], float]


class Level:
    """A number that goes up and down, such as rows under way, and its integral over time.

    `sum_s`: units times seconds until the last `take`'s end; `any_s`: seconds with at least one.
    """

    __slots__ = ("_any", "_clock", "_since", "_sum", "value")

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._sum = self._any = 0.0
        self._since = clock()
        self.value = 0

    def add(self, change: int) -> None:
        """So many more from now on."""
        self._settle()
        self.value += change

    @contextlib.contextmanager
    def during(self, amount: int = 1) -> Iterator[None]:
        """So many more while it is open."""
        self.add(amount)
        try:
            yield
        finally:
            self.add(-amount)

    def take(self) -> tuple[float, float]:
        """(unit-seconds, seconds with at least one) since the take before; they begin anew."""
        self._settle()
        found, self._sum, self._any = (self._sum, self._any), 0.0, 0.0
        return found

    def _settle(self) -> None:
        now = self._clock()
        if self.value > 0:
            self._sum += self.value * (now - self._since)
            self._any += now - self._since
        self._since = now

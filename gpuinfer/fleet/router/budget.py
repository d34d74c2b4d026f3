"""How many requests may be repeated because an answer said to try again: a share of all, so that none flood."""

from __future__ import annotations

AT_FIRST, AT_MOST = 5.0, 100.0


class RetryBudget:
    """Each request earns a share of a retry, and each retry costs one."""

    __slots__ = ("_left", "_share")

    def __init__(self, share: float) -> None:
        self._share = share
        self._left = AT_FIRST if share > 0 else 0.0

    def earn(self) -> None:
        if self._left < AT_MOST:
            self._left += self._share

    def spend(self) -> bool:
        """Whether there is one."""
        if self._left < 1:
            return False
        self._left -= 1
        return True

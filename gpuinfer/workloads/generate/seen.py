"""Which of very many keys have come before, at 12 bytes each.

A log-structured merge (O'Neil et al. 1996) in memory: the latest keys in a dict, all others in sorted arrays of growing
length, which are merged only as long as that takes little room.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 12
RECENT = 8192  # keys in the dict
LEAST_RUN = 1 << 17  # arrays up to here are always merged
SHARE = 8  # longer ones while both are at most such a part of all: there are never many more than that

Run = tuple[NDArray[np.uint64], NDArray[np.uint32]]
"""Keys of 96 bits as 64 and 32, sorted by the first."""


class Seen:
    """A bag of keys of 12 bytes."""

    def __init__(self) -> None:
        self._recent: dict[bytes, int] = {}
        self._runs: list[Run] = []  # longest first
        self._size = 0

    def __len__(self) -> int:
        return self._size + sum(self._recent.values())

    def count(self, keys: Sequence[bytes]) -> list[int]:
        """How often each has come before, earlier ones of `keys` included. They are in the bag from now on."""
        recent = self._recent
        counts = self._older(keys)
        for index, key in enumerate(keys):
            now = recent.get(key, 0)
            recent[key] = now + 1
            counts[index] += now
        if len(recent) > RECENT:
            self._settle()
        return counts

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each has come before."""
        return [older > 0 or key in self._recent for key, older in zip(keys, self._older(keys), strict=True)]

    def _older(self, keys: Sequence[bytes]) -> list[int]:
        high, low = _split(keys)
        counts = [0] * len(keys)
        for highs, lows in self._runs:
            left = highs.searchsorted(high)
            for index in (highs.take(left, mode="clip") == high).nonzero()[0].tolist():
                start = int(left[index])
                if start < len(highs) and lows[start] == low[index]:
                    counts[index] += int(highs.searchsorted(high[index], "right")) - start
        return counts

    def _settle(self) -> None:
        """Turn the dict into an array, and merge what is short."""
        keys = [key for key, times in self._recent.items() for _ in range(times)]
        self._recent.clear()
        self._size += len(keys)
        self._runs.append(_sorted(*_split(keys)))
        most = max(LEAST_RUN, self._size // SHARE)
        while len(self._runs) > 1 and len(self._runs[-2][0]) + len(self._runs[-1][0]) <= most:
            (highs, lows), (more_highs, more_lows) = self._runs[-2:]
            self._runs[-2:] = [_sorted(np.concatenate([highs, more_highs]), np.concatenate([lows, more_lows]))]
        self._runs.sort(key=lambda run: -len(run[0]))


def _split(keys: Sequence[bytes]) -> Run:
    words = np.frombuffer(b"".join(keys), np.uint32).reshape(-1, 3)
    return words[:, :2].copy().view(np.uint64).reshape(-1), words[:, 2].copy()


def _sorted(highs: NDArray[np.uint64], lows: NDArray[np.uint32]) -> Run:
    order = highs.argsort(kind="stable")
    return highs[order], lows[order]

"""A bound on what all requests of one process keep together."""

from __future__ import annotations


class Room:
    """Some bytes, taken and given back."""

    __slots__ = ("left",)

    def __init__(self, size: int) -> None:
        self.left = size

    def take(self, size: int) -> bool:
        """Whether there were so many."""
        if size > self.left:
            return False
        self.left -= size
        return True

    def give(self, size: int) -> None:
        self.left += size

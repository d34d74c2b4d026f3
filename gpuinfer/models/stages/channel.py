"""A bounded queue between two threads that can be closed: whoever waits at it is then let go.

Two of Python's own queues, which are written in C: one of items, and one of places for them. With conditions each
hand-over takes longer, and all stages hand over at the same time.
"""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class ChannelClosed(Exception):
    """Nothing goes through any more."""


class Channel(Generic[Item]):
    """First in, first out, at most `room` items. Any number of threads at either end."""

    def __init__(self, room: int) -> None:
        self._items: SimpleQueue[Any] = SimpleQueue()
        self._places: SimpleQueue[None] = SimpleQueue()
        self._closed = False
        for _ in range(room):
            self._places.put(None)

    def __len__(self) -> int:
        return self._items.qsize()

    def put(self, item: Item) -> None:
        """Waits for room. Raises `ChannelClosed`."""
        self._places.get()
        if self._closed:
            self._places.put(None)  # for the next who waits
            raise ChannelClosed
        self._items.put(item)

    def get(self) -> Item:
        """Waits for an item. Raises `ChannelClosed`, whatever may still lie here."""
        item: Item = self._items.get()
        if self._closed:
            self._items.put(None)
            raise ChannelClosed
        self._places.put(None)
        return item

    def close(self) -> None:
        self._closed = True
        self._items.put(None)
        self._places.put(None)

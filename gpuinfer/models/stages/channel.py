"""A bounded queue between two threads that can be closed: whoever waits at it is then let go."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class ChannelClosed(Exception):
    """Nothing goes through any more."""


class Channel(Generic[Item]):
    """First in, first out, at most `room` items. Any number of threads at either end."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._items: deque[Item] = deque()
        self._closed = False
        lock = threading.Lock()
        self._not_full, self._not_empty = threading.Condition(lock), threading.Condition(lock)

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> None:
        """Waits for room. Raises `ChannelClosed`."""
        with self._not_full:
            while len(self._items) >= self._room and not self._closed:
                self._not_full.wait()
            if self._closed:
                raise ChannelClosed
            self._items.append(item)
            self._not_empty.notify()

    def get(self) -> Item:
        """Waits for an item. Raises `ChannelClosed`, whatever may still lie here."""
        with self._not_empty:
            while not self._items and not self._closed:
                self._not_empty.wait()
            if self._closed:
                raise ChannelClosed
            item = self._items.popleft()
            self._not_full.notify()
            return item

    def close(self) -> None:
        with self._not_full:
            self._closed = True
            self._items.clear()
            self._not_full.notify_all()
            self._not_empty.notify_all()

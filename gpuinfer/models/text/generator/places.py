"""Free slots, the least useful content first."""

from __future__ import annotations

from collections import OrderedDict


class Places:
    """A slot is free with content that a prompt may begin with, or without."""

    def __init__(self, slots: int) -> None:
        self._blank = list(range(slots - 1, -1, -1))  # the lowest is taken first
        self._kept: OrderedDict[int, None] = OrderedDict()  # used longest ago first

    def __len__(self) -> int:
        return len(self._blank) + len(self._kept)

    def holds(self, slot: int) -> bool:
        """Whether this one is free, and its content worth something."""
        return slot in self._kept

    def take(self) -> int:
        """The free slot whose content is missed least."""
        return self._blank.pop() if self._blank else self._kept.popitem(last=False)[0]

    def take_this(self, slot: int) -> None:
        """One that `holds`."""
        del self._kept[slot]

    def scarce(self, slot: int) -> bool:
        """Whether `take` would give this one."""
        return not self._blank and next(iter(self._kept)) == slot

    def give(self, slot: int) -> None:
        """It is free again, and what it holds serves nobody."""
        self._blank.append(slot)

    def keep(self, slot: int) -> None:
        """It is free again, and what it holds may serve others."""
        self._kept[slot] = None

    def used(self, slot: int) -> None:
        """Something has been copied from it: if it is free, it is worth keeping."""
        if slot in self._kept:
            self._kept.move_to_end(slot)

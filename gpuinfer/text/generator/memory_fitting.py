"""Memory that is left to others: what a generator keeps and does not need goes back, and it has fewer slots and pages
while a device is short of memory, and more again once it is not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from gpuinfer.models.device import release_memory
from gpuinfer.text.generator.page_pool import pages_for
from gpuinfer.text.generator.slotted import SlottedGenerator
from gpuinfer.units import memory

logger = logging.getLogger("gpuinfer")

ROWS_OF_LEAST = 2  # full rows that there are pages for in any case: a guided canvas takes two
WORTH = 1 << 24  # bytes: what is less may be chance
MORE = 1.25  # times as many pages: fewer more are not worth the change


@dataclass(frozen=True, slots=True)
class FreedMemory:
    """The result of releasing memory. Bytes."""

    freed_bytes: int  # that this process held before and does not hold now
    free_bytes: int  # of the device, afterwards
    freed_pages: int  # of the cache that were kept for rows to come


@dataclass(frozen=True, slots=True)
class MemoryBounds:
    """Between what slots and pages are, and what is to stay free. Slots are in proportion to pages."""

    keep_free: int  # bytes
    page_bytes: float
    pages: tuple[int, int]  # the fewest and the most
    slots: tuple[int, int]

    def pages_at(self, free: int, in_use: int) -> int:
        """How many pages there may be where so many bytes are free while so many pages hold memory."""
        least, most = self.pages
        return max(least, min(most, in_use + int((free - self.keep_free) // max(1.0, self.page_bytes))))

    def slots_at(self, pages: int) -> int:
        least, most = self.slots
        return max(least, min(most, most * pages // self.pages[1]))


@dataclass(slots=True)
class FittingCounters:
    """Totals since the start, and what is in force."""

    slots: int
    pages: int
    freed_bytes: int = 0
    shortages: int = 0  # times that less than the bound was free
    resized: int = 0  # times that slots or pages changed


class MemoryFitter:
    """Gives memory of one generator back. All methods but `counted` are called between two of its steps.

    `free`: bytes that can still be had of the device. `resized` is called with the slots whenever they change.
    """

    def __init__(
        self,
        generator: SlottedGenerator[Any],
        free: Callable[[], int],
        keep_free: int | None = None,
        min_slots: int = 1,
        resized: Callable[[int], None] = lambda slots: None,
    ) -> None:
        """`keep_free`: None, where slots are to stay as they are."""
        decoder = generator.decoder
        self._generator, self._free, self.resized = generator, free, resized
        most, slots = decoder.pages, generator.slots
        least = min(most, ROWS_OF_LEAST * pages_for(decoder.length))
        page_bytes = decoder.cache_bytes() / max(1, most)
        self.bounds = MemoryBounds(keep_free or 0, page_bytes, (least, most), (min(min_slots, slots), slots))
        self._counted = FittingCounters(slots, most)

    def counted(self) -> dict[str, int]:
        """The fields of `FittingCounters`. From any thread."""
        return asdict(self._counted)

    @property
    def is_due(self) -> bool:
        """Whether `fit` has anything to do, as far as a look at the device tells. From any thread."""
        free = self._free()
        return free < self.bounds.keep_free or (self._lowered and self._grows(self._pages_at(free)))

    def give_back(self) -> FreedMemory:
        """Give back everything that is kept and not in use: pages for rows to come, idle graphs, freed memory."""
        pages = self._generator.drop_cached()
        freed = self._return_memory()
        return FreedMemory(freed, self._free(), pages)

    def fit(self) -> bool:
        """With less free than the bound: give back what is not in use, then have as many pages and slots as there is
        room for. With more: have more again. Whether that came to anything.
        """
        free, counted, had = self._free(), self._counted, self._counted.freed_bytes
        short = free < self.bounds.keep_free
        if short:
            counted.shortages += 1
            self._return_memory()
            free = self._free()
        pages = self._pages_at(free)
        if (pages < counted.pages) if short else self._grows(pages):
            before = counted.slots, counted.pages
            slots = self.bounds.slots_at(pages)
            counted.slots, counted.pages = self._generator.resize(slots, pages)
            if (counted.slots, counted.pages) == before:
                return counted.freed_bytes > had + WORTH
            counted.resized += 1
            self.resized(counted.slots)  # before it is told: who reads that finds it in force
            self._tell(short, free, before)
            return True
        return counted.freed_bytes > had + WORTH

    @property
    def _lowered(self) -> bool:
        return self._counted.pages < self.bounds.pages[1]

    def _pages_at(self, free: int) -> int:
        """On CUDA all pages hold memory, in use or not."""
        held = self._generator.pages_in_use if self._generator.decoder.pages_go_back else self._counted.pages
        return self.bounds.pages_at(free, held)

    def _grows(self, pages: int) -> bool:
        now = self._counted.pages
        return pages > now and (pages >= MORE * now or pages == self.bounds.pages[1])

    def _return_memory(self) -> int:
        """Return freed memory to the system; the bytes that this process released."""
        freed = release_memory([self._generator.decoder.device], self._generator.return_memory)["freed_bytes"]
        self._counted.freed_bytes += freed
        return freed

    def _tell(self, short: bool, free: int, before: tuple[int, int]) -> None:
        counted, keep = self._counted, memory(self.bounds.keep_free)
        what = f"{before[0]:,} → {counted.slots:,} slots, {before[1]:,} → {counted.pages:,} pages"
        device = self._generator.decoder.device
        if short:
            logger.warning("%s are free on %s, less than keep_free=%s: %s", memory(free), device, keep, what)
        else:
            logger.warning("%s are free on %s again, with keep_free=%s: %s", memory(free), device, keep, what)

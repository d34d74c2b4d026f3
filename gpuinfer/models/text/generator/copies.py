"""Beginnings that are to be copied between slots, gathered so that one call copies to many."""

from __future__ import annotations

import logging

from gpuinfer.models.text.generator.table import Table
from gpuinfer.models.text.step import Decoder

logger = logging.getLogger("gpuinfer")


class Copies:
    """Copies that have been promised; they are carried out before the next step computes.

    A target counts as filled from the promise on. Should copying fail, it counts as empty again and is
    computed instead.
    """

    def __init__(self, decoder: Decoder, table: Table) -> None:
        self._decoder, self._table = decoder, table
        self._targets: dict[tuple[int, int], list[int]] = {}  # (source, length), in the order of asking
        self._sources: set[int] = set()

    def promise(self, source: int, target: int, length: int) -> None:
        self._targets.setdefault((source, length), []).append(target)
        self._sources.add(source)
        self._table.filled[target] = length

    def before_overwriting(self, slot: int) -> None:
        """A slot gets a new row: what was to be copied from it is copied now."""
        if slot in self._sources:
            self.carry_out()

    def carry_out(self) -> None:
        if not self._targets:
            return
        promised, self._targets = self._targets, {}
        self._sources.clear()
        try:
            while promised:
                source, length = next(iter(promised))
                self._decoder.copy(source, promised[source, length], length)
                del promised[source, length]
        except Exception as error:  # noqa: BLE001  a copy only saves work
            logger.warning("a shared prefix could not be copied and is computed again: %s", error)
            for targets in promised.values():
                self._table.filled[targets] = 0

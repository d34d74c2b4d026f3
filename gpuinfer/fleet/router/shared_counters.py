"""Counters in shared memory: each router process writes its own row, everyone reads all of them.

A cell is eight bytes that are written at once, by one process alone; so there are no locks. The memory has no name: it
travels as a descriptor.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from enum import IntEnum
from multiprocessing import reduction
from typing import Any

SLOTS = 512  # members that have counters at a time
NOWHERE = SLOTS  # a slot that nobody reads


class MemberCell(IntEnum):
    """Of one member, in one process."""

    IN_FLIGHT = 0
    REQUESTS = 1
    ERRORS = 2
    RETRIED = 3
    RESUMED = 4
    BREAKER = 5


class ProcessCell(IntEnum):
    """Of one process."""

    CONNECTIONS = 0
    REQUESTS = 1
    UNROUTED = 2
    TIMEOUTS = 3
    CLIENT_GONE = 4
    BROKEN_OFF = 5
    QUEUED = 6
    QUEUE_TAKEN = 7
    QUEUE_FULL = 8
    QUEUE_EXPIRED = 9
    QUEUE_WAIT_US = 10
    POLICY_FAULTS = 11


_ROW = len(ProcessCell) + (SLOTS + 1) * len(MemberCell)


class SharedCounters:
    """It can be among a spawned process's arguments."""

    def __init__(self, processes: int) -> None:
        if hasattr(os, "memfd_create"):
            self._number = os.memfd_create("gpuinfer-router", os.MFD_CLOEXEC)
            os.fchmod(self._number, 0o600)
        else:
            with tempfile.TemporaryFile() as file:  # 0600, and gone from its folder at once
                self._number = os.dup(file.fileno())
        os.ftruncate(self._number, processes * _ROW * 8)
        self._open(processes)

    def _open(self, processes: int) -> None:
        self.processes = processes
        self.cells = memoryview(mmap.mmap(self._number, processes * _ROW * 8)).cast("q")

    def __getstate__(self) -> Any:
        return {"processes": self.processes, "number": reduction.DupFd(self._number)}

    def __setstate__(self, state: Any) -> None:
        self._number = state["number"].detach()
        self._open(state["processes"])

    def __del__(self) -> None:
        os.close(self._number)

    def total_at(self, row: int, total: ProcessCell) -> int:
        """Where it is among the cells."""
        return row * _ROW + total

    def member_at(self, row: int, slot: int) -> int:
        """Where the first of its cells is."""
        return row * _ROW + len(ProcessCell) + slot * len(MemberCell)

    def sum_of(self, slot: int, cell: MemberCell) -> int:
        return sum(self.cells[self.member_at(row, slot) + cell] for row in range(self.processes))

    def most_of(self, slot: int, cell: MemberCell) -> int:
        return max(self.cells[self.member_at(row, slot) + cell] for row in range(self.processes))

    def total(self, total: ProcessCell) -> int:
        return sum(self.cells[self.total_at(row, total)] for row in range(self.processes))

    def bury(self, row: int) -> None:
        """The process of this row is dead: nothing is under way there any more. Its counts stay."""
        self.cells[self.total_at(row, ProcessCell.CONNECTIONS)] = self.cells[self.total_at(row, ProcessCell.QUEUED)] = 0
        for slot in range(SLOTS):
            at = self.member_at(row, slot)
            self.cells[at + MemberCell.IN_FLIGHT] = self.cells[at + MemberCell.BREAKER] = 0

    def clear(self, slot: int) -> None:
        """Before a slot is given to another member, whom no process knows yet."""
        for row in range(self.processes):
            at = self.member_at(row, slot)
            for cell in MemberCell:
                self.cells[at + cell] = 0

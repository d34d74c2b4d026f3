"""A pulse in shared memory: tells a server that is slow from one that is dead, at the cost of a look.

Any number of processes can look at it, which is what `runtime.pulse`, a pipe with one reader, does not allow.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time

BEAT_S = 0.5  # between two beats
LATE_S = 5.0  # without a beat: dead, or stopped
AWAY_S = 2.0  # between two looks: whoever looks was itself away, and knows nothing

COUNT = struct.Struct("<Q")
SIZE = mmap.PAGESIZE


class Heart:
    """Beats from a thread that does nothing else, so that it goes on whatever the model does."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        threading.Thread(target=self._beat, name="gpuinfer-heart", daemon=True).start()

    def _beat(self) -> None:
        while True:
            (count,) = COUNT.unpack_from(self._memory)
            COUNT.pack_into(self._memory, 0, (count + 1) % 2**64)
            time.sleep(BEAT_S)


class Pulse:
    """Somebody else's heart. Look at least every `AWAY_S` seconds while you wait for it."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._count = -1
        self._beat_at = self._looked_at = time.monotonic()

    def late_s(self) -> float:
        """How long it has not beaten while we looked; 0 at the first look after a pause of our own."""
        now = time.monotonic()
        (count,) = COUNT.unpack_from(self._memory)
        if count != self._count or now - self._looked_at > AWAY_S:
            self._count, self._beat_at = count, now
        self._looked_at = now
        return now - self._beat_at

    @property
    def stopped(self) -> bool:
        return self.late_s() > LATE_S

"""Checks a device's free memory periodically, while models compute there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from gpuinfer.host import error_text

logger = logging.getLogger("gpuinfer")

LOOK_S = 1.0  # between two checks
MOST_LOOKS = 64  # periods between two checks at most, while `fit` finds nothing to release


class MemoryWatch:
    """A thread that calls `fit` when that `is_due`. `fit` answers whether it came to anything: a process that is short
    of memory for long is not held up every second. Both may raise, also once the model is closed.
    """

    def __init__(self, is_due: Callable[[], bool], fit: Callable[[], bool]) -> None:
        self._is_due, self._fit = is_due, fit
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="gpuinfer-memory", daemon=True).start()

    def stop(self) -> None:
        """No check begins any more; one under way is not waited for."""
        self._stopped.set()

    def _run(self) -> None:
        periods = 1
        while not self._stopped.wait(periods * LOOK_S):
            try:
                periods = min(2 * periods, MOST_LOOKS) if self._is_due() and not self._fit() else 1
            except Exception as error:  # noqa: BLE001  a check that failed; the next one may not
                logger.debug("memory could not be fitted: %s", error_text.short_message(error))

"""Waiting until something has changed, whatever it is: whoever waits looks again for himself."""

from __future__ import annotations

import asyncio


class Changes:
    """What others wait for. All calls belong to one event loop."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    async def wait(self) -> None:
        """Until the next `tell`."""
        changed = asyncio.get_running_loop().create_future()
        self._waiting.append(changed)
        try:
            await changed
        finally:
            if changed in self._waiting:  # nothing has happened: whoever waited was cancelled
                self._waiting.remove(changed)

    def tell(self) -> None:
        """Wake all that wait now."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)

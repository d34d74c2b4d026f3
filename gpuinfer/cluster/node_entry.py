"""A node as its coordinator knows it."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

from gpuinfer.cluster.messages import CoordinatorReply, Hello

SILENT_S = 5.0  # several exchanges
CLOCK_S = 5.0  # by which a node's clock may differ without a word

log = logging.getLogger(__name__)


@dataclass(eq=False)
class NodeEntry:
    """A node that has joined."""

    number: int
    hello: Hello
    state: str = "joined"  # joined, left, failed, lost
    reason: str = ""
    sees_folder: bool = False
    clock_compared: bool = False
    heard_at: float = field(default_factory=time.monotonic)
    sequence: int = 0  # of its last exchange
    answer: asyncio.Future[CoordinatorReply] | None = None  # to that one

    @property
    def name(self) -> str:
        """For people."""
        which = self.number if self.hello.index is None else self.hello.index
        return f"node {which} ({self.hello.host})"

    @property
    def silent(self) -> bool:
        """Whether no message has come for so long that the end of the run does not wait for it."""
        answered = self.answer is None or self.answer.done()
        return answered and time.monotonic() > self.heard_at + SILENT_S

    def compare_clock(self, ahead_s: float) -> None:
        """Warn of a clock that differs, once: no record depends on it."""
        if self.clock_compared:
            return
        self.clock_compared = True
        if abs(ahead_s) > CLOCK_S:
            log.warning(
                "the clock of %s is %.0f s %s: times in its log differ from these. Set it (chrony, NTP).",
                self.name,
                abs(ahead_s),
                "ahead" if ahead_s > 0 else "behind",
            )


class UnknownNode(Exception):
    """A request of a node that this run does not know, or has removed."""

"""Asking one request of a load, and what has become of all of them."""

from __future__ import annotations

import asyncio
from collections import Counter

from gpuinfer.api import Infer
from gpuinfer.errors import BackendDied, BackendError, BadResult, Expired, QueueFull, WorkError
from gpuinfer.load.arrivals import Ask
from gpuinfer.stats import Histogram
from gpuinfer.workloads.load.payloads import Payloads

ODD_LATE_S, ODD_SHARE = 0.5e-3, 0.05  # a generator that is later, and by more than such a share, is not believed


class Tally:
    """How many requests there were and how they ended; when they were sent and answered, by when they were due."""

    def __init__(self) -> None:
        self.asked = self.asked_rows = self.answered = 0
        self.lost: Counter[str] = Counter()  # rejected, expired, failed
        self.late, self.latency = Histogram(), Histogram()  # seconds from when a request was due
        self.first_failure: WorkError | None = None

    @property
    def settled(self) -> int:
        return self.answered + sum(self.lost.values())

    @property
    def late_s(self) -> float:
        """How late a request was sent, of all but one in twenty."""
        return self.late.summary().get("p95", 0.0)

    def doubt(self) -> str:
        """Why the latencies are not to be believed, with the cure; empty when they are."""
        late, latency = self.late_s, self.latency.summary().get("p95", 0.0)
        if not latency or late <= max(ODD_LATE_S, ODD_SHARE * latency):
            return ""
        return (
            f"the load was sent up to {late * 1e3:.2f} ms late (p95), for want of a core: latencies count from then. "
            f"From when each request was due, p95 is {latency * 1e3:.2f} ms. "
            "Lower --rate, raise --rows, or leave the generator a core of its own."
        )


class Asker:
    """Sends requests and counts what becomes of them. What only one request suffers is counted; the rest is raised."""

    def __init__(self, infer: Infer, payloads: Payloads, tally: Tally) -> None:
        self.tally = tally
        self._infer, self._payloads = infer, payloads
        self._time = asyncio.get_running_loop().time

    async def ask(self, ask: Ask, due: float) -> QueueFull | None:
        """One request that was due at this time of the loop's clock; its deadline counts from then. Whatever `infer`
        raises but for a full queue (returned), an expiry or a batch that failed (counted) is raised.
        """
        tally, now = self.tally, self._time()
        tally.asked += 1
        tally.asked_rows += ask.rows
        tally.late.add(now - due)
        try:
            await self._infer(
                self._payloads.take(ask.rows),
                rows=ask.rows,
                priority=ask.priority,
                timeout=due + ask.timeout - now,
                group=ask.group,
                client=ask.client,
            )
        except QueueFull as error:
            tally.lost["rejected"] += 1
            return error
        except Expired:
            tally.lost["expired"] += 1
            await asyncio.sleep(0)  # it may have been over at once: whoever asks again must not keep out all others
        except BackendDied:
            raise
        except (BackendError, BadResult) as error:
            tally.lost["failed"] += 1
            tally.first_failure = tally.first_failure or error
        else:
            tally.answered += 1
            tally.latency.add(self._time() - due)
        return None

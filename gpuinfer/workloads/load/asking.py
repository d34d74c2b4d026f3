"""Asking one request of a load, and what has become of all of them.

What the requests of a load carry: random rows of the model's kind, or nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.api import Infer, ModelSpec
from gpuinfer.errors import BackendDied, BackendError, BadResult, Expired, QueueFull, WorkError
from gpuinfer.load.arrivals import Offer
from gpuinfer.models.layouts import BITS, row_dtype
from gpuinfer.stats import Histogram

LEAST_POOL = 1024  # rows, drawn once: drawing anew for each request would cost more than sending it


class Payloads:
    """Hands out blocks of rows [rows, ...], views of one pool that is walked round and round.

    Features of whole numbers are zeros and ones, others normally distributed. Without a
    model there is nothing to carry.
    """

    def __init__(self, spec: ModelSpec | None, most_rows: int, seed: int) -> None:
        self._pool = None if spec is None else _pool(spec, most_rows + max(LEAST_POOL, most_rows), seed)
        self._last = 0 if self._pool is None else len(self._pool) - most_rows  # where a block may begin
        self._at = 0

    def take(self, rows: int) -> Any:
        if self._pool is None:
            return None
        begin = self._at
        self._at = (begin + rows) % self._last
        return self._pool[begin : begin + rows]


def _pool(spec: ModelSpec, rows: int, seed: int) -> NDArray[Any]:
    random = np.random.default_rng(seed)
    if row_dtype(spec).kind == "f":
        return random.standard_normal((rows, spec.inputs)).astype(row_dtype(spec))
    drawn = random.integers(0, 2, (rows, spec.inputs), dtype=np.uint8)
    return np.packbits(drawn, axis=1, bitorder="little") if spec.input_dtype == BITS else drawn.astype(row_dtype(spec))


ODD_LATE_S, ODD_SHARE = 0.5e-3, 0.05  # a generator that is later, and by more than such a share, is not believed


class LoadTally:
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


class Requester:
    """Sends requests and counts what becomes of them. What only one request suffers is counted; the rest is raised."""

    def __init__(self, infer: Infer, payloads: Payloads, tally: LoadTally) -> None:
        self.tally = tally
        self._infer, self._payloads = infer, payloads
        self._time = asyncio.get_running_loop().time

    async def ask(self, ask: Offer, due: float) -> QueueFull | None:
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

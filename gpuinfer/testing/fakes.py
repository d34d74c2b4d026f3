"""Stand-ins for what surrounds a plugin: an Infer that answers from a function, and a tiny model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any

from gpuinfer.api import Infer, Lane, Limits, Priority, Request, Result, Workers
from gpuinfer.errors import UsageError
from gpuinfer.stats import Lane as LedgerLane


class FakeInfer(Infer):
    """Answers each request with `answer(request)`, at once, and keeps it in `requests`. It starts no processes."""

    def __init__(self, answer: Callable[[Request], Result], limits: Limits | None = None) -> None:
        self.limits = limits or Limits(max_rows=4096)
        self.stopping = asyncio.Event()
        self.requests: list[Request] = []
        self.live: set[Hashable] = set()
        self.lanes: list[LedgerLane] = []
        self._answer = answer

    async def __call__(
        self,
        payload: Any,
        *,
        rows: int = 1,
        priority: Priority = Priority.NORMAL,
        timeout: float = math.inf,
        group: Hashable = None,
        client: Hashable = None,
    ) -> Result:
        now = asyncio.get_running_loop().time()
        request = Request(payload, rows, now, priority, now + timeout, group, client)
        self.requests.append(request)
        await asyncio.sleep(0)
        return self._answer(request)

    @contextmanager
    def client(self) -> Iterator[Hashable]:
        me = object()
        self.live.add(me)
        try:
            yield me
        finally:
            self.live.remove(me)

    def lane(self, name: str) -> Lane:
        lane = LedgerLane(name)
        self.lanes.append(lane)
        return lane

    def workers(self, target: str, arguments: Sequence[Mapping[str, Any]]) -> AbstractAsyncContextManager[Workers]:
        raise UsageError(f"FakeInfer starts no processes, so not '{target}'. Try it with `gpuinfer` itself.")


def tiny_model(inputs: int = 8) -> Any:
    """A linear torch model from features [rows, inputs] to [rows, 3], for backends that need some model."""
    import torch

    return torch.nn.Linear(inputs, 3)

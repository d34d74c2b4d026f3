"""A run's way to answers with something changed: all that a class does not say otherwise is handed through."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any

from gpuinfer.api import Infer, Lane, Limits, ModelSpec, Priority, Stream, Workers


class Passing(Infer):
    """Stands in the place of `own`."""

    def __init__(self, own: Infer) -> None:
        self._own = own
        self.roofline, self.stopping = own.roofline, own.stopping

    @property
    def limits(self) -> Limits:  # type: ignore[override]
        return self._own.limits

    @property
    def has_model(self) -> bool:
        return self._own.has_model

    async def ready(self) -> Limits:
        return await self._own.ready()

    async def __call__(self, payload: Any, **ways: Any) -> Any:
        return await self._own(payload, **ways)

    def stream(
        self,
        payload: Any,
        *,
        rows: int = 1,
        priority: Priority = Priority.NORMAL,
        timeout: float = float("inf"),
        group: Hashable = None,
        client: Hashable = None,
    ) -> Stream:
        return self._own.stream(payload, rows=rows, priority=priority, timeout=timeout, group=group, client=client)

    def block(self, rows: int) -> Any:
        return self._own.block(rows)

    def beside(self, spec: ModelSpec, share: float = 1.0) -> Infer:
        return self._own.beside(spec, share)

    async def update(self, version: str, weights: str, *, adapter: str | None = None, drain: bool = True) -> None:
        await self._own.update(version, weights, adapter=adapter, drain=drain)

    def watch(self, kind: type) -> None:
        self._own.watch(kind)

    async def counted(self) -> Mapping[str, Any]:
        return await self._own.counted()

    def client(self) -> AbstractContextManager[Hashable]:
        return self._own.client()

    def lane(self, name: str) -> Lane:
        return self._own.lane(name)

    def workers(self, target: str, arguments: Any) -> AbstractAsyncContextManager[Workers]:
        return self._own.workers(target, arguments)

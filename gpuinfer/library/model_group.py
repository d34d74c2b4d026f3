"""`Models`: several models on one device, each with a share of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from gpuinfer.api import Priority
from gpuinfer.errors import UnknownName, UsageError
from gpuinfer.library.batcher import Batcher, SharedDevice


class Models:
    """Several models, each answering rows as a `Batcher` does, that share a device.

        with gpuinfer.Models(policy=a, value=b, share={"policy": 3}) as models:
            move, worth = models.predict_many([("policy", x), ("value", y)])      # (name, row), as many as you like
            models["value"].verdict()

    `share`: where several want the device at once, "policy" has three times as much of it as a model with a share of 1,
    which is what each has that is not named. `options`: keyword arguments of `Batcher` for all of them (`devices`,
    `dtype`, `backend`, `strategy`, …), in a mapping from a model's name for one alone: `{"policy": {"ragged": "pad"}}`.
    """

    def __init__(
        self,
        models: Mapping[str, Any] | None = None,
        /,
        *,
        share: Mapping[str, float] | None = None,
        options: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        given = {**models, **named} if isinstance(models, Mapping) else named
        if not given or not isinstance(models, Mapping | None):
            raise UsageError("Models needs a model at least. Name them: gpuinfer.Models(policy=net, value=other).")
        shares, common = dict(share or {}), dict(options or {})
        own = {name: common.pop(name) for name in given if isinstance(common.get(name), Mapping)}
        for name, part in shares.items():
            if name not in given:
                raise UnknownName("model", name, given, label="Models")
            if not isinstance(part, int | float) or not part > 0:
                raise UsageError(f"share of '{name}' is {part!r}. Give a number above 0, such as 3.")
        device = SharedDevice()
        self._batchers = {
            name: Batcher(model, share=float(shares.get(name, 1.0)), **{**common, **own.get(name, {})})
            for name, model in given.items()
        }
        for batcher in self._batchers.values():
            batcher.share_device(device)

    def __getitem__(self, name: str) -> Batcher:
        """One of them. Raises `UnknownName`."""
        if name not in self._batchers:
            raise UnknownName("model", name, self._batchers, label="Models")
        return self._batchers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._batchers)

    def __len__(self) -> int:
        return len(self._batchers)

    def __enter__(self) -> Self:
        try:
            for batcher in self._batchers.values():
                batcher.__enter__()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        return f"<gpuinfer.Models {', '.join(map(repr, self._batchers.values()))}>"

    def close(self) -> None:
        """Answer what was asked, then close them all."""
        with contextlib.ExitStack() as closing:
            for batcher in self._batchers.values():
                closing.callback(batcher.close)

    def predict(
        self, name: str, row: Any, *, priority: Priority | str = Priority.NORMAL, timeout: float | str | None = None
    ) -> Any:
        """The answer of one model to one row: see `Batcher.predict`."""
        return self[name].predict(row, priority=priority, timeout=timeout)

    def submit(self, name: str, row: Any, *, priority: Priority | str = Priority.NORMAL) -> Future[Any]:
        """Ask one model for one row: see `Batcher.submit`."""
        return self[name].submit(row, priority=priority)

    def predict_many(
        self,
        requests: Iterable[tuple[str, Any]] | Mapping[str, Any],
        *,
        priority: Priority | str = Priority.NORMAL,
        timeout: float | str | None = None,
    ) -> list[Any]:
        """The answers to pairs of a model's name and a row (or a dict of them), in their order; all asked at once."""
        futures = [self[name].submit(row, priority=priority, timeout=timeout) for name, row in _pairs(requests)]
        return [future.result() for future in futures]

    async def __call__(
        self, name: str, row: Any, *, priority: Priority | str = Priority.NORMAL, timeout: float | str | None = None
    ) -> Any:
        """`predict`, awaited, from any event loop."""
        return await self[name](row, priority=priority, timeout=timeout)

    async def many(
        self,
        requests: Iterable[tuple[str, Any]] | Mapping[str, Any],
        *,
        priority: Priority | str = Priority.NORMAL,
        timeout: float | str | None = None,
    ) -> list[Any]:
        """`predict_many`, awaited."""
        asked = [self(name, row, priority=priority, timeout=timeout) for name, row in _pairs(requests)]
        return list(await asyncio.gather(*asked))

    def stats(self) -> dict[str, dict[str, Any]]:
        """The figures of each model: see `Batcher.stats`."""
        return {name: batcher.stats() for name, batcher in self._batchers.items()}

    def report(self) -> dict[str, dict[str, Any]]:
        """The report of each model: see `Batcher.report`."""
        return {name: batcher.report() for name, batcher in self._batchers.items()}


def _pairs(requests: Iterable[tuple[str, Any]] | Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Raises `UsageError` for what is no pair of a name and a row."""
    pairs = list(requests.items() if isinstance(requests, Mapping) else requests)
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise UsageError(
                'predict_many takes pairs of a model\'s name and a row. Give [("policy", x), ("value", y)].'
            )
    return pairs

"""Rollouts for a trainer in the same process: batches as an asynchronous iterator, and the way back for weights.

async with rollouts(env="arithmetic", model="tiny", groups=64, batch_groups=8) as stream:
    async for batch in stream:
        ...  # train on batch.groups
        await stream.update(batch.version + 1, "adapter/", adapter="policy")
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from gpuinfer.api import Backend, Setup, Strategy
from gpuinfer.config import blame, registry
from gpuinfer.rollouts.trainer import BatchHandoff, TrainerBatch
from gpuinfer.workloads.rollouts.workload import Rollouts

__all__ = ["RolloutStream", "rollouts"]


class RolloutStream:
    """A run beside its trainer, on one event loop. It begins with `async with`, and is over with its end.

    Asking for the next batch says that the one before is trained on. What the trainer computes should not block the
    event loop: in a thread (`asyncio.to_thread`) it leaves the games to go on.
    """

    def __init__(self, workload: Rollouts, backend: Backend, strategy: Strategy, settings: Mapping[str, Any]) -> None:
        self._workload, self._backend, self._strategy, self._settings = workload, backend, strategy, settings
        self._hand = workload.consumer = BatchHandoff()
        self._run: asyncio.Task[dict[str, Any]] | None = None
        self._out: int | None = None  # the batch that the trainer has
        self._told: dict[str, Any] = {}  # of it
        self.report: dict[str, Any] | None = None  # of the run, once it is over

    @property
    def version(self) -> int:
        """Of the trainer's weights now."""
        return self._hand.training.version

    async def __aenter__(self) -> Self:
        from gpuinfer.runtime.run import execute

        self._run = asyncio.create_task(
            execute(self._workload, self._backend, self._strategy, settings=self._settings, roofline=False)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A run that is not over is stopped: what is played and written stays."""
        self._hand.leave()
        if self._run is not None:
            self._run.cancel()
            await asyncio.wait({self._run})
            if not self._run.cancelled():
                self._run.exception()  # raised where the batches were asked for, or not of interest any more

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TrainerBatch:
        """The next batch; the last may be smaller. Raises what the run raises; `RuntimeError` before `async with`."""
        if self._run is None:
            raise RuntimeError("a stream begins with `async with`")
        if self._out is not None:
            number, told = self._out, self._told
            self._out, self._told = None, {}
            self._hand.done(number, **told)
        self._hand.want(self._workload.options.batch_groups)
        coming = asyncio.create_task(self._hand.next(None))
        try:
            await asyncio.wait({coming, self._run}, return_when=asyncio.FIRST_COMPLETED)
            batch = coming.result() if coming.done() else None
        finally:
            coming.cancel()
        if batch is None:
            self.report = await self._run
            raise StopAsyncIteration
        self._out = batch.number
        return batch

    async def update(self, version: int, weights: str | None = None, *, adapter: str | None = None) -> None:
        """The trainer's weights are of this version now, which is the next. With `weights` (a folder or a safetensors
        file; with `adapter`, of the adapter that prompts call so) the backend computes with them from now on.

        Raises `UsageError` for another version and for weights that do not fit, with the old ones in force.
        """
        await self._hand.training.update(version, weights, adapter)

    def tell(
        self,
        *,
        logprobs: Mapping[str, Sequence[Sequence[float]]] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """What came of the present batch, for its step's record: see `Trained`."""
        self._told = {"logprobs": logprobs, "metrics": metrics}


def rollouts(
    *,
    backend: str = "inprocess",
    backend_options: Mapping[str, Any] | None = None,
    strategy: str = "dynamic",
    strategy_options: Mapping[str, Any] | None = None,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "float32",
    **options: Any,
) -> RolloutStream:
    """A stream of the batches of one run. `options` are those of `gpuinfer rollouts`, with underscores.

    Raises `UsageError` and `pydantic.ValidationError` for what the command would refuse.
    """
    setup = Setup(devices=(device,), dtype=dtype, seed=seed)
    workload = Rollouts(setup, **options)
    served = replace(setup, model=workload.model(), deterministic=workload.deterministic)
    settings = {"workload": "rollouts", "backend": backend, "strategy": strategy}
    return RolloutStream(
        workload,
        blame.make(registry.load("backends", backend), served, backend_options or {}),
        blame.make(registry.load("strategies", strategy), served, strategy_options or {}),
        settings,
    )

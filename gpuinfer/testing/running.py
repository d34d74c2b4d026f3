"""A workload in a run of its own: the real session, its worker processes, and a backend that costs little."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from gpuinfer.api import Backend, Infer, Progress, Workload
from gpuinfer.errors import GpuinferError
from gpuinfer.runtime import run
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.testing.fakes import Answerer

RUN_S = 2.0  # of work before it is asked to stop
LOOK_S = 0.05  # between two looks at how far it is
GRACE_S = 5.0  # to keep what is finished and return


class FaultyProgress:
    """Looks at each progress of a run, beside the one before."""

    def __init__(self) -> None:
        self._last: Progress | None = None

    def look(self, progress: Progress) -> str | None:
        last, self._last = self._last, progress if isinstance(progress, Progress) else None
        if not isinstance(progress, Progress):
            return f"it yielded {progress!r}. Yield gpuinfer.api.Progress."
        if last and not last.setup and progress.done < last.done:
            return f"done went from {last.done} to {progress.done}. Every field is a total since the start."
        return None


class Trial:
    """Runs a workload as `gpuinfer NAME` would, without a screen and a roofline."""

    def __init__(self, workload_factory: Callable[[], Workload], limit_s: float) -> None:
        self._build = workload_factory
        self._run_s, self._grace_s = min(RUN_S, limit_s / 2), min(GRACE_S, limit_s)

    async def __call__(self, stop: bool) -> str | None:
        """What is wrong, or None. It is asked to stop after two seconds of work, or at its first progress."""
        workload = self._build()
        watched, began = _Watched(workload), time.monotonic()

        def enough(update: run.Update) -> bool:
            worked = watched.seen > 0 and not update.progress.setup and (stop or update.elapsed_s > self._run_s)
            watched.asked_at = watched.asked_at or (time.monotonic() if worked else 0.0)
            return worked

        try:
            await run.execute(
                workload,
                backend_for(workload),
                Dynamic(),
                roofline=False,
                until=enough,
                update_s=LOOK_S,
                grace_s=self._grace_s,
            )
        except GpuinferError as error:
            return f"after {time.monotonic() - began:.1f} s its run ended with: {error}"
        if watched.fault:
            return watched.fault
        if watched.asked_at and time.monotonic() - watched.asked_at > self._grace_s:
            cure = "Keep what is finished and return when infer.stopping is set."
            return f"asked to stop, it went on for {self._grace_s:g} s and was cancelled. {cure}"
        return None if watched.seen else "it yielded no Progress. Yield one now and then, and one at the end."


class _Watched:
    """Puts itself between a workload and whoever follows its progress."""

    def __init__(self, workload: Workload) -> None:
        self.seen, self.fault, self.asked_at = 0, "", 0.0
        self._run, self._faulty = workload.run, FaultyProgress()
        workload.run = self._follow  # type: ignore[method-assign]

    async def _follow(self, infer: Infer) -> AsyncIterator[Progress]:
        async with contextlib.aclosing(self._run(infer)) as stream:  # type: ignore[type-var]
            async for progress in stream:
                self.seen += 1
                self.fault = self.fault or self._faulty.look(progress) or ""
                if isinstance(progress, Progress):
                    yield progress


def backend_for(workload: Workload) -> Backend:
    """The backend of a model of rows itself, in this process; for the rest one that makes answers up."""
    spec: Any = workload.model()
    setup = replace(workload.setup, model=spec, processes=workload.processes, device="cpu")
    if spec is not None and spec.kind == "rows" and workload.asks:
        from gpuinfer.backends.inprocess import InProcess

        return InProcess(setup)
    return Answerer(setup)

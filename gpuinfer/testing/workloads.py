"""What a workload promises, tried on answers that cost nothing, or in a real run: session, worker processes, and a
backend that costs little.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

from gpuinfer.api import Backend, Infer, ModelSpec, Progress, Request, Result, Workload
from gpuinfer.errors import GpuinferError
from gpuinfer.host import error_text
from gpuinfer.runtime import run
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.testing.fakes import Answerer, FakeInfer
from gpuinfer.testing.findings import Examination, Finding, check_build, check_options, run_bounded

RUN_S = 2.0  # of work before it is asked to stop
UPDATE_S = 0.05  # between two progress updates
GRACE_S = 5.0  # to keep what is finished and return


class FaultyProgress:
    """Checks each progress of a run against the one before."""

    def __init__(self) -> None:
        self._last: Progress | None = None

    def check(self, progress: Progress) -> str | None:
        last, self._last = self._last, progress if isinstance(progress, Progress) else None
        if not isinstance(progress, Progress):
            return f"it yielded {progress!r}. Yield gpuinfer.api.Progress."
        if last and not last.setup and progress.done < last.done:
            return f"done went from {last.done} to {progress.done}. Every field is a total since the start."
        return None


class WorkloadTrial:
    """Runs a workload as `gpuinfer NAME` would, without a screen and a roofline."""

    def __init__(self, workload_factory: Callable[[], Workload], limit_s: float) -> None:
        self._build = workload_factory
        self._run_s, self._grace_s = min(RUN_S, limit_s / 2), min(GRACE_S, limit_s)

    async def __call__(self, stop: bool) -> str | None:
        """What is wrong, or None. It is asked to stop after two seconds of work, or at its first progress."""
        workload = self._build()
        watched, began = _Watched(workload), time.monotonic()

        def enough(update: run.RunUpdate) -> bool:
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
                update_s=UPDATE_S,
                grace_s=self._grace_s,
            )
        except GpuinferError as error:
            return f"after {time.monotonic() - began:.1f} s its run ended with: {error_text.full_message(error)}"
        if watched.fault:
            return watched.fault
        if watched.asked_at and time.monotonic() - watched.asked_at > self._grace_s:
            cure = "Keep what is finished and return when infer.stopping is set."
            return f"asked to stop, it went on for {self._grace_s:g} s and was cancelled. {cure}"
        return None if watched.seen else "it yielded no Progress. Yield one now and then, and one at the end."


class _Watched:
    """Stands between a workload and the run that follows its progress."""

    def __init__(self, workload: Workload) -> None:
        self.seen, self.fault, self.asked_at = 0, "", 0.0
        self._run, self._faulty = workload.run, FaultyProgress()
        workload.run = self._follow  # type: ignore[method-assign]

    async def _follow(self, infer: Infer) -> AsyncIterator[Progress]:
        async with contextlib.aclosing(self._run(infer)) as stream:  # type: ignore[type-var]
            async for progress in stream:
                self.seen += 1
                self.fault = self.fault or self._faulty.check(progress) or ""
                if isinstance(progress, Progress):
                    yield progress


def backend_for(workload: Workload) -> Backend:
    """The backend of a model of rows itself, in this process; for the rest one that makes answers up."""
    spec: Any = workload.model()
    setup = replace(workload.setup, model=spec, processes=workload.processes, devices=("cpu",))
    if spec is not None and spec.kind == "rows" and workload.asks:
        from gpuinfer.backends.inprocess import InProcess

        return InProcess(setup)
    return Answerer(setup)


RUNS = 3  # limits that a run may take: it starts processes, and loads a model

Run = Callable[[bool], Awaitable[str | None]]
"""One run, asked to stop at its first progress or left to end: what is wrong with it, or None."""


def check_workload(
    workload_factory: Callable[[], Workload],
    answer: Callable[[Request], Result] | None = None,
    timeout_s: float = 30.0,
    *,
    examiner: Examination | None = None,
) -> list[Finding]:
    """Every promise of `api.Workload`; each check may take `timeout_s`, a run three times that, or what `examiner`
    allows.

    With `answer`, which stands in for the model, it runs on a `FakeInfer`. Without, in a real run: with its model, or a
    stand-in that answers prompts and echoes rows, and with the worker processes that it asks for; it is stopped after
    two seconds.
    """

    def check(examiner: Examination) -> None:
        if (workload := check_build(workload_factory, Workload, examiner)) is None:
            return
        check_options(workload, examiner)
        if examiner.check("names its model and processes", lambda: _fault_of_needs(workload)):
            run: Run = WorkloadTrial(workload_factory, examiner.limit_s)
            if answer is not None:
                run = functools.partial(_run_on_fakes, workload_factory, answer)
            asyncio.run(_check_runs(run, examiner, once=answer is None))

    return run_bounded(check, examiner or Examination(timeout_s))


async def _check_runs(run: Run, examiner: Examination, once: bool) -> None:
    """`once`: a run that did not end need not be tried again, since it was asked to stop."""
    limit_s = RUNS * examiner.limit_s
    await examiner.check_async("runs and tells how far it is", lambda: run(False), limit_s)
    if examiner.hung and once:
        examiner.skip("ends soon when asked to stop", "it did not end by itself")
    else:
        await examiner.check_async("ends soon when asked to stop", lambda: run(True), limit_s)


def _fault_of_needs(workload: Workload) -> str | None:
    model = workload.model()
    if model is not None and not isinstance(model, ModelSpec):
        return f"model() gave {model!r}. Return a ModelSpec, or None."
    if workload.processes < 1:
        return f"processes is {workload.processes}. Return how many processes open the backend, at least 1."
    return None


async def _run_on_fakes(
    workload_factory: Callable[[], Workload], answer: Callable[[Request], Result], stop: bool
) -> str | None:
    infer, faulty = FakeInfer(answer), FaultyProgress()
    last: Progress | None = None
    async for progress in workload_factory().run(infer):
        await asyncio.sleep(0)
        if fault := faulty.check(progress):
            return fault
        last = progress
        if stop:
            infer.stopping.set()
    if infer.live:
        return f"{len(infer.live)} clients never left. Use `with infer.client() as me:`."
    return None if last else "it yielded no Progress. Yield one now and then, and one at the end."

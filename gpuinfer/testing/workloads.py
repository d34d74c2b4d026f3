"""What a workload promises, tried on answers that cost nothing or in a run of its own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable

from gpuinfer.api import ModelSpec, Progress, Request, Result, Workload
from gpuinfer.testing.fakes import FakeInfer
from gpuinfer.testing.findings import Examiner, Finding, check_options, run_bounded
from gpuinfer.testing.running import FaultyProgress, Trial

RUNS = 3  # limits that a run may take: it starts processes, and loads a model

Run = Callable[[bool], Awaitable[str | None]]
"""One run, asked to stop at its first progress or left to end: what is wrong with it, or None."""


def check_workload(
    workload_factory: Callable[[], Workload],
    answer: Callable[[Request], Result] | None = None,
    timeout_s: float = 30.0,
    *,
    examiner: Examiner | None = None,
) -> list[Finding]:
    """Every promise of `api.Workload`; each check may take `timeout_s`, a run three times that, or what `examiner`
    allows.

    With `answer`, which stands in for the model, it runs on a `FakeInfer`. Without, in a real run: with its model, or a
    stand-in that answers prompts and echoes rows, and with the worker processes that it asks for; it is stopped after
    two seconds.
    """

    def check(examiner: Examiner) -> None:
        workloads: list[Workload] = []
        if not examiner.check("builds", lambda: _fault_of_build(workload_factory, workloads)):
            return
        check_options(workloads[0], examiner)
        if examiner.check("names its model and processes", lambda: _fault_of_needs(workloads[0])):
            run: Run = Trial(workload_factory, examiner.limit_s)
            if answer is not None:
                run = functools.partial(_run_on_fakes, workload_factory, answer)
            asyncio.run(_check_runs(run, examiner, once=answer is None))

    return run_bounded(check, examiner or Examiner(timeout_s))


async def _check_runs(run: Run, examiner: Examiner, once: bool) -> None:
    """`once`: a run that did not end need not be tried again, since it was asked to stop."""
    limit_s = RUNS * examiner.limit_s
    await examiner.check_async("runs and tells how far it is", lambda: run(False), limit_s)
    if examiner.hung and once:
        examiner.skip("ends soon when asked to stop", "it did not end by itself")
    else:
        await examiner.check_async("ends soon when asked to stop", lambda: run(True), limit_s)


def _fault_of_build(workload_factory: Callable[[], Workload], built: list[Workload]) -> str | None:
    workload = workload_factory()
    built.append(workload)
    return None if isinstance(workload, Workload) else f"{workload!r} is no gpuinfer.api.Workload. Derive it from that."


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
        if fault := faulty.look(progress):
            return fault
        last = progress
        if stop:
            infer.stopping.set()
    if infer.live:
        return f"{len(infer.live)} clients never left. Use `with infer.client() as me:`."
    return None if last else "it yielded no Progress. Yield one now and then, and one at the end."

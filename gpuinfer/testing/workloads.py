"""What a workload promises, tried on answers that cost nothing."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from gpuinfer.api import ModelSpec, Progress, Request, Result, Workload
from gpuinfer.testing.fakes import FakeInfer
from gpuinfer.testing.findings import Finding, check_options, examine, examine_async, run_bounded


def check_workload(
    workload_factory: Callable[[], Workload],
    answer: Callable[[Request], Result] | None = None,
    timeout_s: float = 30.0,
) -> list[Finding]:
    """Every promise of `api.Workload`. It is only run when `answer` is given, which stands in for the model."""

    def check(findings: list[Finding]) -> None:
        workloads: list[Workload] = []
        findings.append(examine("builds", lambda: _fault_of_build(workload_factory, workloads)))
        if not findings[0].ok:
            return
        findings.extend(check_options(workloads[0]))
        findings.append(examine("names its model and processes", lambda: _fault_of_needs(workloads[0])))
        if answer is not None:
            asyncio.run(_run(workload_factory, answer, timeout_s, findings))

    return run_bounded(check, 3 * timeout_s)


async def _run(
    workload_factory: Callable[[], Workload],
    answer: Callable[[Request], Result],
    timeout_s: float,
    findings: list[Finding],
) -> None:
    runs = {"runs and tells how far it is": False, "ends soon when asked to stop": True}
    for name, stop in runs.items():
        run = functools.partial(_fault_of_run, workload_factory, answer, stop=stop)
        findings.append(await examine_async(name, run, timeout_s))


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


async def _fault_of_run(
    workload_factory: Callable[[], Workload], answer: Callable[[Request], Result], *, stop: bool
) -> str | None:
    infer = FakeInfer(answer)
    last: Progress | None = None
    async for progress in workload_factory().run(infer):
        await asyncio.sleep(0)
        if fault := _fault_of_progress(last, progress):
            return fault
        last = progress
        if stop:
            infer.stopping.set()
    if infer.live:
        return f"{len(infer.live)} clients never left. Use `with infer.client() as me:`."
    return None if last else "it yielded no Progress. Yield one now and then, and one at the end."


def _fault_of_progress(last: Progress | None, progress: Progress) -> str | None:
    if not isinstance(progress, Progress):
        return f"it yielded {progress!r}. Yield gpuinfer.api.Progress."
    if last and not last.setup and progress.done < last.done:
        return f"done went from {last.done} to {progress.done}. Every field is a total since the start."
    return None

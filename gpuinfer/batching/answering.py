"""One batch and its backend: call it, check what it answers, settle each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized

from gpuinfer import blame
from gpuinfer.api import Backend, Lane, Request, Result
from gpuinfer.batching.checks import find_fault
from gpuinfer.batching.settling import Unsettled
from gpuinfer.errors import BackendError, BadResult, GpuinferError


async def answer(
    backend: Backend, requests: tuple[Request, ...], unsettled: Unsettled, lane: Lane, clock: Callable[[], float]
) -> float:
    """Have the backend answer, and settle what it answers; returns the seconds that the backend took.

    Raises whatever the backend raises, and `BadResult` or `BackendError` when it does not answer every request: then
    some are left unsettled.
    """
    started = clock()
    if backend.streams:
        await _follow(backend, requests, unsettled, clock)
        return clock() - started
    results = await backend.infer(requests)
    ended = clock()
    lane.enter("reply")
    _check_count(backend, requests, results)
    for request, result in zip(requests, results, strict=True):
        _settle(backend, request, result, unsettled, ended)
    return ended - started


async def _follow(
    backend: Backend, requests: tuple[Request, ...], unsettled: Unsettled, clock: Callable[[], float]
) -> None:
    async for event in backend.stream(requests):
        if not event.last:
            continue
        if event.error is not None:
            unsettled.fail(event.request, as_failure(backend, event.error))
        else:
            _settle(backend, event.request, event.value, unsettled, clock())
    missing = sum(request in unsettled for request in requests)
    if missing:
        raise BackendError(
            f"{blame.who(backend)}: stream ended with {missing} of {len(requests)} requests unanswered. "
            f"Yield an Event with last=True for each request."
        )


def _check_count(backend: Backend, requests: Sequence[Request], results: Sequence[Result]) -> None:
    if not isinstance(results, Sized):
        got = f"a {type(results).__name__}"
    elif len(results) != len(requests):
        got = f"{len(results)} results"
    else:
        return
    raise BadResult(
        f"{blame.who(backend)}: infer gave {got} for {len(requests)} requests. "
        f"Return a list with one result for each request, in order."
    )


def _settle(backend: Backend, request: Request, result: Result, unsettled: Unsettled, now: float) -> None:
    if isinstance(result, BaseException):  # this request's own failure: its neighbours are answered
        unsettled.fail(request, as_failure(backend, result))
        return
    fault = find_fault(result, request.rows)
    if fault is None:
        unsettled.answer(request, result, now)
    else:
        unsettled.fail(request, BadResult(f"{blame.who(backend)} answered badly: {fault}"))


def as_failure(backend: Backend, error: BaseException) -> GpuinferError:
    """What a request that met this error is told: our own errors as they are, anything else as a BackendError."""
    if isinstance(error, GpuinferError):
        return error
    method = "stream" if backend.streams else "infer"
    failure = BackendError(
        f"{blame.who(backend)}: {method} raised {blame.in_short(error)}. Only its batch failed. {blame.cure(backend)}"
    )
    failure.__cause__ = error
    return failure

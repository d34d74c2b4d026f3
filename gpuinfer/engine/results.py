"""One batch and its backend: call it, check its results, settle each request exactly once.

A backend answers one row of output for each row of input, with no NaN or +inf anywhere. Arrays are known by what they
offer (`shape`, `dtype`, `max`), so that NumPy, torch and others are all checked and none of them is imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, Protocol

from gpuinfer.api import Backend, Lane, Request, Result
from gpuinfer.config import blame
from gpuinfer.engine.core import outcome_of
from gpuinfer.errors import BackendError, BadResult, GpuinferError
from gpuinfer.generation import Part
from gpuinfer.host import error_text

OnPart = Callable[[Part], None]


class Future(Protocol):
    """Of one result: `asyncio.Future` of the engine's own loop, or one that another thread waits for."""

    def done(self) -> bool: ...
    def cancel(self) -> object: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, error: BaseException, /) -> None: ...


Settled = Callable[[Request, str, float, object], None]
"""Called with each request as it leaves: how it ended ("ok", or one of `stats.ERRORS`), when, its result or error."""


class Unsettled:
    """Requests and their futures, from `submit` to the answer. Settling a request that has left does nothing."""

    def __init__(self, settled: Settled, clock: Callable[[], float]) -> None:
        self.parts = 0  # handed over so far
        self._futures: dict[Request, Future] = {}
        self._on_part: dict[Request, OnPart] = {}  # of the requests that are read as they grow
        self.settled, self._clock = settled, clock

    def __len__(self) -> int:
        return len(self._futures)

    def __contains__(self, request: Request) -> bool:
        return request in self._futures

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._futures))

    def add(self, request: Request, future: Future, on_part: OnPart | None = None) -> None:
        """`on_part` is handed the parts of the answer as they come; it must neither wait nor raise."""
        self._futures[request] = future
        if on_part is not None:
            self._on_part[request] = on_part

    def cancelled(self, request: Request) -> bool:
        """Whether its client has given up, perhaps without a cancellation so far."""
        return self._futures[request].done()

    def hand_over(self, request: Request, part: Part) -> None:
        if (on_part := self._on_part.get(request)) is not None and not self._futures[request].done():
            self.parts += 1
            on_part(part)

    def answer(self, request: Request, result: Result, now: float) -> None:
        future = self._release(request, "ok", now, result)
        if future is not None:
            future.set_result(result)

    def fail(self, request: Request, error: GpuinferError) -> None:
        if future := self._release(request, outcome_of(error), self._clock(), error):
            future.set_exception(error)

    def fail_all(self, requests: Iterable[Request], error: GpuinferError) -> None:
        for request in requests:
            self.fail(request, error)

    def drop(self, request: Request) -> None:
        """Forget a request whose client wants no answer any more."""
        self._futures[request].cancel()
        self._release(request, "cancelled", self._clock())

    def _release(self, request: Request, outcome: str, now: float, detail: object = "") -> Future | None:
        """Take a request off the books. Its future is for the caller to settle; None when it has been cancelled."""
        future = self._futures.pop(request, None)
        if future is None:
            return None
        if request.parts:
            self._on_part.pop(request, None)
        gone = future.done()
        self.settled(request, "cancelled" if gone else outcome, now, detail)
        return None if gone else future


class CheckedResult:
    """A result that its backend has checked itself, for all rows of a batch at once."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


PLAIN = frozenset(
    {type(None), bool, int, float, str, bytes, CheckedResult}
)  # answers that need no check, by far the most


def find_fault(result: Any, rows: int) -> str | None:
    """What is wrong with one request's result, ending with the cure; None when nothing is.

    Arrays count wherever they lie in tuples, lists and mappings. -inf is allowed: it is how logits are masked.
    """
    if type(result) in PLAIN:
        return None
    try:
        return _fault_of(result, rows, "the result")
    except Exception as error:  # noqa: BLE001 (an odd object must fail its own request, not the engine)
        complaint = error_text.full_message(error)
        return f"the result cannot be checked: {complaint}. Return arrays [rows, ...], or plain values."


def _fault_of(value: Any, rows: int, name: str) -> str | None:
    parts: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, tuple | list):
        parts = enumerate(value)
    else:
        shape = getattr(value, "shape", None)
        if not isinstance(shape, tuple) or not hasattr(value, "dtype"):
            return None
        if not shape or shape[0] != rows:
            return (
                f"{name} has shape {list(shape)} for a request of {rows} {'row' if rows == 1 else 'rows'}. "
                f"Return [{rows}, ...]: one row of output for each row of input."
            )
        torch_says = getattr(value.dtype, "is_floating_point", None)
        floating = torch_says if torch_says is not None else getattr(value.dtype, "kind", "") == "f"
        if floating and 0 not in shape and not float(value.max()) < math.inf:  # a NaN wins every max
            return (
                f"{name}, {value.dtype} {list(shape)}, holds NaN or +inf. "
                f"Check the model's weights and inputs; to mask logits use -inf."
            )
        return None
    for key, part in parts:
        if type(part) not in PLAIN and (fault := _fault_of(part, rows, f"{name}[{key!r}]")):
            return fault
    return None


async def answer(
    backend: Backend, requests: tuple[Request, ...], unsettled: Unsettled, lane: Lane, clock: Callable[[], float]
) -> float:
    """Have the backend answer, and settle what it answers; returns when the backend was done.

    Raises whatever the backend raises, and `BadResult` or `BackendError` when it does not answer every request: then
    some are left unsettled.
    """
    if not backend.streams:
        results = await backend.infer(requests)
        ended = clock()
        lane.enter("reply")
        if not isinstance(results, Sized) or len(results) != len(requests):
            got = f"{len(results)} results" if isinstance(results, Sized) else f"a {type(results).__name__}"
            raise BadResult(
                f"{blame.who(backend)}: infer gave {got} for {len(requests)} requests. "
                f"Return a list with one result for each request, in order."
            )
        for request, result in zip(requests, results, strict=True):
            if type(result) in PLAIN:
                unsettled.answer(request, result, ended)
            else:
                _settle(backend, request, result, unsettled, ended)
        return ended
    async for event in backend.stream(requests):
        if event.last:
            if event.error is not None:
                unsettled.fail(event.request, as_failure(backend, event.error))
            else:
                _settle(backend, event.request, event.value, unsettled, clock())
        elif event.request.parts:
            if isinstance(event.value, Part):
                unsettled.hand_over(event.request, event.value)
                continue
            error = f"{blame.who(backend)}: a part of an answer is a {type(event.value).__name__}. "
            error += "Yield Event(request, generation.Part(…), last=False), or no parts at all."
            unsettled.fail(event.request, BadResult(error))
    missing = sum(request in unsettled for request in requests)
    if missing:
        raise BackendError(
            f"{blame.who(backend)}: stream ended with {missing} of {len(requests)} requests unanswered. "
            f"Yield an Event with last=True for each request."
        )
    return clock()


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
    """The error of a request that met this one: our own errors as they are, anything else as a BackendError."""
    if isinstance(error, GpuinferError):
        return error
    method = "stream" if backend.streams else "infer"
    failure = BackendError(
        f"{blame.who(backend)}: {method} raised {error_text.short_message(error)}. Only its batch failed. "
        f"{blame.cure_for(backend)}"
    )
    failure.__cause__ = error
    return failure

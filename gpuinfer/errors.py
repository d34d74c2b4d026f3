"""Every error that gpuinfer raises on purpose.

GpuinferError                 a message for people that ends with the cure; `exit_code` says how the command ends
├── UsageError         (2)    bad flags, settings, names, files
│   ├── UnknownName           no plugin, model or option of that name; the nearest is suggested
│   └── PluginError           a plugin that cannot be imported, or two that offer one name
└── WorkError          (1)    the work itself failed
    ├── RequestError          one request failed; its neighbours did not
    │   ├── QueueFull         refused at once: the bounded queue is full
    │   ├── Expired           its deadline passed before it cost anything
    │   ├── BadPrompt         it cannot be served as it is; its neighbours can
    │   └── BadResult         the backend answered with the wrong shape, a NaN or +inf
    ├── BackendError          the backend raised; in a batch, only that failed
    │   ├── DeviceLost        the batch has cost a device, and is not tried on another
    │   └── BackendDied       the backend is gone
    ├── StrategyError         the strategy raised or chose what it may not
    ├── WorkloadError         the workload raised what it did not foresee
    ├── WorkerDied            a worker process ended before its work did
    └── Closed                the engine was closed first
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator
from typing import Any

LETTERS = 3  # of a word that is taken for the beginning of another


class GpuinferError(Exception):
    """A failure whose message says what happened and ends with the cure."""

    exit_code = 1
    report: dict[str, Any] | None = None  # of the run that failed, as far as it came
    index: int | None = None  # of the prompt that failed, among those that were given to one call


class UsageError(GpuinferError):
    """Bad flags, settings, names or files: nothing has been started."""

    exit_code = 2


class UnknownName(UsageError):
    """No such plugin, model or option. `hint`: what is suggested, where that is not the nearest name."""

    def __init__(self, what: str, name: str, known: Iterable[str], label: str = "Installed", hint: str = "") -> None:
        known = sorted(known)
        if not hint and (near := nearest(name, known)):
            hint = f"Did you mean '{near}'?"
        between = f" {hint}" if hint else ""
        super().__init__(f"no {what} named '{name}'.{between} {label}: {', '.join(known) or 'none'}.")


class PluginError(UsageError):
    """A plugin that cannot be imported, or two packages that offer one name."""


class WorkError(GpuinferError):
    """The work failed after it was started."""


class RequestError(WorkError):
    """One request failed; its neighbours did not."""


class QueueFull(RequestError):
    """Turned away, because the bounded queue has no room for the request's rows."""

    retry_after_s: float | None = None  # when there may be room, as far as that is known


class Expired(RequestError):
    """The deadline passed before the request was sent to the backend."""


class BadPrompt(RequestError):
    """This prompt, or what is asked of its answer, cannot be served; its neighbours can."""


class PromptTooLong(BadPrompt):
    """The prompt leaves no room for an answer in the model's context."""


class BadResult(RequestError):
    """The backend's answer has the wrong shape, a NaN or +inf."""


class BackendError(WorkError):
    """The backend raised. While it served a batch, only that batch failed."""


class DeviceLost(BackendError):
    """The device that served this batch is gone, and the batch is not to be tried again: it may be the cause."""


class BackendDied(BackendError):
    """The backend is gone and will answer nothing more."""


class StrategyError(WorkError):
    """The strategy raised, or chose requests that it may not choose."""


class WorkloadError(WorkError):
    """The workload raised what is no error of ours, or comes no further."""


class WorkerDied(WorkError):
    """A worker process ended before its work did."""


class Closed(WorkError):
    """The engine was closed before the request was answered."""


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The one of these that is spelled most like it, or the only one that begins so; "" when none is near enough."""
    among = list(known)
    begun = [one for one in among if len(name) >= LETTERS and one.startswith(name)]
    if len(begun) == 1:
        return begun[0]
    return next(iter(difflib.get_close_matches(name, among, n=1, cutoff=cutoff)), "")


@contextlib.contextmanager
def naming(name: str | None) -> Iterator[None]:
    """A `UsageError` that is raised inside begins with this name: which of several it is of. None: there is one."""
    try:
        yield
    except UsageError as error:
        if name is None:
            raise
        raise UsageError(f"{name}: {error}") from error


def unwrap(error: BaseException) -> BaseException:
    """The first error inside groups of errors, such as `asyncio.TaskGroup` raises; else the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

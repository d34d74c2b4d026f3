"""What to say of a worker process that could not start, failed, or is gone."""

from __future__ import annotations

import signal
from collections.abc import Mapping

from gpuinfer.error_wire import rebuilt
from gpuinfer.errors import GpuinferError, UsageError, WorkerDied


def obituary(worker: int, exitcode: int | None) -> str:
    """What to say of a worker process that is gone without having said why."""
    if exitcode is None:
        return (
            f"worker {worker} hears nothing and cannot be killed: it hangs in a call of the system, such as to a disk "
            "or a device that does not answer. See to that, then run again."
        )
    if exitcode == 0:
        return f"worker {worker} has ended and takes no more messages. Send nothing after the message that ends it."
    if exitcode == -signal.SIGKILL:
        return (
            f"worker {worker} was killed (SIGKILL). If nobody did it by hand, the machine ran out of memory: "
            "use fewer workers, or less work in flight."
        )
    if exitcode < 0:
        name = signal.Signals(-exitcode).name
        return f"worker {worker} crashed ({name}). Its last words are above; run again with one worker to see it alone."
    return (
        f"worker {worker} ended with exit code {exitcode} and did not say why. See its last words above; a script that "
        "starts workers must do so under `if __name__ == '__main__':`."
    )


def as_error(worker: int, told: Mapping[str, str]) -> GpuinferError:
    """The worker's error, with its own traceback as a note."""
    error = rebuilt(told["type"], told["message"]) or WorkerDied(
        f"worker {worker} failed: {told['type']}: {told['message']}. Run again with -vv for its traceback."
    )
    error.add_note(f"In worker {worker}:\n{told['traceback']}")
    return error


def cannot_start(error: Exception) -> UsageError:
    return UsageError(
        f"a worker process could not be started: {error}. What a backend's connect() returns, its options, the "
        "strategy's class and the arguments must be picklable: define classes at the top of a module."
    )

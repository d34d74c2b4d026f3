"""The roofline in a process of its own, so that the caller neither imports torch nor is disturbed."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgpack

from gpuinfer.api import ModelSpec, Roofline
from gpuinfer.errors import BackendError, GpuinferError, UsageError
from gpuinfer.host import children

LONGEST_S = 180.0  # a child that has not answered by then never will
LOOK_S = 0.1  # between two looks at whether it is still wanted
GONE_S = 5.0  # for the system to take a killed process away
CURE = "Leave the roofline out with --no-roofline, or try a smaller model."


def measure_in_child(
    spec: ModelSpec,
    *,
    devices: Sequence[str],
    dtype: str,
    seed: int,
    cores: int,
    budget_s: float = 6.0,
    deterministic: bool = False,
    compute: str = "auto",
    only: Roofline | None = None,
    timeout_s: float = LONGEST_S,
    stopped: Callable[[], bool] = lambda: False,
) -> Roofline:
    """`bare.measure` in a spawned process. Blocks, at most `timeout_s`, and ends it as soon as `stopped` says so.

    Raises `UsageError` when the model cannot be built, `BackendError` when the process dies, takes too long or is
    stopped.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    arguments = {
        "devices": list(devices),
        "dtype": dtype,
        "seed": seed,
        "cores": cores,
        "budget_s": budget_s,
        "deterministic": deterministic,
        "compute": compute,
        "only": only,
    }
    child = children.spawn(answer, theirs, spec, arguments, name="gpuinfer-roofline", daemon=True)
    theirs.close()
    try:
        return unpacked(message_from(ours, child, timeout_s, stopped))
    finally:
        ours.close()
        children.end(child, GONE_S)


def message_from(line: Connection, child: Any, timeout_s: float, stopped: Callable[[], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while not line.poll(min(LOOK_S, timeout_s)):
        if stopped():
            raise BackendError("measuring the roofline was stopped. Start it again for the efficiency.")
        if time.monotonic() > deadline:
            raise BackendError(f"measuring the roofline took longer than {timeout_s:g} s. {CURE}")
    try:
        return dict(msgpack.unpackb(line.recv_bytes()))
    except (EOFError, OSError):
        child.join(1.0)
        raise BackendError(
            f"the process that measured the roofline ended with exit code {child.exitcode} before it answered. {CURE}"
        ) from None


def unpacked(message: dict[str, Any]) -> Roofline:
    if "usage" in message:
        raise UsageError(message["usage"])
    if "failure" in message:
        raise BackendError(message["failure"])
    return Roofline(**message)


def answer(line: Connection, spec: ModelSpec, arguments: dict[str, Any]) -> None:
    """The child: one message, the roofline or what went wrong."""
    children.settle_in()
    line.send_bytes(msgpack.packb(outcome(spec, arguments)))


def outcome(spec: ModelSpec, arguments: dict[str, Any]) -> dict[str, Any]:
    from gpuinfer.models.bare import measure

    try:
        found = measure(spec, **arguments)
    except UsageError as error:
        return {"usage": str(error)}
    except GpuinferError as error:
        return {"failure": str(error)}
    except Exception as error:  # noqa: BLE001 (whatever it is, the parent must hear of it)
        return {"failure": f"the roofline raised {type(error).__name__}: {error}. {CURE}"}
    return {"rows_per_s": found.rows_per_s, "at_rows": found.at_rows, "arrangement": found.arrangement}

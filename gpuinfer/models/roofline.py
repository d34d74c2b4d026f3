"""The roofline in a process of its own, so that the caller neither imports torch nor is disturbed."""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import msgpack

from gpuinfer.api import ModelSpec, Roofline
from gpuinfer.errors import BackendError, GpuinferError, UsageError
from gpuinfer.host import children, machine, resident, spoken

LONGEST_S = 180.0  # a child that has not answered by then never will
LOOK_S = 0.1  # between two looks at whether it is still wanted
GONE_S = 5.0  # for the system to take a killed process away
IDLE_S = 30.0  # nobody has asked it for so long: a new one costs less than the memory of this one
CURE = "Leave the roofline out with --no-roofline, or try a smaller model."
INSIDE = "gpuinfer.models.bare"  # what measures, loaded in the child alone: it imports torch


class Measurer:
    """A process that measures the bare model (`bare.measure`), as often as it is asked to, and ends with its parent.

    It loads torch from its start on, and builds the model for each measurement alone: in between it holds none. It ends
    by itself when nobody asks, and after each measurement on CUDA, where it would keep memory; the next one starts
    another.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        devices: Sequence[str],
        dtype: str,
        seed: int,
        cores: int,
        deterministic: bool = False,
        compute: str = "auto",
    ) -> None:
        self._spec = spec
        self._arguments = {
            "devices": list(devices),
            "dtype": dtype,
            "seed": seed,
            "cores": cores,
            "deterministic": deterministic,
            "compute": compute,
        }
        self._child: BaseProcess | None = None
        self._line: Connection
        self.peak_mb = 0.0  # MiB that the process had taken when it last answered

    def start(self) -> BaseProcess:
        """Let it load torch, unless it has begun to. Raises `BackendError` where there is no room for a process."""
        if self._child is not None:
            return self._child
        self._line, theirs = multiprocessing.Pipe()
        try:
            self._child = children.spawn(
                answer, theirs, self._spec, self._arguments, name="gpuinfer-roofline", daemon=True
            )
        except OSError as error:
            self._line.close()
            raise BackendError(f"the process that measures the roofline cannot be started: {error}. {CURE}") from error
        finally:
            theirs.close()
        return self._child

    def measure(
        self,
        budget_s: float,
        *,
        only: Roofline | None = None,
        timeout_s: float = LONGEST_S,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Roofline:
        """Blocks for about `budget_s`, at most `timeout_s`, and ends the process as soon as `stopped` says so. `only`:
        see `bare.measure`.

        Raises `UsageError` when the model cannot be built, `BackendError` when the process dies, takes too long or is
        stopped.
        """
        question = {"budget_s": budget_s, "only": only and [only.rows_per_s, only.at_rows, only.arrangement]}
        try:
            message = self._asked(question, timeout_s, stopped) or self._asked(question, timeout_s, stopped)
        except BaseException:
            self.close()
            raise
        if message is None:
            self.close()
            raise BackendError(f"the process that measures the roofline ends as soon as it has begun. {CURE}")
        self.peak_mb = message.pop("peak_mb")
        return unpacked(message)

    def _asked(
        self, question: Mapping[str, Any], timeout_s: float, stopped: Callable[[], bool]
    ) -> dict[str, Any] | None:
        """Its answer; None when it has ended by itself, so that another is to be asked."""
        child = self.start()
        try:
            self._line.send_bytes(msgpack.packb(question))
            return message_from(self._line, timeout_s, stopped)
        except (EOFError, OSError):
            child.join(1.0)
            code = child.exitcode
            self.close()
            if code == 0:
                return None
            raise BackendError(
                f"the process that measured the roofline ended with exit code {code} before it answered. {CURE}"
            ) from None

    def close(self) -> None:
        """End the process, and with it what is being measured, which raises `BackendError`. It may be started again."""
        child, self._child = self._child, None
        if child is not None:
            children.end(child, GONE_S)  # first, so that whoever listens meanwhile hears its end
            self._line.close()


def message_from(line: Connection, timeout_s: float, stopped: Callable[[], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while not line.poll(min(LOOK_S, timeout_s)):
        if stopped():
            raise BackendError("measuring the roofline was stopped. Start it again for the efficiency.")
        if time.monotonic() > deadline:
            raise BackendError(f"measuring the roofline took longer than {timeout_s:g} s. {CURE}")
    return dict(msgpack.unpackb(line.recv_bytes()))


def unpacked(message: dict[str, Any]) -> Roofline:
    if "usage" in message:
        raise UsageError(message["usage"])
    if "failure" in message:
        raise BackendError(message["failure"])
    return Roofline(**message)


def answer(line: Connection, spec: ModelSpec, arguments: dict[str, Any]) -> None:
    """The child: to each question one message, the roofline or what went wrong."""
    children.settle_in()
    with contextlib.suppress(Exception):  # which is told to the first who asks
        importlib.import_module(INSIDE)
    on_cuda = machine.wants_cuda(arguments["devices"])
    with contextlib.suppress(EOFError, OSError):  # nobody asks any more
        while line.poll(IDLE_S):
            question = msgpack.unpackb(line.recv_bytes())
            only = question["only"] and Roofline(*question["only"])
            found = outcome(spec, {**arguments, "budget_s": question["budget_s"], "only": only})
            if not on_cuda:
                gc.collect()
                resident.give_back()  # the model's memory: a run follows
            line.send_bytes(msgpack.packb({**found, "peak_mb": machine.rss_peak_mb()}))
            if on_cuda:
                return


def outcome(spec: ModelSpec, arguments: dict[str, Any]) -> dict[str, Any]:
    from gpuinfer.models.bare import measure

    try:
        found = measure(spec, **arguments)
    except UsageError as error:
        return {"usage": str(error)}
    except GpuinferError as error:
        return {"failure": str(error)}
    except Exception as error:  # noqa: BLE001 (whatever it is, the parent must hear of it)
        return {"failure": f"the roofline raised {spoken.in_full(error)}. {CURE}"}
    return {"rows_per_s": found.rows_per_s, "at_rows": found.at_rows, "arrangement": found.arrangement}

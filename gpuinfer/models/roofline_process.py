"""Measures the roofline in a process of its own, so that the caller neither imports torch nor is disturbed, and
remembers searches.

The best batch size and arrangement are kept in the user's cache, since the search takes seconds and its result is the
same from run to run. The rate itself is measured anew each time.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpuinfer.api import ModelSpec, Roofline, TextRoofline
from gpuinfer.errors import BackendError, GpuinferError, UsageError
from gpuinfer.host import children, error_text, files, machine, process_memory
from gpuinfer.host.child import Channel, ChannelClosed, Child, how_it_ended
from gpuinfer.host.installation import user_cache_folder
from gpuinfer.models import processor

LONGEST_S = 180.0  # timeout for an answer
LOOK_S = 0.1  # between two checks of `stopped`
GONE_S = 5.0  # for a killed process to disappear
IDLE_S = 30.0  # without a request it ends: starting another costs less than its memory
CURE = "Leave the roofline out with --no-roofline, or try a smaller model."
INSIDE = "gpuinfer.models.roofline_measurement"  # what measures, loaded in the child alone: it imports torch


class RooflineProcess:
    """A process that measures the bare model (`roofline_measurement.measure`) on request, and ends with its parent.

    It loads torch at its start and holds a model only while measuring. It ends by itself when no request comes, and
    after each measurement on CUDA, where it would keep memory; the next request starts another.
    """

    def __init__(self, spec: ModelSpec, **arguments: Any) -> None:
        """`arguments`: those of `roofline_measurement.measure`, but for `budget_s` and `only`."""
        self._spec = spec
        self._arguments = {**arguments, "devices": list(arguments["devices"])}
        self._child: Child | None = None
        self._channel: Channel
        self.peak_mb = 0.0  # MiB that the process had taken when it last answered

    def start(self) -> Child:
        """Start the process, which loads torch, unless it runs. Raises `BackendError` where there is no room for a
        process.
        """
        if self._child is not None:
            return self._child
        try:
            self._child = Child(answer_measurements, self._spec, self._arguments, name="gpuinfer-roofline", daemon=True)
        except OSError as error:
            raise BackendError(f"the process that measures the roofline cannot be started: {error}. {CURE}") from error
        self._channel = Channel(self._child.end)
        return self._child

    def measure(
        self,
        budget_s: float,
        *,
        only: Roofline | None = None,
        timeout_s: float = LONGEST_S,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Roofline:
        """Measure, blocking for about `budget_s`, at most `timeout_s`, and ending the process when `stopped` returns
        true. `only`: see `roofline_measurement.measure`.

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
        return roofline_from(message)

    def _asked(
        self, question: Mapping[str, Any], timeout_s: float, stopped: Callable[[], bool]
    ) -> dict[str, Any] | None:
        """The child's answer; None if the child had ended by itself, so that another must be started."""
        child = self.start()
        try:
            self._channel.send(question)
            deadline = time.monotonic() + timeout_s
            while not self._channel.poll(min(LOOK_S, timeout_s)):
                if stopped():
                    raise BackendError("measuring the roofline was stopped. Start it again for the efficiency.")
                if time.monotonic() > deadline:
                    raise BackendError(f"measuring the roofline took longer than {timeout_s:g} s. {CURE}")
            return dict(self._channel.receive())
        except ChannelClosed:
            code = child.exit_code()
            self.close()
            if code == 0:
                return None
            if code == children.UNGUARDED:
                raise UsageError(children.UNGUARDED_SAID.format("measuring a model")) from None
            raise BackendError(
                f"the process that measured the roofline {how_it_ended(code)} before it answered. {CURE}"
            ) from None

    def close(self) -> None:
        """End the process and any measurement, which raises `BackendError`. It may be started again."""
        child, self._child = self._child, None
        if child is not None:
            child.kill(GONE_S)  # first, so that a thread that waits for an answer meanwhile hears the end
            self._channel.close()


def roofline_from(message: dict[str, Any]) -> Roofline:
    if "usage" in message:
        raise UsageError(message["usage"])
    if "failure" in message:
        raise BackendError(message["failure"])
    return Roofline(**message)


def answer_measurements(end: socket.socket, spec: ModelSpec, arguments: dict[str, Any]) -> None:
    """The child's main function: one message for each request, the roofline or an error."""
    children.set_up_child()
    channel = Channel(end)
    with contextlib.suppress(Exception):  # reported to the first request
        importlib.import_module(INSIDE)
    on_cuda = machine.wants_cuda(arguments["devices"])
    with contextlib.suppress(ChannelClosed):  # the run has ended
        while channel.poll(IDLE_S):
            question = channel.receive()
            only = question["only"] and Roofline(*question["only"])
            found = measurement_outcome(spec, {**arguments, "budget_s": question["budget_s"], "only": only})
            if not on_cuda:
                gc.collect()
                process_memory.return_free_memory()  # the model's memory: a run follows
            channel.send({**found, "peak_mb": machine.rss_peak_mb()})
            if on_cuda:
                return


def measurement_outcome(spec: ModelSpec, arguments: dict[str, Any]) -> dict[str, Any]:
    from gpuinfer.models.roofline_measurement import measure

    try:
        found = measure(spec, **arguments)
    except UsageError as error:
        return {"usage": str(error)}
    except GpuinferError as error:
        return {"failure": str(error)}
    except Exception as error:  # noqa: BLE001 (whatever it is, the parent must hear of it)
        return {"failure": f"the roofline raised {error_text.full_message(error)}. {CURE}"}
    return {"rows_per_s": found.rows_per_s, "at_rows": found.at_rows, "arrangement": found.arrangement}


KEPT_S = 7 * 24 * 3600.0  # then searched again: kernels and microcode change
AHEAD_S = 60.0  # that a file system's clock may be ahead
MOST_BYTES = 4096
RATES = ("flops_per_s", "prompt_flops_per_s", "bytes_per_s", "own_flops_per_s")  # of `TextRoofline`
FAR = 1.5  # a rate that is higher or lower by this factor is not of the same machine, or not of the same model


@dataclass(frozen=True, slots=True)
class KeptSearch:
    """The result of a search."""

    at_rows: int
    arrangement: str
    rows_per_s: float  # at that time, to notice changes; never reported
    peak_mb: float  # MiB of the measuring process

    @property
    def roofline(self) -> Roofline:
        return Roofline(self.rows_per_s, self.at_rows, self.arrangement)

    def agrees(self, measured: Roofline) -> bool:
        """Whether a new measurement has the same arrangement, and about the same rate."""
        same = (measured.at_rows, measured.arrangement) == (self.at_rows, self.arrangement)
        return same and self.rows_per_s / FAR <= measured.rows_per_s <= self.rows_per_s * FAR


def kept_path(spec: ModelSpec, *, dtype: str, compute: str, cores: int, deterministic: bool) -> Path | None:
    """The cache file for a model on this processor, named by all that decides the result; None without a usable cache.
    Asks no device and imports no torch.
    """
    told = {
        "spec": asdict(replace(spec, source=None)),
        "source": getattr(spec.source, "structure", None),
        "dtype": dtype,
        "compute": compute,
        "cores": cores,
        "deterministic": deterministic,
        "processor": [processor.cpu_name(processor.CPUINFO), *sorted(processor.flags(processor.CPUINFO))],
        "told to leave unused": [os.environ.get(name, "") for name in processor.WITHOUT_FLOAT16],
        "versions": [_version("torch"), _version("gpuinfer")],
    }
    root = user_cache_folder()
    folder = root / "roofline"
    if not (files.make_ours(root) and files.make_ours(folder)):
        return None
    return folder / f"{hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:32]}.json"


def recall(place: Path | None) -> KeptSearch | None:
    """The kept search; None if there is none, or it is too old or damaged."""
    told = _kept(place)
    if not isinstance(told, Mapping):
        return None
    rows, arrangement = told.get("at_rows"), told.get("arrangement")
    if type(rows) is not int or rows < 1 or not isinstance(arrangement, str):
        return None
    rate, peak_mb = (told.get(name) for name in ("rows_per_s", "peak_mb"))
    if not isinstance(rate, float) or not isinstance(peak_mb, float) or not 0 < rate < float("inf") or not peak_mb > 0:
        return None
    return KeptSearch(rows, arrangement, rate, peak_mb)


def _kept(place: Path | None) -> Any:
    try:
        if place is None or not -AHEAD_S <= time.time() - place.stat().st_mtime <= KEPT_S:
            return None
        with place.open("rb") as file:
            return json.loads(file.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None


def remember(place: Path | None, found: KeptSearch | TextRoofline) -> None:
    """Keep a search, or the roofline of a text model, and delete old ones. If it cannot be written, the next run
    searches again.
    """
    if place is None:
        return
    with contextlib.suppress(OSError):
        for other in place.parent.glob("*.json"):
            if time.time() - other.stat().st_mtime > KEPT_S:
                other.unlink()
    with contextlib.suppress(OSError):
        files.write_whole(place, json.dumps(asdict(found)).encode())


def recall_text(place: Path | None) -> TextRoofline | None:
    """The kept roofline of a text model, marked as remembered; None as in `recall`."""
    told = _kept(place)
    if not isinstance(told, Mapping):
        return None
    rates = {name: told.get(name) for name in RATES}
    sizes = {name: told.get(name) for name in ("at_rows", "at_tokens")}
    if not all(isinstance(rate, float) and 0 < rate < float("inf") for rate in rates.values()):
        return None
    if not all(type(size) is int and size > 0 for size in sizes.values()):
        return None
    return TextRoofline(**rates, **sizes, remembered=True)  # type: ignore[arg-type]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""

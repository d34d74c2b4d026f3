"""The roofline in a process of its own, so that the caller neither imports torch nor is disturbed, and the memory of
earlier searches. With which batch size and arrangement the bare model was at its best is kept in the user's cache:
to find that out takes seconds, and it is the same from run to run. How fast that is, is measured anew each time.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import platformdirs

from gpuinfer.api import ModelSpec, Roofline, TextRoofline
from gpuinfer.errors import BackendError, GpuinferError, UsageError
from gpuinfer.host import children, error_text, files, machine, process_memory
from gpuinfer.host.child import Channel, ChannelClosed, Child, how_it_ended
from gpuinfer.models import processor

LONGEST_S = 180.0  # a child that has not answered by then never will
LOOK_S = 0.1  # between two looks at whether it is still wanted
GONE_S = 5.0  # for the system to take a killed process away
IDLE_S = 30.0  # nobody has asked it for so long: a new one costs less than the memory of this one
CURE = "Leave the roofline out with --no-roofline, or try a smaller model."
INSIDE = "gpuinfer.models.roofline_measurement"  # what measures, loaded in the child alone: it imports torch


class RooflineProcess:
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
        self._child: Child | None = None
        self._channel: Channel
        self.peak_mb = 0.0  # MiB that the process had taken when it last answered

    def start(self) -> Child:
        """Let it load torch, unless it has begun to. Raises `BackendError` where there is no room for a process."""
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
            self._channel.send(question)
            return message_from(self._channel, timeout_s, stopped)
        except ChannelClosed:
            code = child.exit_code()
            self.close()
            if code == 0:
                return None
            raise BackendError(
                f"the process that measured the roofline {how_it_ended(code)} before it answered. {CURE}"
            ) from None

    def close(self) -> None:
        """End the process, and with it what is being measured, which raises `BackendError`. It may be started again."""
        child, self._child = self._child, None
        if child is not None:
            child.kill(GONE_S)  # first, so that a thread that waits for an answer meanwhile hears the end
            self._channel.close()


def message_from(channel: Channel, timeout_s: float, stopped: Callable[[], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while not channel.poll(min(LOOK_S, timeout_s)):
        if stopped():
            raise BackendError("measuring the roofline was stopped. Start it again for the efficiency.")
        if time.monotonic() > deadline:
            raise BackendError(f"measuring the roofline took longer than {timeout_s:g} s. {CURE}")
    return dict(channel.receive())


def unpacked(message: dict[str, Any]) -> Roofline:
    if "usage" in message:
        raise UsageError(message["usage"])
    if "failure" in message:
        raise BackendError(message["failure"])
    return Roofline(**message)


def answer_measurements(end: socket.socket, spec: ModelSpec, arguments: dict[str, Any]) -> None:
    """The child: to each question one message, the roofline or what went wrong."""
    children.set_up_child()
    channel = Channel(end)
    with contextlib.suppress(Exception):  # which is told to the first who asks
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


KEPT_S = 7 * 24 * 3600.0  # then it is looked for again: kernels and microcode change unseen
AHEAD_S = 60.0  # by which the clock of a file system may be ahead of ours
MOST_BYTES = 4096
RATES = ("flops_per_s", "prompt_flops_per_s", "bytes_per_s", "own_flops_per_s")  # of `TextRoofline`
FAR = 1.5  # a rate that is higher or lower by this factor is not of the same machine, or not of the same model


@dataclass(frozen=True, slots=True)
class KeptSearch:
    """What a search came to."""

    at_rows: int
    arrangement: str
    rows_per_s: float  # at that time: to see whether all is still as it was, and never told as a run's
    peak_mb: float  # MiB that the process took which measured it

    @property
    def roofline(self) -> Roofline:
        return Roofline(self.rows_per_s, self.at_rows, self.arrangement)

    def agrees(self, measured: Roofline) -> bool:
        """Whether a new measurement is of the same arrangement, and about as fast."""
        same = (measured.at_rows, measured.arrangement) == (self.at_rows, self.arrangement)
        return same and self.rows_per_s / FAR <= measured.rows_per_s <= self.rows_per_s * FAR


def kept_path(spec: ModelSpec, *, dtype: str, compute: str, cores: int, deterministic: bool) -> Path | None:
    """The file for a model on this machine's processor, named by all that decides what is best; None where none can be
    kept. Asks no device, and imports no torch.
    """
    told = {
        "spec": asdict(spec),
        "dtype": dtype,
        "compute": compute,
        "cores": cores,
        "deterministic": deterministic,
        "processor": [processor.cpu_name(processor.CPUINFO), *sorted(processor.flags(processor.CPUINFO))],
        "told to leave unused": [os.environ.get(name, "") for name in processor.WITHOUT_FLOAT16],
        "versions": [_version("torch"), _version("gpuinfer")],
    }
    root = Path(platformdirs.user_cache_dir("gpuinfer"))
    folder = root / "roofline"
    if not (files.make_ours(root) and files.make_ours(folder)):
        return None
    return folder / f"{hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:32]}.json"


def recall(place: Path | None) -> KeptSearch | None:
    """What is kept there; None where that is nothing, too old, or not as `remember` writes it."""
    return _read(_kept(place))


def _kept(place: Path | None) -> Any:
    try:
        if place is None or not -AHEAD_S <= time.time() - place.stat().st_mtime <= KEPT_S:
            return None
        with place.open("rb") as file:
            return json.loads(file.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None


def remember(place: Path | None, found: KeptSearch) -> None:
    """Keep it there, and nothing else that is too old. What cannot be kept is looked for again by the next run."""
    _keep(place, asdict(found))


def _keep(place: Path | None, told: Mapping[str, Any]) -> None:
    if place is None:
        return
    with contextlib.suppress(OSError):
        for other in place.parent.glob("*.json"):
            if time.time() - other.stat().st_mtime > KEPT_S:
                other.unlink()
    with contextlib.suppress(OSError):
        files.write_whole(place, json.dumps(told).encode())


def recall_text(place: Path | None) -> TextRoofline | None:
    """The same of a model of text: what an earlier run has measured, marked so."""
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


def remember_text(place: Path | None, found: TextRoofline) -> None:
    """Keep it there, as `remember` does."""
    _keep(place, asdict(found))


def _read(told: Any) -> KeptSearch | None:
    if not isinstance(told, Mapping):
        return None
    rows, arrangement = told.get("at_rows"), told.get("arrangement")
    if type(rows) is not int or rows < 1 or not isinstance(arrangement, str):
        return None
    rate, peak_mb = (told.get(name) for name in ("rows_per_s", "peak_mb"))
    if not isinstance(rate, float) or not isinstance(peak_mb, float) or not 0 < rate < float("inf") or not peak_mb > 0:
        return None
    return KeptSearch(rows, arrangement, rate, peak_mb)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""

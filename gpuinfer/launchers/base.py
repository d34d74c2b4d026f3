"""Launchers: the interface between supervision and a place where processes of gpuinfer run (replicas of a fleet, nodes
of a cluster), launchers by name, and waiting for a ready file. The supervisor plans a process down to its command line
and gets a `LaunchedProcess` for the plan, which it polls, ends, and replaces. A launcher decides nothing, and none is
imported before it is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec
from pydantic import BaseModel, ConfigDict

from gpuinfer.config import options, registry
from gpuinfer.config.options import GivenValue
from gpuinfer.errors import UsageError, WorkError

SHOWN, READ = 3, 8 << 10  # lines of last words; bytes of the log that are looked at
LINE = 300  # characters of one line


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """All that a launcher needs to know of one process. `index` is its number among those of its kind, kept when it is
    replaced; `name` says what it is, such as replica-3 or node-3.

    One that `serves` listens: it writes a ready file and gets `--host` from the launcher. One that does not dials out;
    no ready file of it is awaited, and `dials` is the address of this machine in its arguments, for which a launcher
    with a tunnel puts the tunnel's end.
    """

    name: str
    index: int
    folder: Path  # 0700; its ready file and its log
    arguments: tuple[str, ...]  # all of the command line that follows `gpuinfer`
    files: tuple[
        Path, ...
    ] = ()  # that its arguments name and it reads there: setup, keys; a launcher carries them over
    devices: str | None = None  # CUDA_VISIBLE_DEVICES; None: leave the variable as it is
    threads: int | None = None  # cores for its numeric libraries; None: as many as they like
    attempt: int = 0  # how often this index was started before
    logs: Path | None = None  # where its log goes instead, when people named a folder
    serves: bool = True
    port: int = 0  # of one that serves: where it listens, each attempt anew; 0: any free one
    dials: str | None = None  # HOST:PORT, a word of `arguments`

    @property
    def ready_file(self) -> Path:
        """Where one that serves writes its address; another file for each attempt, so none is stale."""
        return self.folder / f"{self.name}.{self.attempt}.ready"

    @property
    def log(self) -> Path:
        """What it prints; attempts follow one another in one file."""
        return (self.logs or self.folder) / f"{self.name}.log"


class LaunchedProcess(ABC):
    """One process that was started. It ends at most once; no call on one that has ended does harm."""

    def __init__(self, plan: ProcessPlan, begins: int | None = None) -> None:
        """`begins`: where its words begin in the log, which attempts share; None: at its end now."""
        self.plan, self.log = plan, plan.log
        self._begins = begins if begins is not None else plan.log.stat().st_size if plan.log.exists() else 0

    @abstractmethod
    async def ready(self, within_s: float) -> tuple[str, int]:
        """Wait until it serves: host and port, as this process reaches them. Only of a plan that `serves`.

        Raises `WorkError`, with its last words, when it ends first or takes longer; it is not ended for that. May be
        cancelled.
        """

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it runs, or waits to be run, as far as is known at once and without waiting."""

    @property
    def ending(self) -> str:
        """How it ended, such as `exit code 1`; empty while it runs, and where that is not known."""
        return ""

    def last_words(self, lines: int = SHOWN) -> str:
        """The last lines of its log, for people; empty when it said nothing. Of a log that somebody has cut shorter
        since, all is its own.
        """
        try:
            with self.log.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._begins if self._begins <= end else 0, end - READ))
                said = file.read(READ).decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join([line.strip()[:LINE] for line in said.splitlines() if line.strip()][-lines:])

    def failure(self, why: str) -> WorkError:
        """It never came up: with what it said last and where there is more."""
        words, ending = self.last_words(), f" ({self.ending})" if self.ending else ""
        quoted = f' Its last words: "{words}".' if words else " It said nothing."
        return WorkError(f"{self.called} {why}{ending}.{quoted}\nMore is in {self.log}.")

    @property
    def called(self) -> str:
        return self.plan.name

    @property
    def suspended(self) -> bool:
        """Whether somebody has stopped it (SIGSTOP), as far as that can be seen from here."""
        return False

    @abstractmethod
    async def terminate(self, within_s: float) -> None:
        """Ask it to finish what is under way and leave; past the limit, kill it. Comes back when it has ended."""

    @abstractmethod
    async def kill(self) -> None:
        """End it now, with all that it has started: also one that is suspended."""


class Launcher(ABC):
    """A place where processes can run. Made once for a fleet or a cluster, with its options from `-L key=value`."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]
    here: bool = False  # whether all processes share this machine's cores and devices
    starts: bool = True  # False: nodes are started by others, may come at any time, and `launch` is not called
    key_file: Path | None = None  # with the key that nodes show, where those that start them have it; None: a new key
    at_once: int = 1024  # processes that may come up at a time
    capacity: int | None = None  # processes that it has room for; None: no bound that it knows
    bind: str = "127.0.0.1"  # the address at which those that serve listen (`--host`), as far as it is known before
    shared: Path | None = None  # where the folder of all plans must lie, for all hosts to see; None: anywhere
    start_s: float = 600.0  # for a replica to serve, unless people say otherwise: models are large, vLLM compiles

    def __init__(self, options: BaseModel | None = None) -> None:
        self.options = options if options is not None else self.Options()

    def reserve_one_gpu(self, flag: str) -> None:
        """Have each process get one device, which the launcher chooses. Raises `UsageError` where `-L gpus` says
        otherwise. `flag`: that of the person who wants it.
        """
        if (gpus := getattr(self.options, "gpus", None)) is not None:
            raise UsageError(
                f"{flag} gives each replica one device, and -L gpus={gpus} says how many it has. Give one of them: "
                f"--replicas N with -L gpus={gpus}, or {flag}."
            )
        self.options = self.Options(**{**self.options.model_dump(exclude_unset=True), "gpus": "1"})

    def check(self) -> None:  # noqa: B027
        """Raise `UsageError`, with the cure, where this launcher cannot work: no SLURM here, no Ray."""

    def reached_at(self) -> str:
        """The address of this machine for processes that dial it: as the hosts reach it on which they run."""
        return "127.0.0.1"

    @property
    def notices(self) -> Sequence[str]:
        """What people should know once a fleet serves, such as a tunnel. `{port}` stands for its port."""
        return ()

    @abstractmethod
    async def launch(self, plan: ProcessPlan) -> LaunchedProcess:
        """Start one process, without waiting until it serves. Raises `WorkError` when it cannot be started.

        What was started leaves when this process does, however that ends.
        """

    async def close(self) -> None:  # noqa: B027
        """Let go of what the launcher itself holds. All that it launched has been ended before."""


KIND = "launchers"


def make_launcher(name: str, given: Mapping[str, GivenValue]) -> Launcher:
    """The launcher of this name with these options. Raises `UnknownName`; `UsageError` for options, or where it
    cannot work here; `PluginError` for a plugin that cannot be loaded.
    """
    kind: type[Launcher] = registry.load(KIND, name)
    launcher = kind(kind.Options(**options.check(kind.Options, given, f"launcher '{name}'")))
    launcher.check()
    return launcher


def ending_of(code: int) -> str:
    """How a process has ended, for people; a negative code is the signal that ended it."""
    try:
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    except ValueError:  # a real-time one
        return f"signal {-code}"


NOWHERE = ("192.0.2.1", 9)  # of the network for documentation (RFC 5737): the default route leads there


def own_address(towards: tuple[str, int] = NOWHERE) -> str:
    """This machine's address on the way to a host, by default on the way out. Nothing is sent. The name of this
    machine where there is no way.
    """
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return socket.gethostname()


LOOK_S = 0.05  # between two looks at the file


class ListenAddress(msgspec.Struct, frozen=True):
    """What a process that serves writes into its ready file."""

    host: str
    port: int
    pid: int = 0


def read_ready_file(path: Path) -> ListenAddress | None:
    """None while it is not there. The file is written elsewhere and moved into place, so it is never half there."""
    with contextlib.suppress(FileNotFoundError):
        try:
            return msgspec.json.decode(path.read_bytes(), type=ListenAddress)
        except msgspec.MsgspecError as error:
            raise WorkError(f"{path} is no ready file: {error}. Do not write to that folder.") from None
    return None


async def wait_until_ready(
    path: Path, within_s: float, alive: Callable[[], bool], failed: Callable[[str], WorkError]
) -> ListenAddress:
    """Look until the file is there. Raises `failed(why)` when the process has ended, or the time is over."""
    until = time.monotonic() + within_s
    while True:
        was_alive = alive()  # before the look: one that wrote its file and then ended is told by its end
        if (address := read_ready_file(path)) is not None:
            return address
        if not was_alive:
            raise failed("ended before it served")
        if time.monotonic() > until:
            raise failed(f"did not come up within {within_s:g} s (--start-timeout)")
        await asyncio.sleep(LOOK_S)

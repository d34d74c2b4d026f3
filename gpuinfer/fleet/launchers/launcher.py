"""What starts replicas, and what has been started: the seam between supervision and a place where programs run.

The supervisor plans a replica down to its command line, hands the plan to a launcher and gets a `Launched`: it asks
that whether it lives, ends it, and starts another in its place. A launcher decides nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """All that a launcher needs to know of one replica. `index` is its number, kept when it is replaced."""

    index: int
    setup_file: Path
    key_file: Path  # 0600; the replica asks its callers for this key
    folder: Path  # 0700; the replica's ready file and its log
    devices: str | None  # CUDA_VISIBLE_DEVICES; None: leave the variable as it is
    threads: int | None  # cores for its numeric libraries; None: as many as they like
    arguments: tuple[str, ...]  # all of the command line that follows `gpuinfer`
    attempt: int = 0  # how often this index was started before
    logs: Path | None = None  # where its log goes instead, when people named a folder
    admin_key_file: Path | None = None  # 0600; who changes its weights has this key

    @property
    def name(self) -> str:
        return f"replica-{self.index}"

    @property
    def ready_file(self) -> Path:
        """Where the replica writes its address once it serves; another file for each attempt, so none is stale."""
        return self.folder / f"{self.name}.{self.attempt}.ready"

    @property
    def log(self) -> Path:
        """What it prints; attempts follow one another in one file."""
        return (self.logs or self.folder) / f"{self.name}.log"


class Launched(ABC):
    """One replica that was started. It ends at most once; whatever is asked of one that has ended does no harm."""

    log: Path | None = None

    @abstractmethod
    async def ready(self, within_s: float) -> tuple[str, int]:
        """Wait until it serves: host and port, as this process reaches them.

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

    def last_words(self) -> str:
        """The last lines of its log, for people; empty when it said nothing."""
        return ""

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
    """A place where replicas can run. Made once for a fleet, with its options from `-L key=value`."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]
    here: bool = False  # whether all replicas share this machine's cores and devices
    at_once: int = 1024  # replicas that may come up at a time
    bind: str = "127.0.0.1"  # the address at which replicas listen (`--host`)
    shared: Path | None = None  # where the fleet's folder must lie, for all hosts to see; None: anywhere
    start_s: float = 600.0  # for a replica to serve, unless people say otherwise: models are large, vLLM compiles

    def __init__(self, options: BaseModel | None = None) -> None:
        self.options = options if options is not None else self.Options()

    def check(self) -> None:  # noqa: B027
        """Raise `UsageError`, with the cure, where this launcher cannot work: no SLURM here, no Ray."""

    @property
    def notices(self) -> Sequence[str]:
        """What people should know once the fleet serves, such as a tunnel. `{port}` stands for its port."""
        return ()

    @abstractmethod
    async def launch(self, plan: ReplicaPlan) -> Launched:
        """Start one replica, without waiting until it serves. Raises `WorkError` when it cannot be started.

        What was started leaves when this process does, however that ends.
        """

    async def close(self) -> None:  # noqa: B027
        """Let go of what the launcher itself holds. All that it launched has been ended before."""

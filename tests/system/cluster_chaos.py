"""Self-play divided over the nodes of a real SLURM or Ray, in which processes and machines are killed at seeded random
times: `benchmarks/cluster_chaos.py` plays many rounds, the tests a few.

A round ends with the bytes of a run on one machine, and with no process left, or it has failed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from ports import free_port
from system import ray_here, slurm_here
from system.ray_here import RayCluster
from system.slurm_here import Slurm

NODES = 3
ROUND_S = 600.0  # for a round, however busy the host is
LEFT_S = 300.0  # for what belongs to a killed coordinator to notice it
DELAYS = (1.0, 9.0)  # seconds before the first deed, and between two
AGAIN_S = 1.0  # until a deed is tried again that found nothing to befall
DOWN_S = (1.0, 30.0)  # for which a machine that was lost is away
GAME = ("--game", "blob", "--model", "uniform", "--workers", "1", "--simulations")
COMMAND = (sys.executable, "-m", "gpuinfer")


class Place(ABC):
    """Where the nodes run. `deeds`: what may befall it, by name; each returns whether there was anything to befall."""

    flags: tuple[str, ...]

    def __init__(self) -> None:
        self.deeds: dict[str, Callable[[random.Random], bool]] = {"kill -9 of a node": self._kill_process}
        self._lost: dict[str, float] = {}  # machines that are away, and when they come back

    @property
    @abstractmethod
    def machines(self) -> Sequence[str]: ...

    @abstractmethod
    def processes(self, machine: str) -> list[psutil.Process]:
        """What gpuinfer runs there."""

    @abstractmethod
    def start(self, machine: str) -> None: ...

    def strike(self, rng: random.Random, kill: Callable[[str], object]) -> bool:
        """Kill a machine, or a program of its, in this way; False where that machine is not whole."""
        machine = rng.choice(self.machines)
        if machine not in self.whole:
            return False
        kill(machine)
        self.lose(machine, rng)
        return True

    def lose(self, machine: str, rng: random.Random) -> None:
        self._lost[machine] = time.monotonic() + rng.uniform(*DOWN_S)

    @property
    def whole(self) -> list[str]:
        return [one for one in self.machines if one not in self._lost]

    def mend(self, all_of_them: bool = False) -> None:
        """Bring machines back whose time has come."""
        for machine, until in list(self._lost.items()):
            if all_of_them or time.monotonic() > until:
                del self._lost[machine]
                self.start(machine)

    def left(self) -> list[psutil.Process]:
        """All processes of gpuinfer on all machines."""
        return [one for machine in self.machines for one in self.processes(machine)]

    def waiting(self) -> list[str]:
        """What has been ordered there and not begun."""
        return []

    def _kill_process(self, rng: random.Random) -> bool:
        found = [one for one in self.left() if "node" in _words(one)]
        if found:
            with contextlib.suppress(psutil.NoSuchProcess):
                rng.choice(found).kill()
        return bool(found)


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


class SlurmPlace(Place):
    def __init__(self, slurm: Slurm, folder: Path) -> None:
        super().__init__()
        self._slurm = slurm
        self.flags = ("--launcher", "slurm", "-L", f"nodes={NODES}", "-L", "cpus=1", "-L", f"folder={folder}/shared")
        self.deeds["kill -9 of a slurmd"] = self._kill_daemon
        self.deeds["a machine is lost"] = self._kill_machine
        self.deeds["a job is requeued"] = lambda rng: self._to_a_job(rng, "scontrol", "requeue")
        self.deeds["a job is asked to leave"] = lambda rng: self._to_a_job(rng, "scancel", "--signal=TERM")

    def _to_a_job(self, rng: random.Random, *command: str) -> bool:
        running = slurm_here.run("squeue", "--noheader", "--states=RUNNING", "--format=%i").split()
        if running:
            slurm_here.run(*command, rng.choice(running))
        return bool(running)

    @property
    def machines(self) -> Sequence[str]:
        return self._slurm.nodes

    def processes(self, machine: str) -> list[psutil.Process]:
        return [one for one in self._slurm.processes(machine) if "gpuinfer" in _words(one)]

    def start(self, machine: str) -> None:
        self._slurm.start_node(machine)

    def waiting(self) -> list[str]:
        return [f"job {number}" for number in self._slurm.jobs()]

    def mend(self, all_of_them: bool = False) -> None:
        super().mend(all_of_them)
        self._slurm.release()
        if all_of_them:
            for machine in self.machines:
                self._slurm.wait(lambda machine=machine: self._slurm.state(machine) in ("idle", "mix", "alloc"))

    def _kill_daemon(self, rng: random.Random) -> bool:
        return self.strike(rng, self._slurm.kill_daemon)

    def _kill_machine(self, rng: random.Random) -> bool:
        return self.strike(rng, self._slurm.kill_node)


class RayPlace(Place):
    def __init__(self, ray: RayCluster) -> None:
        super().__init__()
        self._ray = ray
        self.flags = ("--launcher", "ray", "-L", f"address={ray.address}", "-L", f"nodes={NODES}")
        self.deeds["kill -9 of a raylet"] = self._kill_raylet
        self.deeds["a machine is lost"] = self._kill_machine

    @property
    def machines(self) -> Sequence[str]:
        return [name for name in self._ray.groups if name != "head"]

    def processes(self, machine: str) -> list[psutil.Process]:
        return [one for one in self._ray.processes(machine) if "gpuinfer" in _words(one)]

    def start(self, machine: str) -> None:
        self._ray.kill_node(machine)
        self._ray.start_nodes(machine)

    def _kill_raylet(self, rng: random.Random) -> bool:
        return self.strike(rng, self._ray.kill_raylet)

    def _kill_machine(self, rng: random.Random) -> bool:
        return self.strike(rng, self._ray.kill_node)


@contextlib.contextmanager
def placed(launcher: str, folder: Path, cores: float | None = None) -> Iterator[Place]:
    """A cluster of `NODES` machines for this launcher."""
    if launcher == "slurm":
        with slurm_here.running(NODES, cores, cpus=2) as slurm:
            yield SlurmPlace(slurm, folder)
    else:
        with ray_here.running(NODES, cores, cpus=2) as ray:
            yield RayPlace(ray)


@dataclass
class Round:
    """How one went. `deeds`: what was done, with the second at which."""

    seed: int
    deeds: list[tuple[float, str]] = field(default_factory=list)
    resumed: int = 0
    seconds: float = 0.0
    failure: str = ""

    def told(self) -> str:
        deeds = ", ".join(f"{name} at {second:.0f} s" for second, name in self.deeds) or "nothing happened in time"
        return (
            f"seed {self.seed}: {self.failure or 'the same bytes, nothing left'} after {self.seconds:.0f} s ({deeds})"
        )


def digests(folder: Path) -> dict[str, str]:
    """Of all files in it, hidden ones too."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def command(games: int, simulations: int, out: Path) -> list[str]:
    return [*COMMAND, "selfplay", *GAME, str(simulations), "--games", str(games), "--out", str(out), "--no-live"]


def play_alone(games: int, simulations: int, out: Path) -> dict[str, str]:
    """The digests of a run on one machine."""
    subprocess.run(command(games, simulations, out), check=True, capture_output=True, timeout=ROUND_S)
    return digests(out)


class Player:
    """Plays one round."""

    def __init__(self, place: Place, folder: Path, games: int, simulations: int, seed: int) -> None:
        self._place, self._rng, self._out = place, random.Random(seed), folder / f"round-{seed}"
        self._log = folder / f"round-{seed}.log"
        more = ["-v", *place.flags]
        if self._rng.random() < 0.5:  # nodes of a coordinator that was killed find the next one, which refuses them
            more += ["-L", f"coordinator=127.0.0.1:{free_port()}"]
        self._words = [*command(games, simulations, self._out), *more]
        self._round = Round(seed)
        self._began = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None

    def play(self, expected: dict[str, str]) -> Round:
        try:
            self._run()
            found = digests(self._out)
            if found != expected:
                differing = sorted(
                    name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)
                )
                self._round.failure = f"other bytes than on one machine: {', '.join(differing)}"
        except AssertionError as error:
            self._round.failure = str(error)
        finally:
            self._round.seconds = time.monotonic() - self._began
            self._end()
        return self._round

    def _run(self) -> None:
        deeds = {**self._place.deeds, "kill -9 of the coordinator": self._kill_coordinator}
        planned = [self._rng.choice(sorted(deeds)) for _ in range(self._rng.randrange(2, 6))]
        self._start()
        next_s = self._began + self._rng.uniform(*DELAYS)
        while True:
            assert self._process is not None
            assert time.monotonic() < self._began + ROUND_S, f"it does not end: {self._last_words()}"
            code = self._process.poll()
            if code == 0:
                return
            if code == -signal.SIGKILL:
                self._round.resumed += 1
                self._start("--resume")
            elif code is not None:
                raise AssertionError(f"it ended with {code}: {self._last_words()}")
            self._place.mend()
            if planned and time.monotonic() > next_s:
                next_s = time.monotonic() + AGAIN_S
                if deeds[planned[-1]](self._rng):
                    self._round.deeds.append((time.monotonic() - self._began, planned.pop()))
                    next_s += self._rng.uniform(*DELAYS)
            time.sleep(0.05)

    def _start(self, *more: str) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._words, *more], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _kill_coordinator(self, rng: random.Random) -> bool:
        assert self._process is not None
        self._process.kill()
        self._process.wait(60)
        return True

    def _last_words(self) -> str:
        return self._log.read_text()[-1500:]

    def _end(self) -> None:
        """Nothing is left, however long those take that a killed coordinator has left behind."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(60)
        self._place.mend(all_of_them=True)
        until = time.monotonic() + LEFT_S
        while (left := self._place.left()) or self._place.waiting():
            if time.monotonic() > until:
                words = "; ".join([*(" ".join(_words(one)[-8:]) for one in left), *self._place.waiting()])
                self._round.failure = self._round.failure or f"that is left: {words}"
                for process in left:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                return
            self._place.mend()
            time.sleep(0.2)

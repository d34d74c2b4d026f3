"""Where the threads of models beside one another wait for their turns at a device (`turns` decides whose it is).

On a CPU a forward has all cores in its turn, or models run at once, each on a share of them; on CUDA one forward has
the device, or a few run at once, each model's on a stream of its own, so that copies go behind kernels. Which of the
two is faster depends on the models, and is measured while they run (`looks`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from gpuinfer.api import Setup
from gpuinfer.host import machine
from gpuinfer.models.looks import Looks, Way
from gpuinfer.models.turns import Member, Turn, Turns

AT_ONCE = 2  # forwards on a CUDA device: the copies of one behind the kernels of the other
STATION = "turn"  # of the time ledger: ready to compute, while others do

Enter = Callable[[str], None]


class Gate:
    """One device, or several that are used as one. Every model that computes there has a `Place`."""

    def __init__(self, room: int, *, of_cores: bool = True, looks: Looks | None = None, way: Way = Way.TURNS) -> None:
        """`room`: cores, or forwards that may run at once. `looks` and `way`: see `Turns`."""
        self.of_cores = of_cores
        self._turns = Turns(room, looks, way)
        self._changed = threading.Condition()
        self._again_at = float("inf")

    def join(self, share: float = 1.0, *, fixed: bool = False) -> Place:
        """A model beside those that are there, with this share of the device among them. From any thread.

        `fixed`: a forward has as many cores as it wants, and never fewer.
        """
        with self._changed:
            return Place(self, self._turns.join(share), fixed=fixed)

    def _settle(self) -> None:
        """Let those go whose turn it is. With the lock."""
        begun, again_at = self._turns.due(time.perf_counter())
        if begun or again_at < self._again_at:
            self._changed.notify_all()
        self._again_at = again_at

    def _wait(self, turn: Turn) -> None:
        """With the lock, until this turn has begun."""
        while turn.began_at is None:
            left_s = self._again_at - time.perf_counter()
            if left_s <= 0:
                self._settle()
            else:
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))


class Place:
    """One model's way through a gate: `begin` before each forward, `end` after it, from any number of threads."""

    def __init__(self, gate: Gate, member: Member, *, fixed: bool = False) -> None:
        self._gate, self._member, self._fixed = gate, member, fixed
        self._open = True

    def begin(self, cores: int, enter: Enter) -> Turn | None:
        """Wait for the turn of a forward on so many cores, or on fewer: `cores_of` tells how many it has got. None for
        a model that is being closed.

        `enter` is told the station of the time ledger while it waits.
        """
        gate = self._gate
        with gate._changed:
            if not self._open:
                return None
            now = time.perf_counter()
            if gate.of_cores:
                turn = gate._turns.ask(self._member, cores, now, least=cores if self._fixed else 1)
            else:
                turn = gate._turns.ask(self._member, gate._turns.room, now, alone=1)
            gate._settle()
            if turn.began_at is None:
                enter(STATION)
                gate._wait(turn)
            return turn

    def cores_of(self, turn: Turn | None, wanted: int) -> int:
        """How many cores a forward has that wanted so many."""
        return wanted if turn is None or not self._gate.of_cores else min(wanted, turn.width)

    def has_all(self, turn: Turn | None) -> bool:
        """Whether a CUDA device is this forward's alone until it ends, and another model's then: what it has launched
        must be done.
        """
        return turn is not None and turn.of_all

    def end(self, turn: Turn | None, *, again: bool = False, work: float = 1.0) -> bool:
        """The forward is over, and has done so much `work` (rows, tokens: always the same). `again`: the next one comes
        at once, so that its turn may be kept for it. Whether other models have its part of the device meanwhile.
        """
        if turn is None:
            return False
        gate = self._gate
        with gate._changed:
            gate._turns.done(turn, time.perf_counter(), again=again and self._open, work=work)
            gate._settle()
            return gate._turns.has_passed_on(turn)

    @contextmanager
    def turn(self, cores: int, enter: Enter, *, work: float = 1.0) -> Iterator[int]:
        """`begin` and `end` around one forward; yields how many cores it has got."""
        turn = self.begin(cores, enter)
        try:
            yield self.cores_of(turn, cores)
        finally:
            self.end(turn, work=work)

    def leave(self) -> None:
        """The model is being closed: nobody waits for it any more, and it for nobody."""
        gate = self._gate
        with gate._changed:
            if self._open:
                self._open = False
                gate._turns.leave(self._member, time.perf_counter())
                gate._settle()
                gate._changed.notify_all()

    def told(self) -> Mapping[str, float]:
        """Sums: what it has had of the device, in seconds of all of it, and for how long its forwards waited for that;
        for how long several models had work, and ran at once; what pairs of looks found (`looks.Judged`).
        """
        turns = self._gate._turns
        judged = turns.judged(self._member)
        return {
            "had_s": self._member.had_s,
            "waited_s": self._member.waited_s,
            "together_s": turns.together_s,
            "at_once_s": turns.at_once_s,
            "pairs": judged.pairs,
            "pair_logs": judged.logs,
            "pair_squares": judged.squares,
        }


class NoPlace(Place):
    """Of a model that waits for nobody: its forwards run beside those of others, at once."""

    def __init__(self) -> None:
        pass

    def begin(self, cores: int, enter: Enter) -> Turn | None:
        """At once."""
        return None

    def end(self, turn: Turn | None, *, again: bool = False, work: float = 1.0) -> bool:
        """Nobody has waited for it."""
        return False

    def cores_of(self, turn: Turn | None, wanted: int) -> int:
        """As many as it wants."""
        return wanted

    def leave(self) -> None:
        """From nowhere."""

    def told(self) -> Mapping[str, float]:
        """Nothing is known."""
        return {}


def gate_of(setup: Setup, *, free: bool = False) -> Gate:
    """Of the devices that a run names, used as one: on a CPU as wide as this process's share of the cores.

    `free`: models compute at once, each as if it were alone, but for looks at what turns would bring.
    """
    if machine.wants_cuda(setup.devices):
        count = sum(machine.cuda_devices() if name in ("cuda", "all") else 1 for name in setup.devices)
        return _gate(AT_ONCE * count, Way.SHARES, free=free, of_cores=False, looking=count == 1)
    room = max(1, machine.cores() // setup.processes)
    return _gate(room, Way.TURNS, free=free, of_cores=True, looking=room > 1, likely=Way.SHARES)


def _gate(room: int, way: Way, *, free: bool, of_cores: bool, looking: bool, likely: Way = Way.TURNS) -> Gate:
    """`way`: where no looks are taken, as they could not differ, or would hold a device up for another's sake. `likely`
    is the faster one in most cases: a forward seldom gets twice as fast on twice as many cores.
    """
    if free:
        return Gate(
            room, of_cores=of_cores, looks=Looks(Way.TURNS, Way.FREELY, Way.FREELY) if looking else None, way=Way.FREELY
        )
    looks = Looks(Way.TURNS, Way.SHARES, likely=likely) if looking else None
    return Gate(room, of_cores=of_cores, looks=looks, way=way)

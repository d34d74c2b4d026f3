"""Where the threads of models beside one another wait for their turns at a device (`turns` decides whose it is).

On a CPU forwards that run at once on the same cores are slower than one after the other; in turns each has all of them.
On CUDA a few run at once, each model's on a stream of its own, so that copies go behind kernels.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from gpuinfer.api import Setup
from gpuinfer.host import machine
from gpuinfer.models.turns import Member, Turn, Turns

AT_ONCE = 2  # forwards on a CUDA device: the copies of one behind the kernels of the other
STATION = "turn"  # of the time ledger: ready to compute, while others do

Enter = Callable[[str], None]


class Gate:
    """One device, or several that are used as one. Every model that computes there has a `Place`."""

    def __init__(self, room: int, *, of_cores: bool = True) -> None:
        """`room`: cores, or forwards that may run at once."""
        self.of_cores = of_cores
        self._turns = Turns(room)
        self._changed = threading.Condition()
        self._again_at = float("inf")

    def join(self, share: float = 1.0) -> Place:
        """A model beside those that are there, with this share of the device among them. From any thread."""
        with self._changed:
            return Place(self, self._turns.join(share))

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

    def __init__(self, gate: Gate, member: Member) -> None:
        self._gate, self._member = gate, member
        self._open = True

    def begin(self, cores: int, enter: Enter) -> Turn | None:
        """Wait for the turn of a forward on so many cores; None for a model that is being closed.

        `enter` is told the station of the time ledger while it waits.
        """
        gate = self._gate
        with gate._changed:
            if not self._open:
                return None
            turn = gate._turns.ask(self._member, cores if gate.of_cores else 1, time.perf_counter())
            gate._settle()
            if turn.began_at is None:
                enter(STATION)
                gate._wait(turn)
            return turn

    def end(self, turn: Turn | None, *, again: bool = False) -> None:
        """The forward is over. `again`: the next one comes at once, so that its turn may be kept for it."""
        if turn is None:
            return
        gate = self._gate
        with gate._changed:
            gate._turns.done(turn, time.perf_counter(), again=again and self._open)
            gate._settle()

    @contextmanager
    def turn(self, cores: int, enter: Enter) -> Iterator[None]:
        """`begin` and `end` around one forward."""
        turn = self.begin(cores, enter)
        try:
            yield
        finally:
            self.end(turn)

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
        """What it has had of the device, in seconds of all of it, and for how long its forwards waited for that."""
        return {"had_s": self._member.had_s, "waited_s": self._member.waited_s}


class NoPlace(Place):
    """Of a model that waits for nobody: its forwards run beside those of others, at once."""

    def __init__(self) -> None:
        pass

    def begin(self, cores: int, enter: Enter) -> Turn | None:
        """At once."""
        return None

    def leave(self) -> None:
        """From nowhere."""

    def told(self) -> Mapping[str, float]:
        """Nothing is known."""
        return {}


def gate_of(setup: Setup) -> Gate:
    """Of the devices that a run names, used as one: on a CPU as wide as this process's share of the cores."""
    if machine.wants_cuda(setup.devices):
        count = sum(machine.cuda_devices() if name in ("cuda", "all") else 1 for name in setup.devices)
        return Gate(AT_ONCE * count, of_cores=False)
    return Gate(max(1, machine.cores() // setup.processes))

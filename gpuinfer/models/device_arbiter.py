"""Models that share a device: which model's forward goes next, and where threads wait for their turn.

On a CPU the forwards of several models run *at once*, each on its model's share of the cores, where all shares are
whole cores: a forward seldom gets twice as fast on twice as many cores. Otherwise models take *turns*, each forward on
all cores. On CUDA one forward has the device in its turn, or two run at once on streams of their own. Measurements are
in `docs/decisions/sharing.md`.

Turns follow start-time fair queueing (Goyal, Vin and Cheng 1996): each model has a clock of the device time that it
has had divided by its share, and the waiting model whose clock is behind goes first. A model whose forwards follow one
another closely has no forward in the queue at the moment when one ends; the device is kept for its next one for a
moment, since weights would otherwise not hold (Iyer and Druschel 2001, "Anticipatory scheduling").
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from gpuinfer.api import Setup
from gpuinfer.host import machine

RECENT = 0.2  # weight of the latest forward in running means
LEAST_KEPT_S, MOST_KEPT_S = 0.001, 0.005  # the device is kept for half a forward, within these bounds
CLOSE_S = 0.005  # a pause that is no longer, or no longer than a forward, is short
OFTEN = 0.25  # share of short pauses with which cores are reserved for a model between two of its forwards
PRESENT_S, PRESENT_FORWARDS = 0.1, 3  # for so long after a forward, or for the time of so many forwards
WHOLE = 0.95  # of a model's share of the room that it must get as whole cores
ROUNDING = 1e-9


@dataclass(eq=False, slots=True)
class SharingModel:
    """One model. `had_s`: device time, in seconds of the whole device; `waited_s`: its forwards' waiting for turns."""

    share: float
    clock: float = 0.0  # device time divided by the share; the lower, the sooner its turn
    had_s: float = 0.0
    waited_s: float = 0.0
    waiting: deque[DeviceTurn] = field(default_factory=deque)
    running: int = 0
    forward_s: float = 0.0  # mean of recent forwards
    ended_at: float = -math.inf  # its last forward
    short_pauses: float = 0.0  # share of recent pauses between two forwards that were short
    returns: bool = False  # its last pause was so short that the device is kept for its next forward
    expected: int = 0  # forwards that the device is kept for, until `kept_until`
    kept_until: float = -math.inf

    def has_work(self, now: float) -> bool:
        """Whether it computes or waits, or did a moment ago and most often asks again at once."""
        if self.waiting or self.running:
            return True
        recent_s = max(PRESENT_S, PRESENT_FORWARDS * self.forward_s)
        return self.short_pauses > OFTEN and now - self.ended_at <= recent_s

    def is_expected(self, now: float) -> bool:
        """Whether the device is kept for its next forward."""
        if now > self.kept_until:
            self.expected = 0
        return self.expected > 0

    @property
    def keep_s(self) -> float:
        """How long the device is kept for its next forward."""
        return min(MOST_KEPT_S, max(LEAST_KEPT_S, self.forward_s / 2))


@dataclass(eq=False, slots=True)
class DeviceTurn:
    """One forward. `widths`: the room that it takes in a turn, the least that it can do with, and what it takes while
    its model is alone. `width`: what it has got.
    """

    model: SharingModel
    widths: tuple[int, int, int]
    asked_at: float
    width: int = 0
    began_at: float | None = None  # None: it waits
    charged: float = 0.0

    @property
    def has_all(self) -> bool:
        """Whether it has more room than it would take alone, so that other models wait for its end."""
        return self.width > self.widths[2]


class FairScheduler:
    """Decides for one device; reads no clock. `room`: cores on a CPU, concurrent forwards on CUDA.

    Call `ask` and `done` as it happens, then start the turns that are `due`. Times are seconds of any monotonic clock.
    """

    def __init__(self, room: int, *, at_once: bool | None = None, free: bool = False) -> None:
        """`at_once`: whether forwards of several models run at once or in turns; None: at once where the shares of
        the models that have work are whole parts of the room. `free`: each model computes as if it were alone.
        """
        self.room, self.free_room = room, room
        self._at_once, self.free = at_once, free
        self.models: list[SharingModel] = []
        self._clock = 0.0  # of the model that began last: where a model that was idle begins

    def join(self, share: float) -> SharingModel:
        """Add a model with this share of the device."""
        self.models.append(SharingModel(share, clock=self._clock))
        return self.models[-1]

    def leave(self, model: SharingModel, now: float) -> None:
        """Remove a model. Its waiting forwards begin now, whatever else computes."""
        self.models.remove(model)
        while model.waiting:
            turn = model.waiting.popleft()
            turn.width = turn.widths[0]
            self._begin(turn, now)

    def ask(
        self, model: SharingModel, width: int, now: float, *, least: int = 1, alone: int | None = None
    ) -> DeviceTurn:
        """Queue a forward that takes `width` of the room in its turn, `least` in any case, and `alone` (None: `width`)
        while no other model has work.
        """
        if model.forward_s and not model.waiting:
            pause_s = now - model.ended_at
            model.returns = pause_s <= model.keep_s
            short = float(pause_s <= max(model.forward_s, CLOSE_S))
            model.short_pauses += RECENT * (short - model.short_pauses)
        if not (model.waiting or model.running or model.is_expected(now)):
            model.clock = max(model.clock, self._clock)  # an idle model saves nothing up
        most = self.room
        widths = (min(width, most), min(least, width, most), min(width if alone is None else alone, most))
        turn = DeviceTurn(model, widths, now)
        model.waiting.append(turn)
        return turn

    def done(self, turn: DeviceTurn, now: float) -> None:
        """A forward has ended."""
        model = turn.model
        seconds = 0.0 if turn.began_at is None else now - turn.began_at
        model.running -= 1
        self.free_room += turn.width
        had_s = seconds * turn.width / self.room
        model.had_s += had_s
        model.clock += had_s / model.share - turn.charged
        model.forward_s += RECENT * (seconds - model.forward_s) if model.forward_s else seconds
        model.ended_at = now
        if model.returns and not self._are_at_once(self._shares(now)):
            model.expected, model.kept_until = model.expected + 1, now + model.keep_s

    def _shares(self, now: float) -> Mapping[int, float]:
        """The part of the device that each model with work may have, by `id`."""
        busy = [model for model in self.models if model.has_work(now)]
        total = math.fsum(model.share for model in busy)
        return {id(model): model.share / total for model in busy}

    def _are_at_once(self, shares: Mapping[int, float]) -> bool:
        if self._at_once is not None:
            return self._at_once
        cores = {model: self._whole_part(share) for model, share in shares.items()}
        if sum(cores.values()) > self.room:
            return True  # with more models than cores they wait for one another, by their shares
        return all(count >= WHOLE * self.room * shares[model] for model, count in cores.items())

    def _whole_part(self, share: float) -> int:
        return max(1, int(self.room * share + ROUNDING))

    def has_passed_on(self, turn: DeviceTurn) -> bool:
        """Whether other models have the room that this forward had."""
        return self.free_room < turn.width and not self.free

    def due(self, now: float) -> tuple[list[DeviceTurn], float]:
        """Begin the turns whose time has come. Also when to call again if nothing happens before: the model that the
        device is kept for may not come.
        """
        begun: list[DeviceTurn] = []
        unlimited = self.free or len(self.models) < 2  # a model alone has limits of its own
        while any(model.waiting for model in self.models):
            candidates = [model for model in self.models if model.waiting or model.is_expected(now)]
            model = min(candidates, key=lambda one: one.clock)
            if not model.waiting:
                return begun, model.kept_until
            turn = model.waiting[0]
            shares, (in_turn, least, alone) = self._shares(now), turn.widths
            turn.width = in_turn
            if len(shares) < 2 or self.free:
                turn.width = alone
            elif self._are_at_once(shares):
                turn.width = max(least, min(alone, self._whole_part(shares[id(model)])))
            if turn.width > self.free_room and not unlimited:
                break  # a narrower forward does not overtake: that could go on for ever
            model.waiting.popleft()
            self._begin(turn, now)
            begun.append(turn)
        return begun, math.inf

    def _begin(self, turn: DeviceTurn, now: float) -> None:
        model = turn.model
        turn.began_at = now
        model.waited_s += now - turn.asked_at
        model.running += 1
        model.expected = max(0, model.expected - 1)
        self.free_room -= turn.width
        self._clock = max(self._clock, model.clock)
        turn.charged = model.forward_s * turn.width / (self.room * model.share)
        model.clock += turn.charged


AT_ONCE = 2  # forwards on a CUDA device: copies of one behind the kernels of the other
STATION = "turn"  # of the time ledger: ready to compute, while other models do

Enter = Callable[[str], None]


class DeviceArbiter:
    """One device, or several that are used as one. Every model that computes there has a `DeviceSlot`."""

    def __init__(self, room: int, *, of_cores: bool = True, at_once: bool | None = None, free: bool = False) -> None:
        """`room`: cores, or concurrent forwards. `at_once` and `free`: see `FairScheduler`."""
        self.of_cores = of_cores
        self.scheduler = FairScheduler(room, at_once=at_once, free=free)
        self.changed = threading.Condition()
        self._again_at = math.inf

    def join(self, share: float = 1.0, *, fixed: bool = False) -> DeviceSlot:
        """Add a model with this share of the device. From any thread.

        `fixed`: a forward never has fewer cores than it asks for.
        """
        with self.changed:
            return DeviceSlot(self, self.scheduler.join(share), fixed=fixed)

    def settle(self) -> None:
        """Wake the threads whose turns have come. The caller holds `changed`."""
        begun, again_at = self.scheduler.due(time.perf_counter())
        if begun or again_at < self._again_at:
            self.changed.notify_all()
        self._again_at = again_at

    def wait(self, turn: DeviceTurn) -> None:
        """Block until this turn has begun. The caller holds `changed`."""
        while turn.began_at is None:
            left_s = self._again_at - time.perf_counter()
            if left_s <= 0:
                self.settle()
            else:
                self.changed.wait(min(left_s, threading.TIMEOUT_MAX))


class DeviceSlot:
    """One model's access to a device: `begin` before each forward, `end` after it, from any number of threads."""

    def __init__(self, arbiter: DeviceArbiter, model: SharingModel, *, fixed: bool = False) -> None:
        self._arbiter, self._model, self._fixed = arbiter, model, fixed
        self._open = True

    def begin(self, cores: int, enter: Enter) -> DeviceTurn | None:
        """Wait for the turn of a forward on `cores` cores or fewer: `cores_of` says how many it got. None once the
        slot is closed. While it waits, `enter` is called with the station of the time ledger.
        """
        arbiter = self._arbiter
        with arbiter.changed:
            if not self._open:
                return None
            now = time.perf_counter()
            if arbiter.of_cores:
                turn = arbiter.scheduler.ask(self._model, cores, now, least=cores if self._fixed else 1)
            else:
                turn = arbiter.scheduler.ask(self._model, arbiter.scheduler.room, now, alone=1)
            arbiter.settle()
            if turn.began_at is None:
                enter(STATION)
                arbiter.wait(turn)
            return turn

    def cores_of(self, turn: DeviceTurn | None, wanted: int) -> int:
        """How many cores a forward has that asked for `wanted`."""
        return wanted if turn is None or not self._arbiter.of_cores else min(wanted, turn.width)

    def has_all(self, turn: DeviceTurn | None) -> bool:
        """Whether a CUDA device belongs to this forward alone until it ends, and to another model afterwards: all
        that the forward has launched must be done by then.
        """
        return turn is not None and turn.has_all

    def end(self, turn: DeviceTurn | None) -> bool:
        """The forward is over. Whether other models now have its part of the device."""
        if turn is None:
            return False
        arbiter = self._arbiter
        with arbiter.changed:
            arbiter.scheduler.done(turn, time.perf_counter())
            arbiter.settle()
            return arbiter.scheduler.has_passed_on(turn)

    @property
    def is_alone(self) -> bool:
        """Whether no other model computes on the device, so that no forward waits for its turn."""
        return len(self._arbiter.scheduler.models) < 2

    @contextmanager
    def turn(self, cores: int, enter: Enter) -> Iterator[int]:
        """`begin` and `end` around one forward; yields how many cores it has."""
        turn = self.begin(cores, enter)
        try:
            yield self.cores_of(turn, cores)
        finally:
            self.end(turn)

    def close(self) -> None:
        """Leave the device: forwards that wait begin at once, and later ones do not wait."""
        arbiter = self._arbiter
        with arbiter.changed:
            if self._open:
                self._open = False
                arbiter.scheduler.leave(self._model, time.perf_counter())
                arbiter.settle()
                arbiter.changed.notify_all()

    def counters(self) -> Mapping[str, float]:
        """`had_s`, device time in seconds of the whole device, and `waited_s`, its forwards' waiting for turns."""
        return {"had_s": self._model.had_s, "waited_s": self._model.waited_s}


class UnsharedSlot(DeviceSlot):
    """For a model that never waits for another."""

    def __init__(self) -> None:
        pass

    def begin(self, cores: int, enter: Enter) -> DeviceTurn | None:
        """None, at once."""
        return None

    @property
    def is_alone(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing to leave."""

    def counters(self) -> Mapping[str, float]:
        """None."""
        return {}


def arbiter_of(setup: Setup, *, free: bool = False) -> DeviceArbiter:
    """For the devices that a run names, used as one: a CPU is as wide as this process's share of the cores.

    `free`: models compute at once, each as if it were alone.
    """
    if machine.wants_cuda(setup.devices):
        count = sum(machine.cuda_devices() if name in ("cuda", "all") else 1 for name in setup.devices)
        return DeviceArbiter(AT_ONCE * count, of_cores=False, at_once=count > 1, free=free)
    room = max(1, machine.cores() // setup.processes)
    return DeviceArbiter(room, at_once=None if room > 1 else False, free=free)

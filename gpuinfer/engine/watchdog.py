"""Who holds what, and for how long: a plugin that keeps a run waiting is named, and in the end it is given up.

A thread of the watchdog's own checks, since a plugin may block the event loop itself. Time counts as far as the thread
was running: a process that was suspended accuses no plugin.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuinfer.api import Backend, Setup, Strategy
from gpuinfer.config import blame
from gpuinfer.errors import BackendDied, BackendError, WorkError
from gpuinfer.host import compile_status

log = logging.getLogger(__name__)

START, STRATEGY, REMOTE = 6.0, 0.1, 6.0  # of `give_up`: loading takes long, deciding does not, a far side has its own
LONGEST = 50.0  # times the longest batch so far: a run that is slow is not one that hangs
CHECKS = 8  # until the first warning
CHECK_S = 1.0  # between two checks, at most
REACT_S = 5.0  # for the event loop to take in that something is given up


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a plugin may hold something, in seconds: until it is named, and until it is given up."""

    say_s: float = 10.0
    give_up_s: float = 600.0

    @classmethod
    def of(cls, setup: Setup) -> Patience:
        return cls(setup.patience, setup.give_up)

    @property
    def start_s(self) -> float:
        return START * self.give_up_s

    @property
    def strategy_s(self) -> float:
        return STRATEGY * self.give_up_s

    @property
    def close_s(self) -> float:
        return 3 * self.say_s

    def batch_s(self, longest_s: float, remote: bool) -> float:
        """`longest_s`: what the longest batch took until now."""
        return max((REMOTE if remote else 1.0) * self.give_up_s, LONGEST * longest_s)


@dataclass(frozen=True, slots=True)
class Held:
    """What a plugin has in hand. The same key at the next check means that nothing has moved."""

    key: Hashable
    plugin: Any
    doing: str  # "has had batch 1 for {age}"
    limit_s: float = math.inf  # after which it is given up
    grace: float = 1.0  # of the patience until the first word
    within: bool = False  # another plugin has called it, and waits for it


Sources = Callable[[], Iterable[Held]]


class Watchdog:
    """Checks what is held, from `start` to `stop`.

    `give_up` is called on the loop, once, with the error that names who held what for too long; `stuck` with the same
    from the thread, when the loop is blocked and has not taken that in. `name` stands before each warning.
    """

    def __init__(
        self,
        patience: Patience,
        give_up: Callable[[WorkError], None],
        stuck: Callable[[WorkError], None] = lambda error: None,
        name: str = "",
    ) -> None:
        self.patience = patience
        self._give_up, self._stuck, self._name = give_up, stuck, f"{name}: " if name else ""
        self._sources: list[Sources] = []
        self._plugins: list[Any] = []
        self._every_s = min(CHECK_S, patience.say_s / CHECKS)
        self._over, self._checked = threading.Event(), time.monotonic()
        self._held_s: dict[Hashable, float] = {}
        self._warn_at: dict[Hashable, float] = {}  # the age at which the next warning is due
        self._beats, self._heard = 0, -1  # of the loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0  # of the loop
        self._error: WorkError | None = None  # of what was given up
        self._taken_in, self._unheard_s = False, 0.0

    def watch(self, sources: Sources, *plugins: Any) -> None:
        """Check these sources from now on, from another thread.

        `plugins` are those that may block the loop, or classes of what is called in their place.
        """
        self._sources.append(sources)
        self._plugins.extend(plugins)

    def start(self) -> None:
        """On the loop that is watched. Without one, call `check_again` from time to time."""
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        threading.Thread(target=self._run, name="gpuinfer watchdog", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _run(self) -> None:
        self._checked = time.monotonic()
        while not self._over.wait(self._every_s):
            self.check_again()

    def check_again(self) -> None:
        """Check once more. Of the time since the last check two intervals count: it may have been suspended."""
        now = time.monotonic()
        passed_s, self._checked = now - self._checked, now
        self.check(min(passed_s, 2 * self._every_s))

    def check(self, passed_s: float) -> None:
        """Check once, so many seconds after the check before."""
        held = {one.key: one for one in self._all_held()}
        self._held_s = {key: self._held_s.get(key, -passed_s) + passed_s for key in held}
        self._warn_at = {key: at for key, at in self._warn_at.items() if key in held}
        within_s = max([self._held_s[key] for key, one in held.items() if one.within], default=0.0)
        for key, one in held.items():
            age_s = self._held_s[key]
            if not (0 < age_s < 2 * within_s and isinstance(one.plugin, Backend)):  # else it waits itself
                self._judge(one, age_s)
        if self._error is not None and not self._taken_in:
            self._unheard_s += passed_s
            if self._unheard_s >= min(REACT_S, self.patience.say_s):
                self._taken_in = True
                self._stuck(self._error)

    def _all_held(self) -> list[Held]:
        """What is held. While a plugin blocks the loop, that plugin alone: everything else waits for the loop.

        A plugin that a backend has called may take as long as that backend.
        """
        held = [one for sources in self._sources for one in sources()]
        limit_s = max((one.limit_s for one in held if isinstance(one.plugin, Backend)), default=self.patience.give_up_s)
        for call in blame.calls_within():
            doing = f"has kept the model waiting in {call.method} for {{age}}"
            held.append(Held(("call", call.number), call.plugin, doing, limit_s, within=True))
        if (blocking := self._loop_held()) is None:
            return held
        limits = [one.limit_s for one in held if one.plugin is blocking.plugin and one.limit_s < math.inf]
        return [replace(blocking, limit_s=max([blocking.limit_s, *limits]))]

    def _judge(self, held: Held, age_s: float) -> None:
        if age_s >= held.limit_s and self._error is None:
            kind = type(blame.failure(held.plugin, ""))
            what = f"{blame.who(held.plugin)} {held.doing.format(age=_seconds(age_s))}, and is given up"
            cure = f"Mend it{blame.check_hint(held.plugin)}, or allow more with --give-up."
            self._error = (BackendDied if kind is BackendError else kind)(f"{what}. {cure}")
            self._on_loop(self._end)
            return
        warn_at = self._warn_at.get(held.key, self.patience.say_s * held.grace)
        if age_s >= warn_at and self._error is None:
            self._warn_at[held.key] = 2 * warn_at
            until = f" It is given up after {_seconds(held.limit_s)}." if held.limit_s < math.inf else ""
            doing = held.doing.format(age=_seconds(age_s))
            doing += f" ({compile_status.NOTE})" if compile_status.is_compiling() else ""
            log.warning("%s%s %s.%s", self._name, blame.who(held.plugin), doing, until)

    def _end(self) -> None:
        self._taken_in = True
        assert self._error is not None
        self._give_up(self._error)

    # The loop

    def _loop_held(self) -> Held | None:
        """The plugin that blocks the event loop, if one does."""
        if self._loop is None:
            return None
        self._on_loop(self._beat)
        moved, self._heard = self._beats != self._heard, self._beats
        if moved or (found := culprit(self._thread, self._plugins)) is None:
            return None
        plugin, method, place = found
        limit_s = math.inf  # a workload may compute for as long as it likes
        if isinstance(plugin, Strategy):
            limit_s = self.patience.strategy_s
        elif isinstance(plugin, Backend | type):
            own = {"start": self.patience.start_s, "close": self.patience.close_s}
            limit_s = own.get(method, self.patience.give_up_s) if isinstance(plugin, Backend) else own["start"] / START
        doing = f"has kept all else waiting in {method} for {{age}} (it is at {place})"
        return Held(("loop", self._beats), plugin, doing, limit_s)

    def _beat(self) -> None:
        self._beats += 1

    def _on_loop(self, call: Callable[[], None]) -> None:
        if self._loop is None:
            return call()
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # it is closed
            self._over.set()


def culprit(thread: int, plugins: Sequence[Any]) -> tuple[Any, str, str] | None:
    """Which of the plugins this thread is in now, the innermost: the plugin, the method by which it was entered, and
    the `file:line` where it is.
    """
    frame = sys._current_frames().get(thread)
    place = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
    found: tuple[Any, str, str] | None = None
    while frame is not None:
        code = frame.f_code
        own = frame.f_locals.get("self") if code.co_varnames[:1] == ("self",) else None
        plugin = next((one for one in plugins if one is own or one is type(own)), None)
        if plugin is not None and (found is None or found[0] is plugin):
            found = plugin, code.co_name, place
        frame = frame.f_back
    return found


def _seconds(count: float) -> str:
    return f"{count:.0f} s" if count >= 10 else f"{count:.2g} s"

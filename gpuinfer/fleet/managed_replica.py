"""One replica of ours: started, probed, killed when it hangs, started again when it is gone, with exponential backoff.
The states are starting → up → (draining) → starting, or down while it does not come up. It is up once it has written
its ready file and answered a probe. After a first death it is started again at once, then ever later: at most
seconds where it had served well, at most half a minute where it does not even come up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from msgspec import structs

from gpuinfer.errors import WorkError
from gpuinfer.fleet.plan import HealthChecks
from gpuinfer.fleet.router.protocol import FleetMember
from gpuinfer.fleet.worker import ProbedHealth, Worker
from gpuinfer.host import error_text
from gpuinfer.launchers.base import LaunchedProcess, Launcher, ProcessPlan

FIRST_S = 0.5
MOST_S = 30.0  # of one that does not come up
MOST_UP_S = 4.0  # of one that does
WELL_S = 5.0  # one that has served for so long had a good start: its next death counts as a first


class Backoff:
    """The delays between the attempts to start one replica."""

    __slots__ = ("_short", "failed")

    def __init__(self) -> None:
        self._short = self.failed = 0  # in a row: short lives, attempts that did not come up

    def after(self, served_s: float) -> float:
        """Seconds until the next attempt. `served_s`: how long the last one has served, 0 if it never came up."""
        if served_s <= 0.0:
            self.failed += 1
            times, most_s = self.failed, MOST_S
        else:
            self.failed, self._short = 0, 0 if served_s >= WELL_S else self._short + 1
            times, most_s = self._short - 1, MOST_UP_S
        return float(min(most_s, FIRST_S * 2 ** min(times - 1, 16))) if times > 0 else 0.0


log = logging.getLogger(__name__)

KILL_S = 30.0  # for a launcher to end a replica
CAUSES = {
    "late": "gave no sign of life for {timeout_s:g} s and was killed",
    "stuck": "had work and did none of it, and was killed",
}


class ManagedReplica(Worker):
    """A replica of ours. Its first attempt holds `starting`, so that few start at once; later ones do not wait.

    `first` is done once the first attempt is up or has failed; its result is the error, or None.
    """

    ours = True
    founding = False  # started with the fleet

    def __init__(
        self,
        plan: ProcessPlan,
        key: str,
        launcher: Launcher,
        starting: asyncio.Semaphore,
        start_s: float,
        changed: Callable[[], None],
        tell: Callable[[str], None],
        catch_up: Callable[[Worker], Awaitable[None]],
        checks: HealthChecks,
    ) -> None:
        """`catch_up` loads the fleet's present weights and adapters, before the first request."""
        super().__init__(plan.index, key, changed, tell, checks)
        self.plan = plan
        self._catch_up = catch_up
        self._caught_up = 0  # the attempt that has
        self._catching: asyncio.Task[None] | None = None
        self.first: asyncio.Future[WorkError | None] = asyncio.get_running_loop().create_future()
        self._launcher, self._starting, self._start_s = launcher, starting, start_s
        self._backoff = Backoff()
        self._launching: asyncio.Task[LaunchedProcess] | None = None

    @property
    def pid(self) -> int | None:
        """The process id of a local replica."""
        return getattr(self._launched, "pid", None)

    @property
    def _launched(self) -> LaunchedProcess | None:
        """What the latest attempt has started, if anything."""
        task = self._launching
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()

    async def run(self) -> None:
        while True:
            try:
                served_s = await self._attempt()
            except Exception as error:
                log.error("%s: %s", self.plan.name, error_text.safe_str(error), exc_info=error)
                await self._gone(self.plan, f"{self.plan.name}: {error_text.full_message(error)}")
                self._end_first(WorkError(self.failure))
                served_s = 0.0
            delay_s = self._backoff.after(served_s)
            if delay_s:
                self._tell(f"{self.plan.name} is started again in {delay_s:g} s.")
            await asyncio.sleep(delay_s)

    async def end(self, within_s: float) -> None:
        await self._stop()
        self._end_first(None)
        if self._launching is not None:
            await asyncio.wait({self._launching}, timeout=KILL_S)
        if (launched := self._launched) is not None:
            await (launched.terminate(within_s) if within_s > 0 else launched.kill())
        self.state = "down"

    def member(self) -> FleetMember:
        """A founding replica needs no slow start: no other is warmer."""
        member = super().member()
        return structs.replace(member, since=0.0) if self.founding and self.attempts == 1 else member

    def told(self) -> dict[str, Any]:
        plan = self.plan
        return {**super().told(), "pid": self.pid, "devices": plan.devices, "log": str(plan.log)}

    async def _attempt(self) -> float:
        """Start the replica, and supervise it until it is gone. For how many seconds it served."""
        self.since = 0.0
        self._become("starting")
        plan = replace(self.plan, attempt=self.attempts)
        plan = replace(plan, arguments=(*plan.arguments, "--ready-file", str(plan.ready_file)))
        self.attempts += 1
        try:
            async with self._starting if self.attempts == 1 else contextlib.nullcontext():
                launched, (host, port) = await self._started(plan)
        except WorkError as error:
            await self._gone(plan, str(error), told=self.first.done(), hopeless=self._backoff.failed > 0)
            self._end_first(error)
            return 0.0
        up_at: float | None = None
        async with self._probed(host, port):
            while (beat := await self._look(lambda: not launched.alive)) == "well":
                if up_at is None and self.since:
                    up_at = time.monotonic()
                    self._tell(f"{plan.name} is up at {self.url}.")
                    self._end_first(None)
        if beat is not None:
            notice = f"{plan.name} {CAUSES[beat].format(timeout_s=self.checks.timeout_s)}."
        else:
            how, words = launched.ending, launched.last_words()
            notice = (
                f"{plan.name} died" + (f" ({how})." if how else ".") + (f' Its last words: "{words}".' if words else "")
            )
        await self._gone(plan, notice)
        self._end_first(WorkError(self.failure))
        return 0.0 if up_at is None else time.monotonic() - up_at

    def _answered(self, health: ProbedHealth) -> None:
        """A replica is up only once it has the others' weights."""
        if not health.ready or self._caught_up == self.attempts:
            super()._answered(health)
        elif self._catching is None or self._catching.done():
            self._catching = asyncio.create_task(self._catches_up())

    async def _catches_up(self) -> None:
        attempt = self.attempts
        try:
            await self._catch_up(self)
        except Exception as error:  # noqa: BLE001 (tried again at the next probe)
            if self.failure != str(error):
                self.failure = str(error)
                self._tell(f"{self.plan.name} has not the weights of the others yet: {error}")
            return
        self._caught_up = attempt
        self.nudge()

    async def _started(self, plan: ProcessPlan) -> tuple[LaunchedProcess, tuple[str, int]]:
        """Launch, and wait until it serves. Raises `WorkError` if it fails, is suspended or takes too long."""
        self._launching = asyncio.create_task(self._launcher.launch(plan))
        launched = await asyncio.shield(self._launching)
        ready = asyncio.create_task(launched.ready(self._start_s))
        suspended = 0
        try:
            while not ready.done():
                await asyncio.wait({ready}, timeout=self.checks.interval_s)
                suspended = suspended + 1 if launched.suspended else 0
                if suspended >= self.checks.late_checks:
                    raise WorkError(f"{plan.name} was suspended while it started, and killed.")
            return launched, ready.result()
        finally:
            ready.cancel()

    async def _gone(self, plan: ProcessPlan, why: str, *, told: bool = True, hopeless: bool = False) -> None:
        """The replica is gone. `hopeless`: it has failed to start several times, so that no request waits for it."""
        self.failure = why
        if told:
            self._tell(why)
        self._become("down" if hopeless else "starting")
        if (launched := self._launched) is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_S):
                    await launched.kill()
        plan.ready_file.unlink(missing_ok=True)

    def _end_first(self, error: WorkError | None) -> None:
        if not self.first.done():
            self.first.set_result(error)

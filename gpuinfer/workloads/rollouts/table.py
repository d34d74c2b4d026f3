"""An environment whose calls end, and whose answers are what they must be: else the game ends, and says whose fault it
was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import traceback
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from inspect import isawaitable
from typing import Any, TypeVar

from gpuinfer.errors import WorkError
from gpuinfer.host import spoken
from gpuinfer.rollouts.environment import Environment, Observation, Outcome
from gpuinfer.workloads.rollouts.blocking import Blocking
from gpuinfer.workloads.rollouts.loading import EnvironmentMaker
from gpuinfer.workloads.rollouts.speaking import Counts

T = TypeVar("T")

log = logging.getLogger(__name__)

LONG_S = 0.5  # to keep the event loop, before it is said
MOST_AGENTS = 10_000
MOST_MESSAGES = 10_000  # of one observation


class GameFailed(WorkError):
    """This game cannot go on; its neighbours can."""


class Table:
    """One game's environment. Every method raises `GameFailed`, which names the environment, its package and method.

    `seconds`: spent in the environment until now, waiting included.
    """

    def __init__(self, make: EnvironmentMaker, limit_s: float, counts: Counts) -> None:
        self._make, self._limit_s, self.counts = make, limit_s, counts
        self._own: Environment | None = None
        self.agents: tuple[str, ...] = ()
        self.roles: Mapping[str, str] = {}
        self.seconds = 0.0

    async def reset(self, seed: int) -> None:
        with blame_game(self._make.who, "__init__"):
            self._own = self._make()
        await self._call("reset", self._own.reset(seed))
        self.agents = self._agents(getattr(self._own, "agents", None))
        self.roles = self._roles(getattr(self._own, "roles", None) or {})

    async def observe(self) -> Mapping[str, Observation]:
        """Only agents that there are, each with messages."""
        found: Any = await self._call("observe", self._environment.observe())
        if not isinstance(found, Mapping):
            raise self._nonsense("observe", f"a {type(found).__name__} and no mapping of agents to observations")
        for agent, observation in found.items():
            self._check_agent("observe", agent)
            self._check_observation(agent, observation)
        return found

    async def step(self, answers: Mapping[str, str]) -> Outcome:
        """Rewards are finite, and of agents that there are."""
        found: Any = await self._call("step", self._environment.step(answers))
        if not isinstance(found, Outcome):
            raise self._nonsense("step", f"a {type(found).__name__} and no Outcome")
        for name, kind in (("rewards", found.rewards), ("metrics", found.metrics)):
            if not isinstance(kind, Mapping):
                raise self._nonsense("step", f"{name} that are a {type(kind).__name__} and no mapping")
        if not isinstance(found.remark, str):
            raise self._nonsense("step", f"a remark that is {found.remark!r:.60} and no text")
        for agent, reward in found.rewards.items():
            self._check_agent("step", agent)
            self._check_number(f"a reward of agent '{agent}'", reward)
        for name, value in found.metrics.items():
            self._check_number(f"the metric '{name}'", value)
        return found

    async def close(self) -> None:
        """Whatever it raises is said, and harms nothing: the game is over."""
        if self._own is not None:
            own, self._own = self._own, None
            await self._call("close", own.close())

    @property
    def _environment(self) -> Environment:
        if self._own is None:
            raise GameFailed(f"{self._make.who} was used before its reset. Report this.")
        return self._own

    async def _call(self, method: str, call: Coroutine[Any, Any, T]) -> T:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._limit_s):
                with blame_game(self._make.who, method):
                    return await (Blocking(call, lambda s: self._held(method, s)) if isawaitable(call) else call)
        except TimeoutError as error:
            raise GameFailed(
                f"{self._make.who} has not come back from {method} within {self._limit_s:g} s. "
                "Mend it, or allow more with --step-seconds."
            ) from error
        finally:
            self.seconds += time.monotonic() - began

    def _held(self, method: str, seconds: float) -> None:
        self.counts.blocked_s += seconds
        if seconds > LONG_S and not self.counts.blocked_said:
            self.counts.blocked_said = True
            log.warning(
                "%s kept all other games waiting for %.2g s in %s. Let it compute in a thread: await "
                "asyncio.to_thread(…).",
                self._make.who,
                seconds,
                method,
            )

    def _agents(self, found: Any) -> tuple[str, ...]:
        if isinstance(found, str) or not isinstance(found, Sequence) or not found:
            raise self._nonsense("reset", f"agents that are {found!r:.60} and no list of names")
        if not all(isinstance(one, str) and one for one in found) or len(set(found)) < len(found):
            raise self._nonsense("reset", f"agents {list(found)!r:.60}: each needs a name of its own")
        if len(found) > MOST_AGENTS:
            raise self._nonsense("reset", f"{len(found)} agents, and {MOST_AGENTS} are the most")
        return tuple(found)

    def _roles(self, found: Any) -> Mapping[str, str]:
        if not isinstance(found, Mapping) or not all(isinstance(role, str) for role in found.values()):
            raise self._nonsense("reset", f"roles that are {found!r:.60} and no mapping of agents to names")
        for agent in found:
            self._check_agent("reset", agent)
        return dict(found)

    def _check_agent(self, method: str, agent: Any) -> None:
        if agent not in self.agents:
            known = ", ".join(self.agents[:8])
            raise self._nonsense(method, f"an agent {agent!r:.60} that is not one of its own ({known})")

    def _check_observation(self, agent: str, found: Any) -> None:
        if not isinstance(found, Observation):
            raise self._nonsense("observe", f"a {type(found).__name__} for '{agent}' and no Observation")
        messages = found.messages
        if isinstance(messages, str) or not isinstance(messages, Sequence) or len(messages) > MOST_MESSAGES:
            raise self._nonsense("observe", f"messages for '{agent}' that are {messages!r:.60} and no list of messages")
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise self._nonsense("observe", f"a message for '{agent}' without a role: {message!r:.60}")

    def _check_number(self, what: str, value: Any) -> None:
        if isinstance(value, bool | int | float) and math.isfinite(value):
            return
        raise self._nonsense("step", f"{what} that is {value!r:.60} and no finite number")

    def _nonsense(self, method: str, what: str) -> GameFailed:
        return GameFailed(
            f"{self._make.who}: {method} answered {what}. Mend it: gpuinfer.rollouts.environment says how."
        )


@contextlib.contextmanager
def blame_game(who: str, method: str) -> Iterator[None]:
    """Say of what is raised inside that the environment raised it."""
    try:
        yield
    except (Exception, SystemExit) as error:
        log.debug("%s", "".join(traceback.format_exception(error)))
        raise GameFailed(f"{who}: {method} raised {spoken.in_short(error)}. Run it with -vv to see where.") from error

"""Environments by name with their options, and checked calls with a timeout: a wrong result ends the game with an error
that names the environment. Calls that block the event loop are timed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import math
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, create_model

from gpuinfer.config import blame, import_paths, registry
from gpuinfer.config.options import GivenValue, check, several
from gpuinfer.errors import UnknownName, UsageError, WorkError
from gpuinfer.host import error_text
from gpuinfer.rollouts.agent import RolloutCounts
from gpuinfer.rollouts.environment import Environment, Observation, Outcome

FLAG = "--env-option"
HORIZON = "horizon"
OURS = {"diplomacy": "plugins/gpuinfer-diplomacy"}  # by name, where they lie in our repository


@dataclass(frozen=True)
class EnvironmentMaker:
    """Makes one environment after another, all with the same options."""

    name: str
    factory: Callable[..., Any]
    origin: str  # of what package it is, in words
    options: Mapping[str, Any] = field(default_factory=dict)
    knows_horizon: bool = False  # the environment itself ends a game there

    @property
    def who(self) -> str:
        return f"environment '{self.name}' ({self.origin})" if self.origin else f"environment '{self.name}'"

    def __call__(self) -> Environment:
        """Raises what the factory does; `UsageError` for what is no environment."""
        made = self.factory(**self.options)
        missing = [one for one in ("reset", "observe", "step", "close") if not callable(getattr(made, one, None))]
        if missing:
            raise UsageError(
                f"{self.who} made a {type(made).__name__}, which has no {', '.join(missing)}. "
                "Derive it from gpuinfer.rollouts.environment.Environment."
            )
        return made  # type: ignore[no-any-return]


def open_environment(name: str, given: Sequence[str], horizon: int | None = None) -> EnvironmentMaker:
    """The environment of that name with options `key=value`. Raises `UsageError`."""
    if ":" in name:
        factory = import_paths.load_named("environment", name, "module:factory")
        origin = blame.owner_of(getattr(factory, "__module__", name.partition(":")[0]))
    else:
        try:
            factory = registry.load("environments", name)
        except UnknownName as error:
            if (package := OURS.get(name)) is None:
                raise
            raise UsageError(f"{error} Ours is in a package of its own: pip install {package}") from None
        origin = f"package {registry.find('environments', name).package}"
    if not callable(factory):
        raise UsageError(f"environment '{name}' is a {type(factory).__name__}, which cannot be called. Name a class.")
    model, words = _options_of(factory), []
    for word in given:
        key, equals, value = word.partition("=")
        key = key.strip().replace("-", "_")
        if not (key and equals):
            raise UsageError(f"{FLAG} {word}: not of the form key=value. Write {FLAG} {key or 'key'}=VALUE.")
        words.append((key, GivenValue(value, f"{FLAG} {key}")))
    pairs = several(words)
    knows = HORIZON in model.model_fields
    if knows and horizon is not None and HORIZON not in pairs:
        pairs[HORIZON] = GivenValue(horizon, "--horizon")
    return EnvironmentMaker(name, factory, origin, check(model, pairs, f"environment '{name}'"), knows)


def _options_of(factory: Any) -> type[BaseModel]:
    """The class `Options` of the factory, or one made from a plain function's parameters."""
    own = getattr(factory, "Options", None)
    if isinstance(own, type) and issubclass(own, BaseModel):
        return own
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(factory, eval_str=True).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        kind = Any if parameter.annotation is parameter.empty else parameter.annotation
        fields[name] = (kind, ... if parameter.default is parameter.empty else parameter.default)
    return create_model("Options", __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=True), **fields)


T = TypeVar("T")


class BlockingTimer(Awaitable[T]):
    """Awaits something else, and tells how long each of its pieces between two waits took."""

    def __init__(self, own: Awaitable[T], tell: Callable[[float], None]) -> None:
        self._own, self._tell = own, tell

    def __await__(self) -> Generator[Any, Any, T]:
        inner = self._own.__await__()
        send: Callable[[], Any] = functools.partial(next, inner)
        while True:
            began = time.monotonic()
            try:
                waits_for = send()
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            finally:
                self._tell(time.monotonic() - began)
            try:
                yield waits_for
                send = functools.partial(next, inner)
            except BaseException as error:  # noqa: BLE001  it is thrown where it belongs
                send = functools.partial(inner.throw, error)  # type: ignore[attr-defined]


log = logging.getLogger(__name__)

LONG_S = 0.5  # to keep the event loop, before it is reported
MOST_AGENTS = 10_000
MOST_MESSAGES = 10_000  # of one observation


class GameFailed(WorkError):
    """This game cannot go on; its neighbours can."""


class GuardedEnvironment:
    """One game's environment. Every method raises `GameFailed`, which names the environment, its package and method.

    `seconds`: spent in the environment until now, waiting included.
    """

    def __init__(self, make: EnvironmentMaker, limit_s: float, counts: RolloutCounts) -> None:
        self._make, self._limit_s, self.counts = make, limit_s, counts
        self._own: Environment | None = None
        self.agents: tuple[str, ...] = ()
        self.roles: Mapping[str, str] = {}
        self.seconds = 0.0

    async def reset(self, seed: int) -> None:
        with blame_game(self._make.who, "__init__"):
            self._own = self._make()
        await self._call("reset", self._own.reset(seed))
        agents: Any = getattr(self._own, "agents", None)
        if isinstance(agents, str) or not isinstance(agents, Sequence) or not agents:
            raise self._nonsense("reset", f"agents that are {agents!r:.60} and no list of names")
        if not all(isinstance(one, str) and one for one in agents) or len(set(agents)) < len(agents):
            raise self._nonsense("reset", f"agents {list(agents)!r:.60}: each needs a name of its own")
        if len(agents) > MOST_AGENTS:
            raise self._nonsense("reset", f"{len(agents)} agents, and {MOST_AGENTS} are the most")
        self.agents = tuple(agents)
        roles: Any = getattr(self._own, "roles", None) or {}
        if not isinstance(roles, Mapping) or not all(isinstance(role, str) for role in roles.values()):
            raise self._nonsense("reset", f"roles that are {roles!r:.60} and no mapping of agents to names")
        for agent in roles:
            self._check_agent("reset", agent)
        self.roles = dict(roles)

    async def observe(self) -> Mapping[str, Observation]:
        """Only agents that there are, each with messages."""
        assert self._own is not None
        found: Any = await self._call("observe", self._own.observe())
        if not isinstance(found, Mapping):
            raise self._nonsense("observe", f"a {type(found).__name__} and no mapping of agents to observations")
        for agent, observation in found.items():
            self._check_agent("observe", agent)
            if not isinstance(observation, Observation):
                raise self._nonsense("observe", f"a {type(observation).__name__} for '{agent}' and no Observation")
            messages: Any = observation.messages
            if isinstance(messages, str) or not isinstance(messages, Sequence) or len(messages) > MOST_MESSAGES:
                what = f"messages for '{agent}' that are {messages!r:.60} and no list of messages"
                raise self._nonsense("observe", what)
            for message in messages:
                if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                    raise self._nonsense("observe", f"a message for '{agent}' without a role: {message!r:.60}")
        return found

    async def step(self, answers: Mapping[str, str]) -> Outcome:
        """Rewards are finite, and of agents that there are."""
        assert self._own is not None
        found: Any = await self._call("step", self._own.step(answers))
        if not isinstance(found, Outcome):
            raise self._nonsense("step", f"a {type(found).__name__} and no Outcome")
        for name, kind in (("rewards", found.rewards), ("metrics", found.metrics)):
            if not isinstance(kind, Mapping):
                raise self._nonsense("step", f"{name} that are a {type(kind).__name__} and no mapping")
        if not isinstance(found.remark, str):
            raise self._nonsense("step", f"a remark that is {found.remark!r:.60} and no text")
        for agent in found.rewards:
            self._check_agent("step", agent)
        numbers = {f"a reward of agent '{agent}'": value for agent, value in found.rewards.items()}
        numbers |= {f"the metric '{name}'": value for name, value in found.metrics.items()}
        for what, value in numbers.items():
            if not (isinstance(value, bool | int | float) and math.isfinite(value)):
                raise self._nonsense("step", f"{what} that is {value!r:.60} and no finite number")
        return found

    async def close(self) -> None:
        """Errors are raised as `GameFailed`; the game is over already."""
        if self._own is not None:
            own, self._own = self._own, None
            await self._call("close", own.close())

    async def _call(self, method: str, call: Coroutine[Any, Any, T]) -> T:
        began = time.monotonic()

        def held(seconds: float) -> None:
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

        try:
            async with asyncio.timeout(self._limit_s):
                with blame_game(self._make.who, method):
                    return await (BlockingTimer(call, held) if isawaitable(call) else call)
        except TimeoutError as error:
            raise GameFailed(
                f"{self._make.who} has not come back from {method} within {self._limit_s:g} s. "
                "Mend it, or allow more with --step-seconds."
            ) from error
        finally:
            self.seconds += time.monotonic() - began

    def _check_agent(self, method: str, agent: Any) -> None:
        if agent not in self.agents:
            known = ", ".join(self.agents[:8])
            raise self._nonsense(method, f"an agent {agent!r:.60} that is not one of its own ({known})")

    def _nonsense(self, method: str, what: str) -> GameFailed:
        return GameFailed(
            f"{self._make.who}: {method} answered {what}. Mend it: gpuinfer.rollouts.environment says how."
        )


@contextlib.contextmanager
def blame_game(who: str, method: str) -> Iterator[None]:
    """Errors raised inside become `GameFailed`, which names the environment and the method."""
    try:
        yield
    except (Exception, SystemExit) as error:
        log.debug("%s", "".join(traceback.format_exception(error)))
        raise GameFailed(
            f"{who}: {method} raised {error_text.short_message(error)}. Run it with -vv to see where."
        ) from error

"""What a training step is judged by, measured where it happens: rows under way, environments, the engine's time, and
integrals over time of each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from gpuinfer.api import Infer
from gpuinfer.generation import Generation
from gpuinfer.rollouts.environment import Environment
from gpuinfer.rollouts.guarded_environment import BlockingTimer, EnvironmentMaker

Clock = Callable[[], float]


class LevelIntegral:
    """A number that goes up and down, such as rows under way, and its integral over time.

    `sum_s`: units times seconds until the last `take`'s end; `any_s`: seconds with at least one.
    """

    __slots__ = ("_any", "_clock", "_since", "_sum", "value")

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._sum = self._any = 0.0
        self._since = clock()
        self.value = 0

    def add(self, change: int) -> None:
        """So many more from now on."""
        self._settle()
        self.value += change

    @contextlib.contextmanager
    def during(self, amount: int = 1) -> Iterator[None]:
        """So many more inside the context."""
        self.add(amount)
        try:
            yield
        finally:
            self.add(-amount)

    def take(self) -> tuple[float, float]:
        """(unit-seconds, seconds with at least one) since the last `take`; both start again at 0."""
        self._settle()
        found, self._sum, self._any = (self._sum, self._any), 0.0, 0.0
        return found

    def _settle(self) -> None:
        now = self._clock()
        if self.value > 0:
            self._sum += self.value * (now - self._since)
            self._any += now - self._since
        self._since = now


class InferWrapper:
    """Passes everything on to another `Infer`, except what a subclass overrides."""

    def __init__(self, own: Infer) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


T = TypeVar("T")

COLD = 4.0  # times as long as usual
METHODS = ("reset", "observe", "step", "close")  # of an environment


class RolloutMeter:
    """Counts from its making on. `take` tells of the time since the `take` before."""

    def __init__(self) -> None:
        self.rows, self.groups = LevelIntegral(), LevelIntegral()
        self.gated = LevelIntegral()
        self.in_environment, self.thinking = LevelIntegral(), LevelIntegral()  # games in a call, and between two calls
        self.blocked_s = 0.0  # that environments kept the event loop to themselves
        self.calls = self.input_tokens = self.output_tokens = 0  # of answers that have come
        self.began = time.monotonic()
        self.reference_s: Callable[[], float] = lambda: 0.0  # a reference pass was under way, until now
        self._reference_told = 0.0
        self._first_token: float | None = None  # when it came
        self._usual_s: float | None = None  # the longest until a first token, of answers that were begun after that
        self._cold_told = False

    def answered(self, found: Any) -> None:
        self.calls += 1
        if type(found) is not Generation:
            return
        self.input_tokens += found.prompt_tokens
        self.output_tokens += sum(len(one.tokens) for one in found.completions)
        if self._cold_told:
            return
        begun = time.monotonic() - found.seconds
        if self._first_token is None:
            self._first_token = max(self.began, begun + found.first_token_s)
        elif begun > self._first_token:
            self._usual_s = max(self._usual_s or 0.0, found.first_token_s)

    def take(self) -> dict[str, float]:
        """The fields of a `StepRecord` that are measured here, and `rows_s`."""
        rows_s, _ = self.rows.take()
        _, working_s = self.groups.take()
        in_environment, _ = self.in_environment.take()
        thinking, _ = self.thinking.take()
        blocked, self.blocked_s = self.blocked_s, 0.0
        answers = {"calls": self.calls, "input_tokens": self.input_tokens, "output_tokens": self.output_tokens}
        self.calls = self.input_tokens = self.output_tokens = 0
        cold_s = 0.0  # what the first token of all took beyond what those of later answers took
        if not self._cold_told and self._first_token is not None:
            self._cold_told = True
            first_s = self._first_token - self.began
            if self._usual_s is not None and first_s >= COLD * self._usual_s:  # else many began at once
                cold_s = first_s - self._usual_s
        alive = in_environment + thinking
        before, self._reference_told = self._reference_told, self.reference_s()
        return {
            "rows_s": rows_s,
            "working_s": working_s,
            "reference_s": self._reference_told - before,
            "gated_s": self.gated.take()[1],
            "environment_share": in_environment / alive if alive else 0.0,
            "blocked_s": blocked,
            **answers,
            "cold_start_s": cold_s,
        }

    def environments(self, make: EnvironmentMaker) -> EnvironmentMaker:
        """The same, each of its games measured."""

        def made(**options: Any) -> Any:
            found = make.factory(**options)
            return (
                TimedEnvironment(found, self) if all(callable(getattr(found, one, None)) for one in METHODS) else found
            )

        return dataclasses.replace(make, factory=made)


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """The counters of a run that steps are computed from; totals since the start."""

    inference_s: float = 0.0
    row_s: float = 0.0  # rows times seconds of forward steps
    step_s: float = 0.0  # of all engines together
    constraint_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    slots: int = 0
    counts: bool = False  # whether tokens are counted at all

    @classmethod
    def of(cls, wire: Mapping[str, Any]) -> EngineCounts:
        """Of `Infer.counted`. The busiest engine's time stands for all."""
        steps = {int(rows): tuple(counted) for rows, counted in wire.get("batch_s", {}).items()}
        lanes = [lane["stations"] for lane in wire.get("lanes", ())]
        engines = [lane for lane in lanes if "forward" in lane or "prefill" in lane]
        beside = [lane for lane in lanes if "understand" in lane and lane not in engines]
        step_s = sum(seconds for _, seconds in steps.values())
        busy = (sum(seconds for station, seconds in lane.items() if station != "idle") for lane in engines)
        at_work = max(busy, default=0.0)
        tokens = wire.get("device", {}).get("tokens") or {}
        return cls(
            inference_s=at_work or step_s,
            row_s=sum(rows * seconds for rows, (_, seconds) in steps.items()),
            step_s=step_s,
            constraint_s=max((lane.get("constrain", 0.0) for lane in engines), default=0.0)
            + max((lane.get("constrain", 0.0) for lane in beside), default=0.0),
            input_tokens=tokens.get("input", 0),
            output_tokens=tokens.get("output", 0),
            slots=wire.get("slots", 0),
            counts=bool(tokens),
        )

    def since(self, then: EngineCounts) -> EngineCounts:
        """What was counted in between. An engine that began anew has counted since then."""
        names = [one.name for one in dataclasses.fields(self) if one.name not in ("slots", "counts")]
        grown = {name: max(0, getattr(self, name) - getattr(then, name)) for name in names}
        return dataclasses.replace(self, **grown)


class TimedEnvironment(Environment):
    """Wraps an environment and measures the time that games spend in its methods."""

    def __init__(self, own: Any, meter: RolloutMeter) -> None:
        self._own, self._meter = own, meter
        self._open = False

    @property
    def agents(self) -> Any:  # type: ignore[override]
        return getattr(self._own, "agents", None)

    @property
    def roles(self) -> Any:  # type: ignore[override]
        return getattr(self._own, "roles", None)

    async def reset(self, seed: int) -> None:
        self._open = True
        self._meter.thinking.add(1)
        await self._call(self._own.reset(seed))

    async def observe(self) -> Any:
        return await self._call(self._own.observe())

    async def step(self, answers: Mapping[str, str]) -> Any:
        return await self._call(self._own.step(answers))

    async def close(self) -> None:
        if self._open:
            self._open = False
            self._meter.thinking.add(-1)
        await self._own.close()

    async def _call(self, call: Awaitable[T]) -> T:
        meter = self._meter
        meter.thinking.add(-1)
        try:
            with meter.in_environment.during():
                if not hasattr(call, "__await__"):
                    return await call  # which says what is wrong with it

                def blocked(seconds: float) -> None:
                    meter.blocked_s += seconds

                return await BlockingTimer(call, blocked)
        finally:
            meter.thinking.add(1)


Name = Callable[[], str | None]


class MeteredInfer(InferWrapper):
    """The run's way to answers, with the rows under way counted, and each answer's tokens under a version.

    `name` returns the version of the weights at the time of a request, for backends that do not know the version:
    where the backend names none, the answer is of that version; None: it stays without a name.
    """

    def __init__(self, own: Infer, meter: RolloutMeter, name: Name) -> None:
        super().__init__(own)
        self._meter, self._name = meter, name

    async def __call__(self, payload: Any, *, rows: int = 1, **ways: Any) -> Any:
        name = self._name()
        with self._meter.rows.during(rows):
            found = await self._own(payload, rows=rows, **ways)
        self._meter.answered(found)
        return found if name is None else name_version(found, name)


def name_version(found: Any, name: str) -> Any:
    """A generation whose tokens of unnamed weights are of these."""
    if type(found) is not Generation:
        return found
    named = (
        one
        if all(version for _, version in one.versions)
        else msgspec.structs.replace(one, versions=tuple((start, known or name) for start, known in one.versions))
        for one in found.completions
    )
    return msgspec.structs.replace(found, completions=tuple(named))

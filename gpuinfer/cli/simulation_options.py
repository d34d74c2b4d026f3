"""What `gpuinfer simulate` simulates: its flags as typed options, and the objects that they stand for.

`--sweep key=a,b,c` as a grid: any flag of the simulation, any option of a strategy, or the strategy itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field

from gpuinfer import api
from gpuinfer.api import Limits, Setup, Strategy
from gpuinfer.backends.service_model import ServiceModel
from gpuinfer.cli.building import merge
from gpuinfer.cli.flags import option_pairs
from gpuinfer.cli.grid import points, split_axis
from gpuinfer.cli.variants import Axis, addressed, labels_of, with_choices
from gpuinfer.config import blame, options, registry, settings
from gpuinfer.config.options import check, natural
from gpuinfer.engine.arrivals import classes_of, open_arrivals, parse_rows, refuse_unused, schedule_of
from gpuinfer.engine.core import Journal
from gpuinfer.errors import UnknownName, UsageError
from gpuinfer.fleet.routing_policies import check_policy_options
from gpuinfer.lab.simulate import Arrivals, ClosedLoop, Mix, SimulationOutcome, simulate
from gpuinfer.lab.simulate.event_loop import Drift
from gpuinfer.lab.simulate.fitting import Fitted, fitted, replayed
from gpuinfer.lab.simulate.simulated_router import QUEUE_LIMIT, RoutingSetup

NAME = "simulate"
REQUESTS = 100_000  # of a load that would never end
MAX_ROWS = 64
MOST = 1e9  # rows of a step, and seconds or a factor of a drift


class SimulationOptions(api.Options):
    """The flags of `gpuinfer simulate`."""

    arrivals: Literal["poisson", "constant", "bursty", "closed", "trace"] | None = Field(
        None, description="the load; default: poisson, closed with --clients, trace with --replay"
    )
    rate: float | None = Field(None, gt=0, le=1e9, description="rows per second that arrive, whatever happens")
    schedule: list[str] | None = Field(None, description="rates, each for a time: 200:8s,3000:8s,200:8s")
    burst: float = Field(5.0, gt=1, le=1e6, description="rate in a burst, in mean rates; silence between bursts")
    burst_s: float = Field(0.1, gt=0, le=1e6, description="mean length of a burst, as 100ms")
    sources: int = Field(0, ge=0, le=10**6, description="clients that an open load names; 0: none")
    clients: int | None = Field(None, ge=1, le=10**6, description="that ask, wait for the answer, and ask again")
    blocks: int = Field(
        1, ge=1, le=10**4, description="clients that share a thread, as a worker's blocks do, and think in turn"
    )
    think: float = Field(0.0, ge=0, le=1e6, description="mean time from an answer to the client's next request")
    think_time: Literal["exponential", "constant"] = Field("exponential", description="how think times spread")
    replay: Path | None = Field(None, description="a trace whose arrivals are replayed")
    rows: str = Field("1", description="of a request: 8, or 1-8 for any number of them")
    classes: str | None = Field(None, description="shares of the classes: high=0.2,normal=0.4,low=0.4")
    timeout: float | None = Field(None, gt=0, le=1e9, allow_inf_nan=False, description="that each request allows")
    requests: int | None = Field(
        None, ge=1, le=10**12, description="simulated; default: 100,000, or all of a trace or schedule"
    )
    duration: float | None = Field(None, gt=0, le=1e9, allow_inf_nan=False, description="of the arrivals, as 60s")
    warmup: float = Field(0.05, ge=0, lt=1, description="share of the requests that is not counted")
    alpha: float | None = Field(None, ge=0, le=1e6, allow_inf_nan=False, description="time of a row, as 50us")
    beta: float | None = Field(
        None, ge=0, le=1e6, allow_inf_nan=False, description="time of a batch however small, as 2ms"
    )
    turn: float | None = Field(
        None, ge=0, le=1e6, allow_inf_nan=False, description="the engine's own time for a batch, as 200us"
    )
    steps: str | None = Field(None, description="more time for each so many rows: 64:1ms")
    jitter: float | None = Field(
        None, ge=0, le=10, allow_inf_nan=False, description="spread of the batch times, as 0.1"
    )
    failures: float | None = Field(None, ge=0, lt=1, description="share of the batches that fail")
    service: Path | None = Field(None, description="a report or a trace, to which the service times are fitted")
    drift: str | None = Field(None, description="batches take longer from a time on: 2x@30s")
    max_rows: int | None = Field(
        None, ge=1, le=10**9, description="in one batch; default: 64, or as in the --service trace"
    )
    in_flight: int | None = Field(None, ge=1, le=10**4, description="batches at once; default: 1, or as in the trace")
    replicas: int = Field(1, ge=1, le=10**4, description="servers behind the router")
    routing: str = Field(
        "least-loaded",
        description="which replica a request goes to; sticky: all of a client's to one",
        json_schema_extra={"kind": "routing"},
    )
    routing_options: list[str] = Field(
        [],
        description="option of the routing policy, such as margin=4 of sticky; repeatable",
        json_schema_extra={"repeatable": True, "short": "-R"},
    )
    queue: Literal["replica", "global"] = Field(
        "replica", description="where requests wait: at the replica that was chosen, or in the router for the first one"
    )
    max_inputs: int | None = Field(
        None, ge=1, le=10**6, description="requests under way at one replica, at most [none; its rows with a queue]"
    )
    queue_limit: int = Field(QUEUE_LIMIT, ge=1, le=10**9, description="requests that wait in the router, at most")
    target: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="p95 latency; default: the strategy's latency_target"
    )
    solve: Literal["replicas"] | None = Field(None, description="find the smallest number that meets the target")
    plot: Path | None = Field(None, description="draw the result: a file .png or .svg")


@dataclass(frozen=True, slots=True)
class Scenario:
    """One simulation, built and checked, not begun."""

    labels: Mapping[str, str]  # the settings in which it differs from the others
    title: str
    strategy: str
    arrivals: Arrivals
    fitted: Fitted
    limits: Limits
    target_s: float | None
    options: SimulationOptions
    seed: int
    max_queue_rows: int | None
    factory: Callable[[], Strategy]
    drift: Drift
    routing: RoutingSetup

    def simulate(self, replicas: int | None = None, recorder: Callable[[], Journal] | None = None) -> SimulationOutcome:
        options = self.options
        endless = options.duration is None and self.arrivals.duration is None and self.arrivals.count is None
        return simulate(
            self.arrivals,
            self.fitted.service,
            self.factory,
            self.limits,
            replicas=replicas or options.replicas,
            routing=self.routing,
            seed=self.seed,
            requests=REQUESTS if endless and options.requests is None else options.requests,
            duration=options.duration,
            warmup=options.warmup,
            max_queue_rows=self.max_queue_rows,
            drift=self.drift,
            recorder=recorder,
        )


def case(values: Mapping[str, Any], labels: Mapping[str, str]) -> Scenario:
    """The simulation that these flags describe (None: not given). Raises `UsageError` or `ValidationError`."""
    merged = merge(NAME, {**values, "strategy_options": None})
    name = merged.common.strategy
    words = addressed(values.get("strategy_options") or [], "strategies", name)
    merged = merge(NAME, {**values, "strategy_options": words})
    options = SimulationOptions(**check(SimulationOptions, merged.table(NAME), NAME))
    plugin = registry.load("strategies", name)
    given = merged.options("strategies", name, plugin)
    setup = Setup(seed=merged.common.seed)
    built = blame.make(plugin, setup, given)
    load, backend = arrivals(options), service(options)
    max_rows = options.max_rows or (backend.limits.max_rows if backend.limits else MAX_ROWS)
    limits = Limits(
        max_rows,
        options.in_flight or (backend.limits.in_flight if backend.limits else 1),
        backend.limits.slots if backend.limits else None,
    )
    most = limits.max_rows if limits.slots is None else min(limits.max_rows, limits.slots)
    if load.most_rows > most:
        raise UsageError(
            f"requests of {load.most_rows} rows: a batch takes {most}. Raise --max-rows, or ask for fewer."
        )
    policy = option_pairs(options.routing_options, "-R", "routing")
    routing_options = {key.removeprefix("routing."): one for key, one in policy.items()}
    routing = RoutingSetup(
        options.routing,
        options.queue,
        options.max_inputs,
        options.queue_limit,
        check_policy_options(options.routing, routing_options),
    )
    target = options.target or built.latency_target
    if options.solve and options.replicas > 1:
        raise UsageError(f"--solve {options.solve} finds the number, and --replicas gives one. Leave one of them out.")
    if options.solve and target is None:
        raise UsageError(f"--solve {options.solve} needs a target. Give --target 50ms, or -S latency_target=50ms.")
    if isinstance(load, ClosedLoop):
        said = f"{load.clients} client{'s' if load.clients > 1 else ''}"
    else:
        rate = f" {load.rows_per_s:,.0f} rows/s" if load.rows_per_s else ""
        said = f"{_kind(options)}{rate}"
    found = []
    for word in options.drift.split(",") if options.drift else ():
        factor, _, at = word.partition("@")
        cure = "a factor and a time, such as 2x@30s"
        found.append(
            (_number("--drift", at, cure), _number("--drift", factor.strip().removesuffix("x"), cure, above=0.0))
        )
    return Scenario(
        labels,
        f"{said} · {name} · {options.replicas} replica{'s' if options.replicas > 1 else ''}",
        name,
        load,
        backend,
        limits,
        target,
        options,
        merged.common.seed,
        merged.common.max_queue_rows,
        partial(plugin, setup, **given),
        sorted(found),
        routing,
    )


def common_settings(values: Mapping[str, Any]) -> settings.Common:
    """The settings that every command knows."""
    return merge(NAME, {**values, "strategy_options": None}).common


T = TypeVar("T")
_kept: dict[tuple[object, ...], Any] = {}


def read_once(read: Callable[[Path], T], path: Path) -> T:
    """What is read of a file, kept for the next setting of a sweep: a long trace takes seconds, and much memory."""
    try:
        found = path.stat()
    except OSError:
        return read(path)  # which says what is wrong
    key = (read, path.resolve(), found.st_ino, found.st_size, found.st_mtime_ns)
    if key not in _kept:
        for other in [one for one in _kept if one[0] is read]:
            del _kept[other]
        _kept[key] = read(path)
    kept: T = _kept[key]
    return kept


# The load


def arrivals(options: SimulationOptions) -> Arrivals:
    """The same load that `gpuinfer load` makes of such flags. Raises `UsageError` for one that cannot be, or of which
    something is missing.
    """
    kind = _kind(options)
    named = [name for name in ("rate", "schedule", "clients", "replay") if getattr(options, name) is not None]
    needed = {"closed": ["clients"], "trace": ["replay"]}.get(kind, ["rate", "schedule"])
    if not named or (named[0] not in needed and len(named) == 1):
        example = {"clients": "--clients 8", "replay": "--replay FILE, recorded with --trace"}.get(
            needed[0], "--rate 2000, in rows per second"
        )
        unfit = f", not --{named[0]}" if named else ""
        raise UsageError(f"--arrivals {kind} needs --{needed[0]}{unfit}. Give {example}.")
    if len(named) > 1:
        flags = " and ".join(f"--{name}" for name in named)
        raise UsageError(f"{flags} each say what the load is, here or in gpuinfer.toml. Give one of them.")
    refuse_unused(options, named[0])
    if options.replay is not None:
        return read_once(replayed, options.replay)
    classes = classes_of(options.classes) if options.classes else {}
    mix = Mix(parse_rows(options.rows), classes, options.timeout or math.inf, options.sources)
    if options.clients is not None:
        constant = options.think_time == "constant"
        return ClosedLoop(options.clients, options.think, constant=constant, mix=mix, blocks=options.blocks)
    rate = schedule_of(options.schedule) if options.schedule is not None else options.rate
    assert rate is not None
    return open_arrivals(kind, rate, mix, options.burst, options.burst_s)


def _kind(options: SimulationOptions) -> str:
    """The kind of arrivals: --arrivals, or what the other flags imply."""
    if options.arrivals is not None:
        return options.arrivals
    open_load = options.rate is not None or options.schedule is not None
    return "poisson" if open_load else "trace" if options.replay else "closed" if options.clients else "poisson"


# The backend


def service(options: SimulationOptions) -> Fitted:
    """The service model by hand or fitted, and what else the file says. Raises `UsageError`."""
    by_hand = {key: value for key in ("alpha", "beta", "steps") if (value := getattr(options, key)) is not None}
    more = {key: value for key in ("jitter", "failures") if (value := getattr(options, key)) is not None}
    if options.turn is not None:
        more |= {"turn_s": options.turn, "turn_request_s": 0.0}
    if options.service is not None:
        if by_hand:
            raise UsageError(f"--service says how long a batch takes, and so does --{next(iter(by_hand))}. Give one.")
        found = read_once(fitted, options.service)
        return replace(found, service=replace(found.service, **more))
    if not {"alpha", "beta"} & set(by_hand):
        raise UsageError("how long does a batch take? Give --alpha 50us --beta 2ms, say, or --service FILE.")
    if options.steps is not None:
        rows, _, seconds = options.steps.partition(":")
        cure = "rows and a time, such as 64:1ms"
        more |= {"step_rows": _whole("--steps", rows, cure), "step_s": _number("--steps", seconds, cure)}
    return Fitted(ServiceModel(options.alpha or 0.0, options.beta or 0.0, **more))


def _whole(flag: str, text: str, cure: str) -> int:
    value = _number(flag, text, cure)
    if not value.is_integer():
        raise UsageError(f"{flag}: {text} is no whole number. Give {cure}.")
    return int(value)


def _number(flag: str, text: str, cure: str, above: float | None = None) -> float:
    """A number or a time as people write it, 0 or more, or more than `above`."""
    try:
        value = float(natural(text.strip(), float))
    except (TypeError, ValueError):
        raise UsageError(f"{flag}: '{text}' is no number. Give {cure}.") from None
    if not 0 <= value <= MOST:
        raise UsageError(f"{flag}: {text} cannot be. Give {cure}.")
    if above is not None and not value > above:
        raise UsageError(f"{flag}: {text} is not more than {above:g}. Give {cure}.")
    return value


NOT_SWEPT = ("plot", "solve", "routing_options")
COMMON = ("strategy", "seed", "max_queue_rows")


def grid(sweeps: Sequence[str], values: Mapping[str, Any]) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """The flags of each combination, and what is swept in it; the last sweep fastest. Raises `UsageError`."""
    axes: dict[Axis, list[str]] = {}
    words = [split_axis(word) for word in sweeps]
    strategies = [one for key, found in words if key == "strategy" for one in found]
    strategies = strategies or [values.get("strategy") or "dynamic"]
    for word, (key, found) in zip(sweeps, words, strict=True):
        if not (key and found):
            key = word.partition("=")[0].strip() or "rate"
            raise UsageError(f"--sweep {word}: not of the form key=a,b,c. Write --sweep {key}=VALUE,VALUE.")
        flags = [name for name in options.fields_of(SimulationOptions) if name not in NOT_SWEPT]
        owner, dot, option = key.rpartition(".")
        known = dict(_options_of(strategies))
        if not dot and key in (*flags, *COMMON):
            axis = key, ""
        elif not dot and key in known:
            axis = "strategy_options", key
        elif dot and owner == "strategy" and option in known:
            axis = "strategy_options", option
        elif dot and owner in strategies and known.get(option, False):
            axis = "strategy_options", key
        else:
            raise UnknownName("setting to sweep", key, {*flags, *COMMON, *known}, label="Settings")
        if axis in axes:
            raise UsageError(f"--sweep names '{key}' twice. Give all its values in one: --sweep {key}=a,b,c.")
        if not axis[1] and values.get(axis[0]) is not None:
            flag = axis[0].replace("_", "-")
            raise UsageError(f"--sweep and --{flag} both name values of '{key}'. Leave one of them out.")
        axes[axis] = found
    labels = labels_of(axes)
    return [(with_choices(values, one), {labels[axis]: text for axis, text in one.items()}) for one in points(axes)]


def _options_of(strategies: Sequence[str]) -> Iterator[tuple[str, bool]]:
    for name in strategies:
        for option in options.fields_of(registry.load("strategies", name).Options):
            yield option, True

"""Backends and strategies as a program names them, with options in the plugins' own words; errors in Python's words."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpuinfer.api import Backend, Priority, Setup, Strategy
from gpuinfer.config import blame, registry
from gpuinfer.config.options import GivenValue, check, natural
from gpuinfer.config.settings import Common
from gpuinfer.errors import GpuinferError, RequestError, UsageError, nearest

VERBOSE = re.compile(r"Run it (?:again )?with -vv to see where(?: it comes from)?")
PLUGIN_FLAG = re.compile(r"(?<![\w-])-[BS] ([a-z_]+)(?:=(\S*[^\s.,;:)]))?")
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z-]+)(?:[ =]([A-Za-z0-9_:./@%-]*[A-Za-z0-9_%/]))?")
SWITCHES = frozenset({"deterministic", "download", "oversubscribe", "resume"})  # flags without a value
PLAIN_WORDS = frozenset(
    {"with", "is", "names", "and", "or", "for", "to", "out", "a", "of", "in", "on", "says", "has", "needs"}
)


def dynamic(max_wait: float | str | None = None, *, max_rows: int | str | None = None) -> Strategy:
    """The strategy `dynamic`: a batch is cut when the device has room and nothing more is worth waiting for.

    `max_wait`: seconds ("20ms") that a request may wait for company; default: learnt. `max_rows`: rows in one batch.
    """
    return strategy_of("dynamic", _given(max_wait=waited_s("max_wait", max_wait), max_rows=max_rows))


def adaptive(latency_target: float | str | None = None) -> Strategy:
    """The strategy `adaptive`: batches as large as keep 95 of 100 requests below `latency_target` seconds ("50ms")."""
    return strategy_of("adaptive", _given(latency_target=waited_s("latency_target", latency_target)))


def by_priority(
    shares: Sequence[float] | Mapping[str, float] | str | None = None,
    *,
    mode: str | None = None,
    ageing: float | str | None = None,
) -> Strategy:
    """The strategy `priority`: classes `high`, `normal` and `low` with `shares` percent of the rows while all wait.

    `mode`: "shares" or "strict", in which the highest class goes first, always. `ageing`: seconds of waiting after
    which no newer request goes first.
    """
    if isinstance(shares, Mapping):
        shares = ",".join(f"{name}={share:g}" for name, share in shares.items())
    return strategy_of("priority", _given(shares=shares, mode=mode, ageing=waited_s("ageing", ageing)))


def waited_s(name: str, given: float | str | None) -> float | None:
    """Seconds of an option, which may be written as "20ms" and may be 0. Raises `UsageError`."""
    return 0.0 if given == 0 else seconds_of(name, given)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def strategy_name(strategy: Strategy) -> str:
    """As which it is installed: "priority" for `ByPriority`."""
    return type(strategy).__name__.lower().removeprefix("by")


def strategy_of(
    given: Strategy | str | Callable[[], Strategy], options: Mapping[str, Any] | None = None, setup: Setup | None = None
) -> Strategy:
    """A new strategy, by name, or of the class and options of the one that is given. Raises `UsageError`."""
    if given in (dynamic, adaptive, by_priority):
        given = given()  # as people write it who think of a class
    if isinstance(given, Strategy):
        return type(given)(setup or given.setup, **given.options.model_dump())
    if not isinstance(given, str):
        raise UsageError(
            f"strategy={given!r} is no strategy. Give a name ({', '.join(registry.names('strategies'))}) or an object "
            'such as gpuinfer.Adaptive(latency_target="50ms").'
        )
    made: Strategy = _made("strategies", given, setup or Setup(), options or {})
    return made


def backend_of(name: str, setup: Setup, options: Mapping[str, Any]) -> Backend:
    """The backend of this name, for the model of `setup`. Raises `UsageError`."""
    if not isinstance(name, str):
        raise UsageError(f"backend={name!r} is no name. Give one of {', '.join(registry.names('backends'))}.")
    with in_python_words():
        kind = registry.load("backends", name)
        if setup.model is not None and setup.model.kind not in kind.serves:
            raise UsageError(
                f'backend="{name}" serves {" and ".join(kind.serves)}, and this is a model of {setup.model.kind}. '
                f"Choose another: {', '.join(registry.names('backends'))}."
            )
        if not kind.several_devices:
            setup.device  # noqa: B018  raises for several
    made: Backend = _made("backends", name, setup, options)
    return made


OF_OTHERS = {
    **dict.fromkeys(("max_batch_size", "batch_size", "max_batch"), "max_rows=…"),
    **dict.fromkeys(
        ("max_wait", "batch_timeout", "batch_wait_timeout_s", "max_latency_ms", "timeout_ms"),
        'strategy=gpuinfer.Dynamic(max_wait="5ms")',
    ),
    **dict.fromkeys(("latency_target", "latency", "max_latency"), 'strategy=gpuinfer.Adaptive(latency_target="50ms")'),
    **dict.fromkeys(("device", "gpus", "gpu"), "devices=…"),
    **dict.fromkeys(("queue_size", "max_queue", "max_queue_size"), "max_queue_rows=…"),
    **dict.fromkeys(("pad", "padding", "dynamic_shapes"), 'ragged="pad"'),
    "timeout": "the timeout of predict, submit or `await batcher(row, timeout=…)`",
}
"""Options of other batchers → ours."""


def checked_options(backend: str, options: Mapping[str, Any], own: Collection[str]) -> None:
    """Raises `UsageError` for an option that neither the batcher has (`own`) nor its backend, with the nearest."""
    if not options:
        return
    with in_python_words():
        known = registry.load("backends", backend).Options.model_fields
    for name, value in options.items():
        if name in known:
            continue
        ours = OF_OTHERS.get(name, "")
        near = nearest(name, [*own, *known])
        hint = f" That is {ours} here." if ours else f" Did you mean '{near}'?" if near else ""
        of_rows = sorted({*own, *known} - {"self", "model", "options"} - OF_TEXT)
        raise UsageError(
            f"{name}={value!r:.60}: Batcher has no option '{name}' on the backend '{backend}'.{hint} "
            f"Options: {', '.join(of_rows)}."
        )


OF_TEXT = frozenset(
    {
        *("adapters", "context", "draft", "max_adapters", "pages", "slots"),
        *("speculate", "speculate_tokens", "step_tokens", "weights"),
    }
)
"""Options of backends that say nothing of rows."""


def _made(kind: str, name: str, setup: Setup, options: Mapping[str, Any]) -> Any:
    with in_python_words():
        plugin = registry.load(kind, name)
        given = {key: GivenValue(value, f"{key}={value!r}") for key, value in options.items()}
        values = check(plugin.Options, given, f"{registry.KINDS[kind]} '{name}'")
        return blame.make(plugin, setup, values)


def setup_from(**fields: Any) -> Setup:
    """A `Setup` with these fields; `devices` may be one name, a list of names or torch devices. None: the default."""
    fields = {name: value for name, value in fields.items() if value is not None}
    if "devices" in fields:
        devices = fields["devices"]
        if isinstance(devices, list | tuple) and not devices:
            raise UsageError(f'devices={devices!r} names none. Give "auto", "cpu", "cuda:0", or a list of them.')
        listed = (
            devices.split(",")
            if isinstance(devices, str)
            else devices
            if isinstance(devices, list | tuple)
            else [devices]
        )
        fields["devices"] = tuple(f"cuda:{one}" if isinstance(one, int) else str(one).strip() for one in listed)
    if "dtype" in fields:
        fields["dtype"] = str(fields["dtype"]).removeprefix("torch.")
    return replace(Setup(), **fields)


def checked_types(**options: tuple[Any, Any, str]) -> None:
    """Each name with its value, what it must be (types, as for `isinstance`), and the cure. Raises `UsageError`. True
    and False are no numbers.
    """
    for name, (value, kinds, cure) in options.items():
        is_number = isinstance(value, bool) and kinds is not bool
        if is_number or not isinstance(value, kinds):
            raise UsageError(f"{name}={value!r:.60} is of {type(value).__name__}. {cure}")


MOST_SEED = 1 << 63


def checked_seed(seed: Any) -> None:
    """Raises `UsageError` for what is no seed."""
    if type(seed) is not int or not 0 <= seed < MOST_SEED:
        raise UsageError(f"seed={seed!r:.60} is no seed. Give a whole number from 0 on.")


def seconds_of(name: str, given: float | str | None) -> float | None:
    """Seconds of a timeout, which may be written as "200ms". Raises `UsageError`."""
    if given is None:
        return None
    found = natural(given, float)
    if not isinstance(found, int | float) or not found > 0:
        raise UsageError(f'{name}={given!r} is no time. Give seconds, or a text such as "200ms".')
    return float(found)


def priority_of(given: Priority | str) -> Priority:
    """The class that a caller means: "high", "normal", "low". Raises `RequestError`."""
    if isinstance(given, Priority):
        return given
    try:
        return Priority[str(given).upper()]
    except KeyError:
        raise RequestError(f'priority={given!r} is no class of requests. Give "high", "normal" or "low".') from None


def python_words(message: str) -> str:
    """A message that names options as the command line does, with the same options as Python writes them."""

    def option(found: re.Match[str]) -> str:
        name, value = found[1].replace("-", "_"), found[2]
        if name.removeprefix("no_") not in _known_options():
            return found[0]  # of another program: the user's own text, say
        name = {"device": "devices"}.get(name, name)
        if name in SWITCHES or name.startswith("no_"):
            switch = f"{name.removeprefix('no_')}={not name.startswith('no_')}"
            return switch if value is None else f"{switch} {value}"
        if value is None or value in PLAIN_WORDS:
            return f"{name}{'' if value is None else ' ' + value}"
        return f"{name}={value}" if value.replace(".", "").isdigit() else f'{name}="{value}"'

    message = VERBOSE.sub("`error.__cause__` says where", message)
    return FLAG.sub(option, PLUGIN_FLAG.sub(lambda found: found[1] + (f"={found[2]}" if found[2] else ""), message))


@functools.cache
def _known_options() -> frozenset[str]:
    """The names of all options that flags have: those of every run, and those of the plugins that can be loaded."""
    names = {"device", "model", "features", "host", "port", "tool_format", *Common.model_fields}
    for kind in ("workloads", "backends", "strategies"):
        for name in registry.names(kind):
            with contextlib.suppress(Exception):  # a plugin that cannot be imported has no options here
                names |= registry.load(kind, name).Options.model_fields.keys()
    return frozenset(names)


@contextlib.contextmanager
def in_python_words() -> Iterator[None]:
    """Errors that leave the body name options as Python writes them."""
    try:
        yield
    except GpuinferError as error:
        raise reworded(error) from error.__cause__


def reworded(error: GpuinferError) -> GpuinferError:
    """The same error, whose message names options as Python writes them."""
    if error.args and isinstance(error.args[0], str):
        error.args = (python_words(error.args[0]), *error.args[1:])
    return error

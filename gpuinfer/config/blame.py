"""Whose fault it was: a plugin's name and package, and the error that says what it raised, in words for people."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from typing import Any, TypeVar

from pydantic import ValidationError

from gpuinfer import api
from gpuinfer.api import Setup
from gpuinfer.config import registry
from gpuinfer.errors import BackendError, GpuinferError, StrategyError, WorkError, WorkloadError, unwrap
from gpuinfer.host import error_text

log = logging.getLogger(__name__)

P = TypeVar("P", bound=api.Plugin)

OURS = "gpuinfer"  # the package whose faults are to be reported
FAILURES: Mapping[str, type[WorkError]] = {
    "backends": BackendError,
    "strategies": StrategyError,
    "workloads": WorkloadError,
    "decoders": BackendError,  # of its row alone: for the client, the model has failed
}


def who(plugin: Any) -> str:
    """Such as `backend 'echo' (package gpuinfer-echo 0.1)`, of a plugin or its class; of one that no package offers,
    `backend 'Echo' (module my_tests)`.
    """
    kind = _class_of(plugin)
    if (record := record_of(kind)) is not None:
        return f"{registry.KINDS[record.kind]} '{record.name}' (package {record.package})"
    return f"{_word(kind)} '{kind.__name__}' (module {kind.__module__})"


def record_of(kind: type) -> registry.PluginRecord | None:
    """The offer that names this class. Imports nothing: what has been imported to make the class is there already."""
    return _record_of(kind, tuple(sys.path))


def owner_of(module: str) -> str:
    """Whose module it is: `package my-models 1.2` when that was installed, else the file that it lies in.

    Imports nothing. Empty when it is not known.
    """
    top = module.partition(".")[0]
    if (package := _package_of(top)) is not None:
        return f"package {package.name} {package.version}"
    try:
        found = sys.modules[module].__spec__ if module in sys.modules else find_spec(top)
    except (ImportError, ValueError):
        return ""
    return found.origin or "" if found is not None else ""


def _package_of(top: str) -> metadata.Distribution | None:
    """Which one installed this module. `metadata.packages_distributions` says the same of all modules there are, by a
    path of its own for each file of each package.
    """
    in_record = re.compile(rf"^{re.escape(top)}(?:/|\.py,|\.[\w.-]*so,)", re.MULTILINE)
    for one in metadata.distributions():
        declared = (one.read_text("top_level.txt") or "").split()
        if top in declared or (not declared and in_record.search(one.read_text("RECORD") or "")):
            return one
    return None


@functools.lru_cache(maxsize=64)
def _record_of(kind: type, path: tuple[str, ...]) -> registry.PluginRecord | None:
    return next((record for record in registry.listing() if _named_by(record.module) is kind), None)


def cure_for(plugin: Any) -> str:
    """What to do about a plugin that does what it may not."""
    record = record_of(_class_of(plugin))
    report = " and report it" if record is not None and record.distribution == OURS else ""
    return f"Run it again with -vv to see where{report or check_hint(plugin, ', or check it with')}."


def check_hint(plugin: Any, words: str = ", check it with") -> str:
    """How to check a plugin that somebody else's package offers; empty for any other."""
    record = record_of(_class_of(plugin))
    theirs = record is not None and record.distribution != OURS
    return f"{words} `gpuinfer plugins check {record.distribution}`" if record is not None and theirs else ""


def failure(plugin: Any, what: str) -> WorkError:
    """The error of its kind that says what a plugin did wrong: `raised in cut_at`, say."""
    kind = _class_of(plugin)
    made = FAILURES.get(_kind_of(kind), WorkError)
    return made(f"{who(plugin)}: {what.rstrip('.')}. {cure_for(plugin)}")


def raised_by(plugin: Any, method: str, error: BaseException) -> WorkError:
    """The error that says what a plugin's method raised; that is its cause."""
    made = failure(plugin, f"{method} raised {error_text.short_message(error)}")
    made.__cause__ = error
    return made


def warn(plugin: Any, method: str, error: BaseException) -> None:
    """Say what a plugin raised where nothing depends on it; with -vv also where."""
    log.warning("%s: %s raised %s. %s", who(plugin), method, error_text.short_message(error), cure_for(plugin))
    log.debug("%s", "".join(traceback.format_exception(error)))


class WarnOnce:
    """Says what plugins raise where nothing depends on it: once for each class of plugin and each of its methods."""

    def __init__(self) -> None:
        self._warned: set[tuple[type, str]] = set()

    def __call__(self, plugin: Any, method: str, error: BaseException) -> None:
        if (key := (type(plugin), method)) not in self._warned:
            self._warned.add(key)
            warn(plugin, method, error)


@contextlib.contextmanager
def blaming(plugin: Any, method: str) -> Iterator[None]:
    """Say of what is raised inside whose it is. Errors of ours speak for themselves, and so do refused options."""
    try:
        yield
    except (Exception, SystemExit) as error:
        first = unwrap(error)
        if isinstance(first, GpuinferError | ValidationError | BrokenPipeError):
            raise
        raise raised_by(plugin, method, first) from error


@dataclass(frozen=True, slots=True)
class PluginCall:
    """A call of a plugin that has not come back."""

    number: int
    plugin: Any
    method: str


_numbers = itertools.count()
_within: dict[int, PluginCall] = {}  # by the thread that has called


@contextlib.contextmanager
def calling_within(plugin: Any, method: str) -> Iterator[None]:
    """As `calling`, within what another plugin does: it is this one that keeps others waiting when it does not come
    back (`calls_within`).
    """
    thread = threading.get_ident()
    before, _within[thread] = _within.get(thread), PluginCall(next(_numbers), plugin, method)
    try:
        with blaming(plugin, method):
            yield
    finally:
        if before is None:
            del _within[thread]
        else:
            _within[thread] = before


def calls_within() -> list[PluginCall]:
    """Those that are under way now, in any thread. Any thread may ask."""
    return list(_within.values())


def make(kind: type[P], setup: Setup, options: Mapping[str, Any]) -> P:
    """A plugin of this class. Raises `UsageError` and `ValidationError` as it does; what else it raises is its own."""
    with blaming(kind, "__init__"):
        return kind(setup, **options)


def completed_setup(workload: api.Workload, setup: Setup) -> Setup:
    """The setup with what the workload says of it: its model, its processes, and whether answers are to be the same in
    any batch. For its backend and strategy. Raises as `make` does.
    """
    with blaming(workload, "model"):
        model = workload.model()
    with blaming(workload, "processes"):
        processes = workload.processes
    return replace(setup, model=model, processes=processes, deterministic=workload.deterministic)


def _class_of(plugin: Any) -> type:
    """The class to name: of a plugin that only passes on to another one that other's, which it has as `acts_for`."""
    if isinstance(plugin, type):
        return plugin
    acting = plugin.acts_for if isinstance(plugin, api.Plugin) else None
    return acting or type(plugin)


def _named_by(target: str) -> Any:
    """What `module:attribute` names, if its module has been imported."""
    module, _, attributes = target.partition("[")[0].strip().partition(":")
    found: Any = sys.modules.get(module)
    for attribute in filter(None, attributes.strip().split(".")):
        found = getattr(found, attribute, None)
    return found


def _word(kind: type) -> str:
    """`backend` for a class of backends; of what is none of the kinds that have a base, `plugin`."""
    return registry.KINDS.get(_kind_of(kind), "plugin")


def _kind_of(kind: type) -> str:
    """Which of `registry.BASES` a class derives from; empty for none."""
    return next((many for many in registry.BASES if issubclass(kind, registry.base_of(many))), "")

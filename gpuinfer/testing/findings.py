"""One promise each: what was tried, whether it held, and the cure when it did not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gpuinfer.api import Plugin
from gpuinfer.config import settings
from gpuinfer.config.options import fields_of, missing_options
from gpuinfer.errors import GpuinferError
from gpuinfer.host import error_text

T = TypeVar("T")

POLL_S = 0.02  # between two checks whether a check hangs
SLACK = 0.5  # of a check's limit: so much later it is taken to block

FLAGS = (
    "backend_options",
    "strategy_options",
    "launcher_options",
    "config",
    "help",
)  # of every command, and no settings


@dataclass(frozen=True, slots=True)
class Finding:
    """`name` says what a plugin promises; `detail` is empty, a remark, or what broke the promise and the cure.

    One that is `skipped` was not tried, since another that it rests on does not hold.
    """

    name: str
    ok: bool
    detail: str = ""
    skipped: bool = False

    def of(self, plugin: str) -> Finding:
        """The same finding, named after the plugin it is about."""
        return replace(self, name=f"{plugin}: {self.name}")


class Examination:
    """Makes one check after the other, each within `limit_s` seconds, and collects what it finds.

    `begin` gets the name and the limit of each check before it is made, `found` each finding as soon as it is there.
    """

    def __init__(
        self,
        limit_s: float,
        begin: Callable[[str, float], None] = lambda name, limit_s: None,
        found: Callable[[Finding], None] = lambda finding: None,
    ) -> None:
        self.limit_s = limit_s
        self.findings: list[Finding] = []
        self.hung = False  # the last check did not come back in time: what rests on the same would not either
        self.now = ""  # the check that is being made
        self.due = time.monotonic() + limit_s  # when it must have come back
        self._begin, self._found, self._limit_s = begin, found, limit_s
        self._left_behind = False

    def check(self, name: str, fault_of: Callable[[], str | None], limit_s: float | None = None) -> bool:
        """`fault_of` returns what is wrong, or None. What it raises is wrong too."""
        self._enter(name, limit_s)
        try:
            fault = fault_of()
        except Exception as error:  # noqa: BLE001 (the code under test may raise anything)
            fault = raised(error)
        return self.add(Finding(name, fault is None, fault or ""))

    async def check_async(
        self, name: str, fault_of: Callable[[], Awaitable[str | None]], limit_s: float | None = None
    ) -> bool:
        """Like `check`; not to end in time is wrong too."""
        self._enter(name, limit_s)
        try:
            fault = await asyncio.wait_for(fault_of(), limit_s or self.limit_s)
        except TimeoutError:
            self.hung = time.monotonic() >= self.due
            fault = f"did not end within {limit_s or self.limit_s:g} s. Give every wait an end, or allow it more time."
        except Exception as error:  # noqa: BLE001
            fault = raised(error)
        return self.add(Finding(name, fault is None, fault or ""))

    def skip(self, name: str, reason: str) -> None:
        self.add(Finding(name, True, f"not tried: {reason}", skipped=True))

    def add(self, finding: Finding) -> bool:
        if not self._left_behind:
            self.findings.append(finding)
            self._found(finding)
        self.due = time.monotonic() + self.limit_s
        return finding.ok

    def leave_behind(self) -> None:
        """Whatever the present check still comes to is not heard."""
        what = f"'{self.now}' did not come back within {self._limit_s:g} s"
        cure = "Await instead of blocking (asyncio.to_thread helps), or allow it more time."
        self.add(Finding("never blocks", False, f"{what}. {cure}"))
        self._left_behind = True

    def _enter(self, name: str, limit_s: float | None = None) -> None:
        self.now, self.hung, self._limit_s = name, False, limit_s or self.limit_s
        self.due = time.monotonic() + self._limit_s
        self._begin(name, self._limit_s)


def raised(error: BaseException) -> str:
    """What an error says: ours as it is, another with its kind."""
    return (
        error_text.safe_str(error)
        if isinstance(error, GpuinferError)
        else f"raised {error_text.full_message(error)}. It must not raise here."
    )


def assert_ok(findings: Iterable[Finding]) -> None:
    """Raises `AssertionError` with the promises that were not kept."""
    broken = [f"{finding.name}: {finding.detail}" for finding in findings if not finding.ok]
    if broken:
        raise AssertionError("\n".join(broken))


def run_bounded(examine: Callable[[Examination], None], examiner: Examination) -> list[Finding]:
    """What `examine` finds, on a thread that is left behind when a check blocks: no timeout ends such code."""
    thread = threading.Thread(target=examine, args=(examiner,), daemon=True, name="gpuinfer.testing")
    thread.start()
    while thread.is_alive():
        thread.join(POLL_S)
        if thread.is_alive() and time.monotonic() > examiner.due + SLACK * examiner.limit_s:
            examiner.leave_behind()
            break
    return examiner.findings


def check_build(make: Callable[[], T], base: type, examiner: Examination) -> T | None:
    """What `make` builds, where that is a `base`; else None."""
    built: list[T] = []

    def fault_of_build() -> str | None:
        built.append(make())
        if isinstance(built[0], base):
            return None
        return f"{built[0]!r:.80} is no {base.__module__}.{base.__qualname__}. Derive it from that."

    return built[0] if examiner.check("builds", fault_of_build) else None


def check_options(plugin: Plugin, examiner: Examination) -> None:
    """Whether a wrong `-B key=value` is refused instead of dropped in silence, and no option hides a setting."""
    kind = type(plugin)
    check_unknown_options(kind.Options, plugin.options, lambda **values: kind(plugin.setup, **values), examiner)
    examiner.check("has options of its own names", lambda: _fault_of_names(plugin))


def check_unknown_options(kind: Any, options: Any, build: Callable[..., object], examiner: Examination) -> None:
    """Whether `build` refuses an option that is no field of `kind`; `options` are those of a plugin that was built."""

    def fault_of_options() -> str | None:
        cure = "Derive `class Options(gpuinfer.api.Options)`, and let __init__ of the base class build it."
        if not (isinstance(kind, type) and issubclass(kind, BaseModel) and isinstance(options, BaseModel)):
            return f"its Options is no pydantic model. {cure}"
        try:
            build(**options.model_dump(), no_such_option=1)
        except (ValidationError, TypeError):
            return None
        return f"it takes an option that it does not have without a word. {cure}"

    examiner.check("refuses unknown options", fault_of_options)


def wanting(plugin: type[Plugin], given: Iterable[str]) -> str | None:
    """What to say when options are needed to build it that were not given."""
    names = missing_options(plugin.Options, given) if issubclass(plugin.Options, BaseModel) else []
    words = " ".join(f"--set {name}=VALUE" for name in names)
    return f"needs {', '.join(names)}, which has no default. Check it with {words}." if names else None


def reserved_names() -> set[str]:
    """Of the flags of every run: no option may have them."""
    return {*fields_of(settings.Common), *FLAGS} - {"disabled_plugins"}


def _fault_of_names(plugin: Plugin) -> str | None:
    """An option `device` of a backend is not what `--device` sets, and of a workload it cannot be."""
    hidden = sorted(reserved_names().intersection(fields_of(type(plugin).Options)))
    if not hidden:
        return None
    return (
        f"its option '{hidden[0]}' has the name of a setting of every run, and `--{hidden[0].replace('_', '-')}` does "
        f"not set it. Rename it; the setting itself is in self.setup, as far as a plugin needs it."
    )

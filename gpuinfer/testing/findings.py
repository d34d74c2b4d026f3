"""One promise each: what was tried, whether it held, and the cure when it did not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

from pydantic import BaseModel, ValidationError

from gpuinfer.api import Plugin


@dataclass(frozen=True, slots=True)
class Finding:
    """`name` says what a plugin promises; `detail` is empty, a remark, or what broke the promise and the cure."""

    name: str
    ok: bool
    detail: str = ""

    def of(self, plugin: str) -> Finding:
        """The same finding, named after the plugin it is about."""
        return replace(self, name=f"{plugin}: {self.name}")


def assert_ok(findings: Iterable[Finding]) -> None:
    """Raises `AssertionError` with the promises that were not kept."""
    broken = [f"{finding.name}: {finding.detail}" for finding in findings if not finding.ok]
    if broken:
        raise AssertionError("\n".join(broken))


def examine(name: str, check: Callable[[], str | None]) -> Finding:
    """`check` returns what is wrong, or None. What it raises is wrong too."""
    try:
        fault = check()
    except Exception as error:  # noqa: BLE001 (the code under test may raise anything)
        fault = f"raised {error!r}. It must not raise here."
    return Finding(name, fault is None, fault or "")


async def examine_async(name: str, check: Callable[[], Awaitable[str | None]], timeout_s: float) -> Finding:
    """Like `examine`; not to end in time is wrong too."""
    try:
        fault = await asyncio.wait_for(check(), timeout_s)
    except TimeoutError:
        fault = f"did not end within {timeout_s:g} s. Give every wait in it an end, or pass a longer timeout_s."
    except Exception as error:  # noqa: BLE001
        fault = f"raised {error!r}. It must not raise here."
    return Finding(name, fault is None, fault or "")


def run_bounded(check: Callable[[list[Finding]], None], timeout_s: float) -> list[Finding]:
    """What `check` finds within `timeout_s`, on a thread that is left behind if it hangs: no timeout ends such code."""
    findings: list[Finding] = []
    thread = threading.Thread(target=check, args=(findings,), daemon=True, name="gpuinfer.testing")
    thread.start()
    thread.join(timeout_s)
    if not thread.is_alive():
        return findings
    fault = f"did not come back within {timeout_s:g} s. Await instead of blocking, or use asyncio.to_thread."
    return [*findings, Finding("never blocks", False, fault)]


def check_options(plugin: Plugin) -> list[Finding]:
    """Whether a wrong `-B key=value` is refused instead of dropped in silence."""
    return [examine("refuses unknown options", lambda: _fault_of_options(plugin))]


def _fault_of_options(plugin: Plugin) -> str | None:
    cure = "Derive `class Options(gpuinfer.api.Options)`, and let Plugin.__init__ build it."
    if not issubclass(type(plugin).Options, BaseModel):
        return f"its Options is no pydantic model. {cure}"
    try:
        type(plugin)(plugin.setup, **plugin.options.model_dump(), no_such_option=1)
    except ValidationError:
        return None
    return f"it takes an option that it does not have without a word. {cure}"
